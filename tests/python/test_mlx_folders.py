"""Folders of mlx-lm are read exactly, and their integers are kept in programs for MLX."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import read_models
import reference
import test_published
import tiny_models
from etkv.errors import EtkvError
from etkv.export import hf_folder
from read_models import packed_weights

LINEARS = ("self_attn.", "mlp.", "embed_tokens", "lm_head")


def _tensor(array: mx.array) -> torch.Tensor:
    """Return a tensor with the elements of ``array``."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(memoryview(array.astype(mx.float32)).__array__()).bfloat16()
    return torch.frombuffer(
        bytearray(memoryview(array)), dtype=getattr(torch, str(array.dtype).split(".")[-1])
    ).reshape(array.shape)


def _quantize(weight: torch.Tensor, **how) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the parts of a quantized matrix, or of all experts, and its values."""
    codes, scales, *biases = mx.quantize(mx.array(weight.numpy()), **how)
    values = mx.dequantize(codes, scales, *biases, **how, dtype=mx.float32)
    parts = {"weight": codes, "scales": scales, **({"biases": biases[0]} if biases else {})}
    return {name: _tensor(part) for name, part in parts.items()}, _tensor(values)


def _expert(name: str) -> tuple[int, str]:
    """Return the index of an expert, and mlx-lm's name of the product, from the rest of a weight's name."""
    expert, _, product = name.removesuffix(".weight").partition(".")
    return int(expert), {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(product, product)


def _stack(loaded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors under the names of mlx-lm, which stacks the matrices of all experts."""
    of_experts: dict[str, list[torch.Tensor]] = {}
    made = {}
    for name, weight in loaded.items():
        block, mark, rest = name.partition(".experts.")
        if mark:
            _, product = _expert(rest)
            of_experts.setdefault(f"{block}.switch_mlp.{product}.weight", []).append(weight)
        else:
            made[name] = weight
    return made | {name: torch.stack(weights) for name, weights in of_experts.items()}


def write(folder: Path, settings: dict, own: dict[str, dict | bool] | None = None) -> dict[str, torch.Tensor]:
    """Quantize ``folder`` as mlx-lm does. ``own`` are settings of single layers. Return the values by name."""
    own = own or {}
    expected, tensors = {}, {}
    for name, weight in _stack(load_file(folder / "model.safetensors")).items():
        path = name.removesuffix(".weight")
        if weight.dim() < 2 or not any(part in name for part in LINEARS) or own.get(path) is False:
            expected[name] = tensors[name] = weight
            continue
        parts, expected[name] = _quantize(weight, **(own.get(path) or settings))
        tensors |= {f"{path}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    whole = {**settings, **own}
    read_models.configure(folder, quantization=whole, quantization_config=whole)
    return expected


@pytest.fixture
def folder(tiny, tmp_path):
    return shutil.copytree(tiny("tiny-llama-untied"), tmp_path / "model")


MODES = [{"group_size": size, "bits": bits, "mode": "affine"} for size, bits in [(32, 2), (64, 3), (64, 4), (32, 5)]]
MODES += [{"group_size": size, "bits": bits, "mode": "affine"} for size, bits in [(64, 6), (32, 8)]]
MODES += [{"group_size": 32, "bits": 4, "mode": "mxfp4"}, {"group_size": 16, "bits": 4, "mode": "nvfp4"}]
MODES += [{"group_size": 32, "bits": 8, "mode": "mxfp8"}]


@pytest.mark.parametrize("settings", MODES, ids=lambda one: "{mode}-{bits}".format(**one))
def test_each_mode_is_decoded_as_mlx_does(folder, settings):
    expected = write(folder, settings)
    found = read_models.plain(folder).state_dict()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        # MLX may fuse the product and the sum.
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-6)


def test_layers_have_settings_of_their_own(folder):
    other = {"group_size": 32, "bits": 8, "mode": "affine"}
    layer = "model.layers.1.mlp.down_proj"
    own = {layer: other, "model.layers.0.self_attn.q_proj": False, "lm_head": {"group_size": 32, "bits": 6}}
    expected = write(folder, {"group_size": 64, "bits": 4}, own)
    found = read_models.plain(folder).state_dict()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mode", "bits", "quantize"), [("affine", 4, 4), ("affine", 8, 8), ("mxfp4", 4, 8)])
