"""The exporter's survey of a model: the caches that it finds, and the masks, arguments and sizes that it refuses."""

from __future__ import annotations

import io
import re
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_families
from etkv.errors import EtkvError
from etkv.export import (
    ExportRequest,
    Progress,
    attention,
    check,
    export_program,
    layers,
    lowering,
    position_scale,
    reasons,
)
from etkv.export.attention import CacheLayout
from etkv.export.forward import Forward


def _step(family: str, **changes) -> Forward:
    from transformers import AutoModelForCausalLM

    attention.register()
    config = tiny_families.config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
    return Forward(model.eval())


def _survey(family: str, **changes) -> CacheLayout:
    step = _step(family, **changes)
    return attention.survey(step, step.inputs(3), 256)


def _error(family: str, **changes) -> str:
    step = _step(family, **changes)
    with pytest.raises(EtkvError) as caught, reasons.explained(family, "exported", step.model):
        attention.survey(step, step.inputs(3), 256)
    return str(caught.value).removeprefix(f"model family '{family}' cannot be exported: ")


def test_caches_are_those_of_the_calls():
    """Caches may differ from what the configuration suggests."""
    # JetMoE repeats its keys for each of two experts.
    assert _survey("jetmoe") == CacheLayout([4, 4], [16, 16], [16, 16], [0, 0], [0, 0])
    # Values are smaller than keys.
    assert _survey("minicpm3") == CacheLayout([4, 4], [24, 24], [16, 16], [0, 0], [0, 0])
    # Sizes differ between layers, and one layer has a window.
    layout = _survey("gemma4_text", layer_types=["sliding_attention", "full_attention"])
    assert layout.windows == [24, 0]
    assert len(layout.head_dims) == 2
    # The configuration has a window, but no mask has it.
    assert _survey("llama", sliding_window=64).windows == [0, 0]


def test_layers_that_share_keys_and_values_share_a_cache():
    kinds = ["sliding_attention", "full_attention"] * 2
    step = _step("gemma4_text", num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=2)
    for last_logits in (False, True):
        step = Forward(step.model, last_logits=last_logits)
        assert attention.survey(step, step.inputs(3), 256).windows == [24, 0]
    assert [layer.self_attn.etkv_cache for layer in step.model.model.layers] == [0, 1, 0, 1]


def test_attention_that_is_not_called_or_called_twice():
    assert _error("rwkv") == "the KV cache op cannot replace its attention"
    assert _error("hrm_text") == (
        "model.L_module.layers.0.self_attn: a step runs the same attention several times with different keys and values"
    )


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("doge", "model.layers.0.self_attn"),
        ("bloom", "transformer.h.0.self_attention"),
        ("gpt_neox_japanese", "gpt_neox_japanese.layers.0.attention"),
    ],
)
def test_masks_that_a_family_applies_by_itself(family, module):
    assert _error(family) == (f"{module}: it applies a mask by itself, so the KV cache op cannot replace its attention")


def test_masks_other_than_causal_ones_and_windows():
    from transformers import masking_utils as masks

    sliding = masks.sliding_window_causal_mask_function
    assert attention._window(masks.causal_mask_function) == 0
    assert attention._window(sliding(7)) == 7
    causal, overlay = masks.causal_mask_function, masks.sliding_window_overlay(7)
    others = (
        masks.bidirectional_mask_function,
        masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)),
        masks.or_masks(overlay, causal),
        masks.and_masks(causal, overlay, masks.sliding_window_overlay(3)),
        masks.and_masks(sliding(7), masks.padding_mask_function(torch.ones(1, 8))),
        masks.sliding_window_bidirectional_mask_function(7),
    )
    found = [attention._window(mask) for mask in others]
    # A union of masks has the same parts as the mask of a window, which is an intersection.
    assert found == [None] * len(others)
    assert [attention._chunk(mask) for mask in others] == [None, 8, None, None, None, None]
    assert _error("bert").startswith(
        "bert: its attention has the mask bidirectional_mask_function; expected a causal mask"
    )


