"""A quantized program packs all linear layers and experts, including those of GPT-2 and Llama 4. The export reports
other weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import read_models
import tiny_families
import tiny_gguf
from etkv.export import causal, experts, families, hf_folder, packing, scaled_experts
from family_sweep import _write

QUANTIZED = pytest.mark.parametrize("quantize", ["4w", "8da4w"])
"""Quantizations for MLX and for the CPU."""

KINDS = ("Router", "Conv1d", "CohereLayerNorm")
"""Suffixes of the names of layer classes whose two-dimensional weights are never packed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that writes a tiny model of a family to a folder."""

    def write(family: str, **settings: Any) -> Path:
        made = tmp_path_factory.mktemp("unpacked") / "model"
        config = tiny_families.config(family)
        for name, value in settings.items():
            setattr(config, name, value)
        _write(config, made)
        return made

    return write


@QUANTIZED
def test_linear_layers_of_gpt2_are_packed(folder, tmp_path, quantize):
    model = folder("gpt2")
    meant = read_models.plain(model)
    read, made = read_models.packed(model, tmp_path, quantize)
    names = {name for name, _ in packing.layers(read)}
    matrices = {name for name, weight in meant.named_parameters() if weight.dim() == 2}
    assert {f"{name}.weight" for name in names} == matrices | {"lm_head.weight"}
    assert not made.remarks()
    weights = hf_folder._plain_weights(read)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for name in names - {"lm_head"}:
        own = meant.get_submodule(name).weight
        assert weights[f"{name}.weight"].shape == own.shape
        # In 4 bits, the scale of a group is about an eighth of its largest weight.
        assert (weights[f"{name}.weight"] - own).abs().max() < 0.15 * own.abs().max()
    layer, own = read.transformer.h[1].attn.c_attn, meant.transformer.h[1].attn.c_attn
    expected = x @ layer.weight + own.bias
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_integers_of_a_gguf_file_of_gpt2_are_kept(folder, tmp_path):
    file = tiny_gguf.write(folder("gpt2", n_inner=256), tmp_path / "x.gguf", architecture="gpt2", quantize="Q4_0")
    meant = read_models.plain(file)
    read, made = read_models.packed(file, tmp_path, "4w")
    linears = [name for name, layer in packing.layers(read) if layer.etkv_is_transposed]
    assert len(linears) == 8
    assert made.repacked == 0
    for name in linears:
        assert torch.equal(read.get_submodule(name).weight, meant.get_submodule(name).weight)


@QUANTIZED
def test_experts_of_llama4_are_packed(folder, tmp_path, quantize):
    read, made = read_models.packed(folder("llama4_text"), tmp_path, quantize)
    assert not made.remarks()
    assert len(experts.plain_weights(read)) == 4


def test_chosen_experts_of_llama4_suffice():
    """Computing only the chosen experts gives the same outputs as computing all experts, as transformers does."""
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = tiny_families.config("llama4_text")
    generator = torch.Generator().manual_seed(0)
    layer = Llama4TextMoe(config)
    for weight in layer.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    x = torch.randn(1, 9, 64, generator=generator)
    with torch.no_grad():
        expected, logits = layer(x)
        whole = torch.nn.ModuleList([layer])
        scaled_experts.take(whole)
        found, same = layer(x)
    assert type(layer) is scaled_experts.RoutedMoe
    assert config.num_experts_per_tok == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(logits, same)


def test_the_rest_is_named(folder, tmp_path):
    _, made = read_models.packed(folder("deepseek_v3"), tmp_path, "4w")
    assert made.remarks() == [
        "3 matrices stay in float32, with 8,448 weights: model.layers.*.self_attn.kv_b_proj.weight (expands "
        "latents in parts), model.layers.*.mlp.gate.weight (DeepseekV3TopkRouter); linear layers, embeddings and "
        "mixtures of experts are packed"
    ]


def test_families_leave_routers_and_convolutions_alone():
    """In supported families, no other large weights stay unpacked."""
    from transformers import AutoModelForCausalLM

    causal.register()
    left: dict[str, Any] = {}
    for family in families.runs(families.read()["outcomes"]):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_families.config(family))
        scaled_experts.take(model)
        wanted = packing.Packing(object(), None)  # type: ignore[arg-type] # It packs nothing here.
        packed = {module for _, module in wanted._modules(model)}
        for name, module in packing._modules_of_text(model):
            kind = type(module).__name__
            is_latent = name.endswith(".kv_b_proj")
            shapes = [w.shape for w in module.parameters(recurse=False) if w.squeeze().dim() > 1]
            if shapes and module not in packed and not is_latent and not kind.endswith(KINDS):
                left[f"{family}: {name} ({kind})"] = shapes
    assert not left
