"""The traced graph on the reference cache, and the kept weights, give the logits of the source model."""

from __future__ import annotations

import pytest

import reference
import tiny_models
from etkv import _mlx_serialization
from etkv.export import ExportRequest, attention, limits, lowering, mlx, rope, source
from reference import EVERYTHING, Variant

_PROMPT = [tiny_models.IM_START, *b"user\nhow far is it?", tiny_models.EOS, *b"\n"]
_LENGTH = len(_PROMPT)


def _reference(folder):
    """Return the logits [T, vocabulary] of a prompt, with transformers' own attention."""
    import torch

    return torch.from_numpy(reference.logits(reference.load_hf(folder), _PROMPT))


def _traced(request: ExportRequest, folder):
    from etkv.export.forward import Forward
    from etkv.export.packing import Packing
    from etkv.export.scratch import Scratch

    _mlx_serialization.ensure_available()
    origin = source.find(request.model)
    config = source.read_config(origin)
    settled = limits.settle(request, config)
    scratch = Scratch(folder)
    packing = Packing(lowering.packer(request, settled.group_size, scratch), scratch)
    model = source.read_model(origin, config, request.dtype, packing=packing)
    rope.settle(model, settled.max_context)
    step = Forward(model)
    layout = attention.survey(step, step.inputs(3), 256)
    mlx.prepare(model, request, scratch)
    settled = settled.within(layout, request)
    return lowering._trace(step, settled.prefill_chunk).module(), (settled, layout)


def _run(module, facts: tuple[limits.Limits, attention.CacheLayout], steps: list[int]):
    """Return the logits of the traced graph on the wheel's reference cache, in steps of ``steps`` tokens."""
    import torch
    from executorch.extension.llm.cache.reference_cache import CacheConfig, ContiguousReferenceCache
    from executorch.extension.llm.cache.update_and_attend import REGISTRY

    settled, layout = facts
    REGISTRY.install(
        "test",
        ContiguousReferenceCache(
            CacheConfig(
                n_layers=len(layout.kv_heads),
                n_kv_heads=layout.kv_heads[0],
                head_dim=layout.head_dims[0],
                capacity=settled.max_context,
                dtype=torch.float32,
            )
        ),
    )
    logits, start = [], 0
    try:
        with torch.no_grad(), REGISTRY.active("test"):
            for step in steps:
                tokens = torch.tensor([_PROMPT[start : start + step]])
                positions = torch.arange(start, start + step)
                logits.append(module(input_ids=tokens, cache_position=positions)[0].float())
                start += step
    finally:
        REGISTRY.uninstall("test")
    assert start == _LENGTH
    return torch.cat(logits)


# Rows of several windows, layers without rotary embeddings, and experts.
TRACED = ("tiny-gemma3", "tiny-smollm3", "tiny-qwen3-moe")


@pytest.mark.parametrize("name", tiny_models.CONFIGS if EVERYTHING else TRACED)
def test_graph_equals_transformers(tiny, tmp_path, name):
    import torch

    expected = _reference(tiny(name))
    request = ExportRequest(tiny(name), tmp_path / "x.pte", prefill_chunk=64)
    module, facts = _traced(request, tmp_path)
    for steps in ([_LENGTH], [1] * _LENGTH, [7, 2, 1, _LENGTH - 10]):
        torch.testing.assert_close(_run(module, facts, steps), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "quantize"),
    [(name, width) for name in ("tiny-llama", "tiny-qwen3-untied") for width in ("4w", "8w")]
    if EVERYTHING
    else [("tiny-llama", "4w")],
)
def test_kept_weights_are_the_exported_ones(tiny, exported, tmp_path, name, quantize):
    """transformers returns the same logits for the kept folder as the quantized graph."""
    import torch

    kept = exported(name, "f32", quantize) / "hf"
    module, facts = _traced(
        ExportRequest(tiny(name), tmp_path / "x.pte", quantize=quantize, prefill_chunk=64), tmp_path
    )
    actual = _run(module, facts, [_LENGTH])
    torch.testing.assert_close(actual, _reference(kept), rtol=1e-4, atol=1e-4)
    assert (actual - _reference(tiny(name))).abs().max() > 1e-3, "quantization changes something"


def test_kept_weights_have_the_dtype_of_the_program(exported):
    from safetensors import safe_open

    kept = exported("tiny-llama", "bf16") / "hf"
    with safe_open(kept / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.parametrize("name", [name for name in tiny_models.CONFIGS if reference.chosen([Variant(name)])])
def test_mlx_lm_reads_the_kept_folder(exported, name):
    """mlx-lm, another reader of the folder, returns the same logits, so it understands the rotary parameters."""
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import load_model

    kept = exported(name) / "hf"
    model, _ = load_model(kept)
    logits = model(mx.array([_PROMPT]))[0].astype(mx.float32)

    import torch

    torch.testing.assert_close(torch.tensor(logits.tolist()), _reference(kept), rtol=1e-3, atol=1e-3)


def test_gguf_equals_its_source(tiny, tiny_llama_gguf, tmp_path):
    import torch

    module, facts = _traced(ExportRequest(tiny_llama_gguf, tmp_path / "x.pte", prefill_chunk=64), tmp_path)
    actual = _run(module, facts, [5, _LENGTH - 5])
    torch.testing.assert_close(actual, _reference(tiny("tiny-llama")), rtol=1e-4, atol=1e-4)