@pytest.mark.parametrize("window", [0, -1])
def test_windows_without_positions(window):
    assert _error("mistral", sliding_window=window) == (
        f"model.layers.0.self_attn: its sliding window is {window}, so no token would see itself; for a model "
        "without a window, set sliding_window in config.json to null"
    )
    # Qwen2-MoE creates a mask with a window of 0, and does not use it.
    assert _survey("qwen2_moe").windows == [0, 0]


def test_softcaps_of_zero():
    assert _error("gemma2", attn_logit_softcapping=0.0) == (
        "model.layers.0.self_attn: its attention has a softcap of 0.0; for a model without a softcap, set "
        "attn_logit_softcapping in config.json to null"
    )


def test_queries_are_scaled_by_the_positions_of_a_step():
    kinds = ["full_attention", "chunked_attention"]
    model = _step("llama4_text", no_rope_layers=[0, 1], layer_types=kinds, floor_scale=8, attn_scale=0.5).model
    position_scale.take(model)
    scaled, rotated = (layer.self_attn for layer in model.model.layers)
    assert scaled.attn_temperature_tuning
    ones, positions = torch.ones(1, 4, 3, 16), torch.tensor([23, 6, 7])
    factors = position_scale.scaled(scaled, ones, positions)[0, 0, :, 0]
    torch.testing.assert_close(factors, torch.log1p(torch.tensor([3.0, 0.0, 1.0])) * 0.5 + 1)
    assert position_scale.scaled(rotated, ones, positions) is ones


def test_layers_with_chunks():
    found = _survey("llama4_text", layer_types=["chunked_attention"] * 2)
    assert (found.windows, found.chunks) == ([0, 0], [24, 24])
    layers = ["chunked_attention", "full_attention"]
    assert _survey("llama4_text", layer_types=layers, no_rope_layers=[1, 0]).chunks == [24, 0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"position_bias": torch.zeros(1)}, "its attention has a bias by position, which the KV cache op lacks"),
        ({"block_indices": torch.zeros(1)}, "its attention has a selection of blocks, which the KV cache op lacks"),
        ({"temperature": 2.0}, "its attention has the argument 'temperature', which the KV cache op lacks"),
        ({"dropout": 0.1}, "its attention has dropout, which is for training"),
        ({"is_causal": False}, "its tokens attend to later tokens, but the KV cache op is causal"),
    ],
)
def test_arguments_that_change_the_result(given, said):
    module = types.SimpleNamespace(is_causal=True)
    with pytest.raises(ValueError, match=f"^{said}$"):
        attention._attend(module, None, None, None, None, **given)


def test_sinks_are_one_a_head():
    module, query = types.SimpleNamespace(is_causal=True), torch.zeros(1, 4, 2, 8)
    for name, sinks, shape in [
        ("sinks", torch.zeros(3), "[3]"),
        # Sinks for each token.
        ("sinks", torch.zeros(1, 4, 2, 1), "[1, 4, 2, 1]"),
        ("s_aux", torch.zeros(1, 4), "[1, 4]"),
    ]:
        said = f"its attention has learned sinks of shape {shape}; the KV cache op has one for each of 4 heads"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            attention._attend(module, query, query, query, None, **{name: sinks})


def test_sinks_and_softcaps_reach_the_op(monkeypatch):
    """The overload is called if there are sinks or a softcap, and ExecuTorch's op otherwise."""
    called = []
    attention.register()
    monkeypatch.setattr(attention.recurrent._current, "position", torch.arange(2))
    module, query = types.SimpleNamespace(is_causal=True, etkv_cache=3), torch.zeros(1, 4, 2, 8)

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "update_and_attend" in str(func):
                called.append((str(func), args[4], args[7:]))
                return torch.zeros(1, 4, 2, 8)
            return func(*args, **(kwargs or {}))

    sinks = torch.ones(4)
    with Recorded():
        for given in ({}, {"softcap": None, "s_aux": None}, {"softcap": 2.0}, {"s_aux": sinks}, {"sinks": sinks}):
            attention._attend(module, query, query, query, None, **given)
    plain, overload = "kvcache.update_and_attend.default", "kvcache.update_and_attend.sinks"
    assert [(name, layer, more[1:]) for name, layer, more in called] == [
        *[(plain, 3, ())] * 2,
        (overload, 3, (2.0,)),
        *[(overload, 3, (0.0,))] * 2,
    ]
    assert called[2][2][0] is None
    assert all(more[0] is sinks for _, _, more in called[3:])


