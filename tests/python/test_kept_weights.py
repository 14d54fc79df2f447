"""Programs keep the integers and scales of published files if the kernels of their backend support them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import published_packers as packers
import read_models
import test_gguf_architectures
import test_published
import tiny_gguf
import tiny_models
from etkv.export import ExportRequest, Progress, export_program, mlx_quantization
from etkv.export.gguf import packed
from etkv.export.published.weight import Groups
from read_models import packed_weights

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
OF_ATTENTION = 8
"""The number of attention matrices in tiny-llama."""

_gptq = partial(packers.gptq, group_size=32, bits=4, symmetric=True)

PUBLISHED: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (test_published.AWQ, partial(packers.awq, group_size=32)),
    "gptq": (GPTQ, _gptq),
    "gptq in 8 bits": ({**GPTQ, "bits": 8}, partial(_gptq, bits=8)),
    "groups of 64": ({**GPTQ, "group_size": 64}, partial(_gptq, group_size=64)),
    "groups of a row": ({**GPTQ, "group_size": -1}, lambda *shape, seed: _gptq(*shape, group_size=shape[1], seed=seed)),
    "columns in another order": (
        {**GPTQ, "desc_act": True},
        lambda *shape, seed: _gptq(*shape, group_of=[column % 2 for column in range(shape[1])], seed=seed),
    ),
    "compressed-tensors": (test_published._packed(4), partial(packers.packed_integers, group_size=32, bits=4)),
}
"""A kind of published folders -> settings, and a function that packs a matrix."""

CASES = [
    ("awq", "4w", None, True),
    ("awq", "8w", None, True),
    ("gptq", "4w", None, True),
    ("groups of a row", "4w", None, True),
    # Groups may be larger than asked for, but not smaller. Integers may have fewer bits, but not more.
    ("groups of 64", "4w", 32, True),
    ("gptq", "4w", 64, False),
    ("gptq in 8 bits", "4w", None, False),
    ("columns in another order", "4w", None, False),
    ("gptq", "8da4w", None, "int4_float16"),
    ("compressed-tensors", "8da4w", None, "int4"),
    ("gptq in 8 bits", "8da8w", None, "int8_float16"),
    ("awq", "8da4w", None, "int4_float32_biased"),
    # The differences of codes and zero points fit 8 bits.
    ("awq", "8da8w", None, "int8_float16"),
    ("groups of 64", "8da4w", 32, "int4_float16"),
    ("gptq", "8da4w", 64, False),
    ("gptq in 8 bits", "8da4w", None, False),
    ("columns in another order", "8da4w", None, False),
]
"""A kind of folders, the quantization and group size of the request, and whether integers are kept, or their format on
the CPU.
"""

folder = test_gguf_architectures.folder


def written(source: Path, folder: Path, kind: str, chosen: str) -> tuple[Path, Path]:
    """Write a folder in which weights whose names contain ``chosen`` are quantized, and one with their values."""
    quantized, plain = (shutil.copytree(source, folder / part) for part in ("quantized", "plain"))
    test_published.quantize(quantized, plain, *PUBLISHED[kind], chosen)
    return quantized, plain


@pytest.mark.parametrize(("kind", "quantize", "group_size", "kept"), CASES)
def test_integers_are_kept_where_kernels_take_them(tiny, tmp_path, kind, quantize, group_size, kept):
    quantized, plain = written(tiny("tiny-llama"), tmp_path, kind, "self_attn")
    found = packed_weights(quantized, tmp_path / "made", quantize, group_size)
    assert (found.kept, found.repacked) == ((OF_ATTENTION, 0) if kept else (0, OF_ATTENTION))
    is_cpu = "da" in quantize
    meant = read_models.plain(plain)
    for name, values in found.layers.items():
        own = meant.get_submodule(name).weight
        is_kept = bool(kept) and "self_attn" in name
        if is_cpu:
            assert torch.equal(values, own) == is_kept
            assert found.formats[name] == (kept if is_kept else f"int{quantize[3]}")
        elif is_kept:
            # With a bias, a program rounds twice: after the product and after the sum.
            torch.testing.assert_close(values, own, rtol=0, atol=3e-7 * float(own.abs().max()))
        else:
            assert not torch.equal(values, own)


@pytest.mark.parametrize(
    ("kind", "quantize", "name"),
    [
        *((kind, "4w", None) for kind in ("Q4_0", "Q4_1")),
        *((kind, "8w", None) for kind in ("Q4_0", "Q5_0", "Q5_1", "Q8_0")),
        ("Q4_0", "8da4w", "int4_float16"),
        ("Q4_1", "8da4w", "int4_float16_biased"),
        *((kind, "8da8w", "int8_float16") for kind in ("Q4_0", "Q5_0", "Q8_0")),
    ],
)
def test_integers_of_gguf_files_are_kept(tiny, tmp_path, kind, quantize, name):
    """The integers of the embedding, which the head shares, are also kept."""
    file = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", quantize=kind)
    found = packed_weights(file, tmp_path / "made", quantize)
    assert (found.kept, found.repacked) == (15, 0)
    assert set(found.formats.values()) == {name}
    meant = read_models.plain(file)
    assert all(torch.equal(values, meant.get_submodule(layer).weight) for layer, values in found.layers.items())


def test_matrices_of_other_types_are_counted(tiny, tmp_path, monkeypatch):
    """One such type is Q6_K, because no program has groups of its size."""
    file = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", quantize="Q4_0")
    monkeypatch.delitem(packed.FORMATS, "Q4_0")
    _, made = read_models.packed(file, tmp_path / "made", "4w")
    assert (made.kept, made.repacked) == (0, 15)
    assert made.remarks()[-1].startswith("15 matrices of the source are quantized again")
    plain = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "plain.gguf")
    _, made = read_models.packed(plain, tmp_path / "made", "4w")
    assert (made.kept, made.repacked) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "quantize", "chosen"),
    [("awq", "4w", ".experts."), ("gptq", "8da4w", ".experts."), ("gptq", "8da4w", "down_proj")],
)
def test_experts_of_a_folder_are_kept(tiny, tmp_path, kind, quantize, chosen):
    """A file has separate matrices for each expert. A product of all experts has them concatenated. On the CPU, two
    products of an expert may have different formats. One layer has no experts.
    """
    quantized, plain = written(tiny("tiny-qwen3-moe"), tmp_path, kind, chosen)
    found, meant = packed_weights(quantized, tmp_path / "made", quantize), read_models.plain(plain).state_dict()
    assert (found.kept, found.repacked) == (2, 0)
    assert len(found.experts) == 2
    for name, values in found.experts.items():
        if quantize == "4w":
            torch.testing.assert_close(values, meant[name], rtol=0, atol=3e-7 * float(meant[name].abs().max()))
        else:
            assert torch.equal(values, meant[name]) == (chosen == ".experts." or "down_proj" in name)


@pytest.mark.parametrize("quantize", ["8w", "4w", "8da4w", "8da8w"])
def test_experts_in_mxfp4_are_kept(tmp_path, quantize):
    """In 8 bits they are kept as integers: a 4-bit float is half of an integer from -12 to 12."""
    quantized, _ = test_published.gpt_oss(tmp_path)
    found, meant = packed_weights(quantized, tmp_path / "made", quantize), read_models.plain(quantized).state_dict()
    assert (found.kept, found.repacked) == (2, 0)
    assert len(found.experts) == 2
    for name, values in found.experts.items():
        assert torch.equal(values, meant[name]), name


def test_experts_of_a_gguf_file_are_kept(tiny, tmp_path):
    folder = tiny("tiny-qwen3-moe")
    config = json.loads((folder / "config.json").read_text())
    keys = {".expert_weights_norm": config["norm_topk_prob"]}
    sparse = shutil.copytree(folder, tmp_path / "sparse")
    read_models.configure(sparse, num_hidden_layers=1, mlp_only_layers=[])
    loaded = {
        name: x for name, x in load_file(folder / "model.safetensors").items() if not name.startswith("model.layers.1.")
    }
    save_file(loaded, sparse / "model.safetensors", {"format": "pt"})
    file = tiny_gguf.write(sparse, tmp_path / "x.gguf", architecture="qwen3moe", keys=keys, quantize="Q4_0")
    found, meant = packed_weights(file, tmp_path / "made", "4w"), read_models.plain(file).state_dict()
    # Kept matrices are those of both products, of attention, the embedding that the head shares, and the router.
    assert len(found.experts) == 2
    assert (found.kept, found.repacked) == (8, 0)
    assert all(torch.equal(values, meant[name]) for name, values in found.experts.items())


@pytest.mark.parametrize(
    ("name", "kind", "quantize"),
    [
        ("gpt-oss", "MXFP4", "4w"),
        ("gpt-oss", "MXFP4", "8w"),
        ("gpt-oss", "Q4_0", "4w"),
        ("llama4", "Q4_0", "4w"),
        ("qwen3next", "Q4_1", "4w"),
        ("qwen35", "Q4_0", "4w"),
        ("qwen35moe", "Q8_0", "8w"),
    ],
)
def test_matrices_of_gguf_files_in_another_order_are_kept(folder, tmp_path, name, kind, quantize):
    """A file has rows or columns of experts, or of heads, in another order than transformers."""
    _, file = test_gguf_architectures.written(folder, tmp_path / "x.gguf", name, kind)
    found, meant = packed_weights(file, tmp_path / "made", quantize), read_models.plain(file).state_dict()
    # On MLX only experts keep floats.
    assert (found.repacked == 0) == ((kind, quantize) != ("MXFP4", "4w"))
    assert found.kept > 0
    assert bool(found.experts) == (name != "qwen35")
    assert all(torch.equal(values, meant[name]) for name, values in found.experts.items())


def test_floats_of_experts_are_kept_if_mlx_represents_them():
    """Their scales are powers of two from 2**-127 to 2**127, for 32 elements."""

    def kept(power: float, dtype: torch.dtype, size: int = 32, codes: tuple[int, ...] = (0, 11, 18, 24)):
        # Codes are twice the floats plus 12, so scales are halves of the powers.
        groups = Groups(
            torch.tensor(codes, dtype=torch.uint8).repeat(64 // len(codes)).reshape(1, 64),
            torch.full((1, 64 // size), power / 2),
            torch.full((1, 64 // size), 12.0),
        )
        found = mlx_quantization.keep(groups, 4, dtype, with_floats=True)
        if found is None:
            return None
        packed, scales, biases = found
        assert biases is None
        assert torch.equal(mlx_quantization.dequantize(packed, scales, 4, dtype), groups.values().to(dtype))
        return scales.unique().tolist()

    for power, byte in ((1.0, 127), (2.0**-126, 1), (2.0**120, 247)):
        assert kept(power, torch.bfloat16) == [byte]
    assert kept(2.0**13, torch.float16) is not None
    assert kept(2.0**14, torch.float16) is None, "6 * 2**14 exceeds float16"
    assert kept(3.0, torch.float32) is None, "not a power of two"
    assert kept(0.0, torch.float32) is None
    assert kept(1.0, torch.float32, size=64) is None
    assert kept(1.0, torch.float32, codes=(0, 3, 24, 24)) is None, "-4.5 is no float of 4 bits"
    outlier = Groups(torch.tensor([[0] + [128] * 31]).to(torch.uint8), torch.ones(1, 1), torch.full((1, 1), 128.0))
    assert mlx_quantization.keep(outlier, 4, torch.float32, with_floats=True) is None, "-128 is no float of 4 bits"


def test_columns_of_a_group_stay_together():
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    groups = Groups(codes, torch.rand(3, 2), torch.full((3, 2), 8.0))
    same, swapped = torch.arange(64), torch.arange(64).roll(32)
    assert groups.columns(same) is groups
    assert torch.equal(groups.columns(swapped).values(), groups.values()[:, swapped])
    assert groups.columns(same.flip(0)) is None
    assert groups.columns(same.roll(16)) is None


class Noted(Progress):
    """Keeps the notes of an export."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    ("kind", "n", "dtype"),
    [
        ("integers, scales and biases", 8, "float32"),
        pytest.param("floats of experts", 2, "bfloat16", marks=pytest.mark.long),
    ],
)
def test_a_program_has_the_weights_of_a_file(tiny, tmp_path, kind, n, dtype):
    """The export's check compares the program with the model."""
    if kind == "floats of experts":
        model, _ = test_published.gpt_oss(tmp_path)
        tiny_models.tokenizer().save_pretrained(model)
    else:
        model, _ = written(tiny("tiny-llama"), tmp_path, "awq", "self_attn")
    noted = Noted()
    request = ExportRequest(model, tmp_path / "out" / "model.pte", dtype=dtype, quantize="4w", verify=True)
    export_program(request, noted)
    assert any(f"{n} matrices keep the integers" in line for line in noted.notes)
    assert json.loads((tmp_path / "out" / "export.json").read_text())["checked"]