def test_integers_are_kept(folder, tmp_path, mode, bits, quantize):
    expected = write(folder, {"group_size": 32, "bits": bits, "mode": mode})
    found = packed_weights(folder, tmp_path / "out", f"{quantize}w")
    assert found.repacked == 0
    assert found.kept == len(found.layers)
    for name, values in found.layers.items():
        torch.testing.assert_close(values, expected[f"{name}.weight"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["tiny-qwen3-moe", "tiny-mixtral"])
def test_experts_of_a_layer_are_one_tensor(tiny, tmp_path, family):
    folder = shutil.copytree(tiny(family), tmp_path / "model")
    plain = shutil.copytree(tiny(family), tmp_path / "plain")
    expected = write(folder, {"group_size": 32, "bits": 4, "mode": "affine"})
    # The expected weights, under the names of the published folder.
    original = load_file(plain / "model.safetensors")
    for name in original:
        block, mark, rest = name.partition(".experts.")
        if mark:
            expert, product = _expert(rest)
            original[name] = expected[f"{block}.switch_mlp.{product}.weight"][expert].clone()
        else:
            original[name] = expected[name]
    save_file(original, plain / "model.safetensors", {"format": "pt"})
    meant = read_models.plain(plain).state_dict()
    for name, values in read_models.plain(folder).state_dict().items():
        torch.testing.assert_close(values, meant[name], rtol=1e-6, atol=1e-6)
    found = packed_weights(folder, tmp_path / "out", "4w")
    # The matrices of experts and of other layers keep their integers.
    assert found.repacked == 0
    assert found.kept > 0


def test_a_folder_that_mlx_lm_wrote(tiny, tmp_path):
    """The folder has other settings for routers, and an index next to its only file of weights."""
    convert = importlib.import_module("mlx_lm.convert").convert
    folder = tmp_path / "mlx"
    convert(str(tiny("tiny-qwen3-moe")), str(folder), quantize=True, q_bits=4, q_group_size=32)
    assert (folder / "model.safetensors.index.json").is_file()
    found, expected = both_logits(folder)
    assert abs(found - expected).max() < 1e-4


def both_logits(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of the model that the exporter reads, and those of mlx-lm."""
    ids = list(range(20, 40))
    model = read_models.plain(folder)
    model.set_attn_implementation("eager")
    return reference.logits(model, ids), reference.mlx_lm_logits(folder, ids)


def test_experts_of_gpt_oss_that_mlx_lm_wrote(tmp_path):
    """Its experts stay in mxfp4. A gate and the product that it gates are two tensors here. In transformers they
    alternate in one tensor.
    """
    convert = importlib.import_module("mlx_lm.convert").convert
    published, _ = test_published.gpt_oss(tmp_path, ("sliding_attention", "full_attention"))
    tiny_models.tokenizer().save_pretrained(published)
    # YaRN's frequencies differ between mlx-lm and transformers, so the test does not use YaRN.
    read_models.configure(published, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    hf_folder.name_for_mlx_lm(published / "config.json")
    folder = tmp_path / "mlx"
    convert(str(published), str(folder), quantize=True, q_bits=8, q_group_size=32)
    found, expected = both_logits(folder)
    assert abs(found - expected).max() < 1e-3 * expected.std()
    packed, meant = packed_weights(folder, tmp_path / "out", "8w"), read_models.plain(folder).state_dict()
    assert len(packed.experts) == 4
    assert packed.repacked == 0
    for name, values in packed.experts.items():
        assert torch.equal(values, meant[name]), name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 64, "bits": 4, "mode": "fp5"}, "mode of quantization is 'fp5', expected affine or mxfp4 or"),
        ({"group_size": 64, "bits": 4, "mode": []}, "mode of quantization is [], expected affine or"),
        ({"group_size": 64, "bits": 4, "mode": {}}, "mode of quantization is {}, expected affine or"),
        ({"group_size": 64.0, "bits": 4}, "group_size of quantization is 64.0, expected 32 or"),
        ({"group_size": 0, "bits": 4}, "group_size of quantization is 0, expected 32 or"),
        ({"group_size": 64, "bits": 4.0}, "bits of quantization is 4.0, expected 2 or"),
        ({"group_size": 64, "bits": 0}, "bits of quantization is 0, expected 2 or"),
        ({"group_size": 64, "bits": True}, "bits of quantization is True, expected 2 or"),
        ({"group_size": 16, "bits": 4}, "group_size of quantization is 16, expected 32 or 64 or 128"),
        ({"group_size": 64, "bits": 7}, "bits of quantization is 7, expected 2 or 3 or 4 or 5 or 6 or 8"),
        ({"group_size": 64, "bits": 4, "mode": "mxfp4"}, "group_size of quantization is 64, expected 32"),
        ({"group_size": 128, "bits": 4}, "expected uint32 "),
        ({"group_size": 64, "bits": 4, "model.layers.0.self_attn.q_proj": False}, "says that it is not quantized"),
        ({"group_size": 64, "bits": 4, "model.layers.0.self_attn.q_proj": {"bits": 8}}, "expected uint32 [64, 16]"),
        ({"group_size": 64, "bits": 4, "lm_head": "x"}, "layer lm_head is 'x', expected true, false or a mapping"),
        (
            {"group_size": 64, "bits": 4, "model.layers.0.self_attn.q_proj": None},
            "q_proj is None, expected true, false",
        ),
        ({"group_size": 64, "bits": 4, "model.norm": "x"}, "layer model.norm is 'x', expected true, false"),
        ({"group_size": 64, "bits": 4, "lm_head": {"bits": "8"}}, "bits of lm_head is '8', expected 2 or"),
        ("q4f16_1", "is 'q4f16_1', expected a mapping"),
        (True, "is True, expected a mapping"),
        ([64, 4], "is [64, 4], expected a mapping"),
    ],
)
def test_settings_that_the_weights_lack(folder, settings, said):
    write(folder, {"group_size": 64, "bits": 4})
    read_models.configure(folder, quantization_config=settings)
    with pytest.raises(EtkvError) as caught:
        read_models.plain(folder)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["quantization", "compression_config"])
def test_an_entry_of_the_configuration_is_a_mapping(folder, name):
    read_models.configure(folder, **{name: "q4f16_1"})
    with pytest.raises(EtkvError, match=rf"{name} in the configuration of .* is 'q4f16_1', expected a mapping"):
        read_models.plain(folder)


def test_a_mode_has_a_usual_group_size_and_bits(folder):
    expected = write(folder, {"group_size": 32, "bits": 8, "mode": "mxfp8"})
    settings = {"group_size": None, "bits": None, "mode": "mxfp8", "lm_head": True}
    read_models.configure(folder, quantization_config=settings)
    found = read_models.plain(folder).state_dict()
    assert all(torch.equal(found[name], values) for name, values in expected.items())