def test_a_mask_as_a_tensor():
    module = types.SimpleNamespace(is_causal=True)
    with pytest.raises(ValueError, match="it computes a mask for its attention"):
        attention._attend(module, None, None, None, torch.zeros(1, 1, 2, 2), softcap=None, use_cache=False)


def test_an_error_names_the_family_the_module_and_the_reason():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(3, 3))
    with pytest.raises(EtkvError) as caught, reasons.explained("x", "exported", model):
        model(torch.zeros(1, 2))
    assert str(caught.value).startswith("model family 'x' cannot be exported: 1: RuntimeError: mat1 and mat2 shapes")
    with pytest.raises(EtkvError, match=r"^as it is$"), reasons.explained("x", "exported", model):
        raise EtkvError("as it is")


def test_a_program_that_differs_from_the_model_is_not_written(tiny, tmp_path, monkeypatch):
    lower = lowering.lower

    def halved(step, *others):
        with torch.no_grad():
            step.model.model.norm.weight.mul_(0.5)
        return lower(step, *others)

    monkeypatch.setattr(lowering, "lower", halved)
    request = ExportRequest(tiny("tiny-llama"), tmp_path / "model.pte", layers=1)
    with pytest.raises(EtkvError, match=r"^the program differs from the model: its logits at position 0 of 24"):
        export_program(request)
    assert list(tmp_path.iterdir()) == []


def test_which_programs_are_checked(tiny, monkeypatch):
    """Small models are checked by default, with more tokens than a window if that is cheap."""
    step = _step("mistral")
    layout = attention.survey(step, step.inputs(3), 256)
    limits = types.SimpleNamespace(max_context=256, prefill_chunk=16)
    request = ExportRequest(tiny("tiny-llama"), tiny("tiny-llama"))

    def checked(**changes):
        made = check.Check(step, types.SimpleNamespace(**{**vars(request), **changes}), limits, layout, Progress())
        return made._wanted, made._length

    assert checked() == (True, 40)
    assert checked(verify=False) == (False, 40)
    monkeypatch.setattr(check, "MAX_PARAMETERS", 1)
    monkeypatch.setattr(check, "_MAX_PRODUCTS", 1)
    assert checked() == (False, 24)
    assert checked(verify=True) == (True, 24)


@pytest.mark.parametrize(
    ("module", "function", "said_by"),
    [(check._library, "backends", "the library is not built"), (check._capi, "lib", "the library has interface 1")],
)
def test_without_a_library_of_this_version_no_program_is_checked(monkeypatch, module, function, said_by):
    def refuse():
        raise EtkvError(said_by)

    monkeypatch.setattr(module, function, refuse)
    said = io.StringIO()
    step = _step("llama")
    limits = types.SimpleNamespace(max_context=256, prefill_chunk=16)
    request = types.SimpleNamespace(verify=None)
    made = check.Check(step, request, limits, attention.survey(step, step.inputs(3), 256), Progress(said))
    assert not made.run_program(None)
    assert f"the program is not checked: {said_by}" in said.getvalue()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_shared_layers": 0}, r"have embeddings for each layer in one weight \(hidden_size_per_layer_"),
        (
            {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2},
            r"share keys and values \(num_kv_shared_layers 2",
        ),
    ],
)
def test_layers_that_cannot_run_without_the_others(changes, said):
    kinds = ["sliding_attention", "full_attention"] * 2
    config = tiny_families.config("gemma4_text", num_hidden_layers=4, layer_types=kinds, **changes)
    with pytest.raises(EtkvError, match=rf"^layers 2: layers of model family 'gemma4_text' {said}"):
        layers.keep_first(config, 2)
    with pytest.raises(EtkvError, match=rf"^draft 1: layers of model family 'gemma4_text' {said}"):
        layers.last(config, 1)
    assert layers.keep_first(config, 4) == range(4, 4)
