"""MLX programs keep the integers and scales of published files if MLX's operations support them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import published_packers as packers
import test_gguf_architectures
import test_published
import tiny_gguf
from etkv.export import ExportRequest, Progress, experts, export_program, lowering, packing, source
from etkv.export.gguf import packed
from etkv.export.published.weight import Groups
from etkv.export.scratch import Scratch


def _packed(model: Path, folder: Path, **request: Any):
    """Return the model with packed weights, and its :class:`Packing`."""
    wanted = ExportRequest(model, folder / "model.pte", **request)
    origin = source.find(model)
    with Scratch(folder, origin.files()) as scratch:
        made = packing.Packing(lowering.packer(wanted, request.get("group_size", 32), scratch), scratch)
        read = source.read_model(origin, source.read_config(origin), "float32", packing=made)
        return {name: layer.plain().clone() for name, layer in packing.layers(read)}, made


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """Return a function that writes a folder with quantized attention, and a folder with the dequantized weights."""

    def make(settings: dict[str, Any], pack: Any) -> tuple[Path, Path]:
        made = tmp_path_factory.mktemp("kept")
        folder, plain = (shutil.copytree(tiny("tiny-llama"), made / part) for part in ("quantized", "plain"))
        test_published.quantize(folder, plain, settings, pack, "self_attn")
        return folder, plain

    return make


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
OF_ATTENTION = 8
"""The number of attention matrices in tiny-llama."""

folder = test_gguf_architectures.folder

CASES = {
    "awq": (test_published.AWQ, lambda *shape, seed: packers.awq(*shape, 32, seed=seed), {"quantize": "4w"}, True),
    "awq in 8 bits": (
        test_published.AWQ,
        lambda *shape, seed: packers.awq(*shape, 32, seed=seed),
        {"quantize": "8w"},
        True,
    ),
    "gptq": (
        GPTQ,
        lambda *shape, seed: packers.gptq(*shape, 32, 4, symmetric=True, seed=seed),
        {"quantize": "4w"},
        True,
    ),
    "groups of a row": (
        {**GPTQ, "group_size": -1},
        lambda *shape, seed: packers.gptq(*shape, shape[1], 4, symmetric=True, seed=seed),
        {"quantize": "4w"},
        True,
    ),
    "larger groups than asked for": (
        {**GPTQ, "group_size": 64},
        lambda *shape, seed: packers.gptq(*shape, 64, 4, symmetric=True, seed=seed),
        {"quantize": "4w", "group_size": 32},
        True,
    ),
    "smaller groups than asked for": (
        GPTQ,
        lambda *shape, seed: packers.gptq(*shape, 32, 4, symmetric=True, seed=seed),
        {"quantize": "4w", "group_size": 64},
        False,
    ),
    "more bits than asked for": (
        {**GPTQ, "bits": 8},
        lambda *shape, seed: packers.gptq(*shape, 32, 8, symmetric=True, seed=seed),
        {"quantize": "4w"},
        False,
    ),
    "columns in another order": (
        {**GPTQ, "desc_act": True},
        lambda *shape, seed: packers.gptq(
            *shape, 32, 4, group_of=[column % 2 for column in range(shape[1])], symmetric=True, seed=seed
        ),
        {"quantize": "4w"},
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_integers_are_kept_where_mlx_takes_them(folders, tmp_path, case):
    settings, pack, request, is_kept = CASES[case]
    folder, plain = folders(settings, pack)
    (tmp_path / "0").mkdir()
    read, made = _packed(folder, tmp_path / "0", **request)
    assert (made.kept, made.repacked) == ((OF_ATTENTION, 0) if is_kept else (0, OF_ATTENTION))
    origin = source.find(plain)
    meant = source.read_model(origin, source.read_config(origin), "float32")
    for name, values in read.items():
        own = meant.get_submodule(name).weight
        if is_kept and "self_attn" in name:
            # With a bias, a program rounds twice: after the product and after the sum.
            torch.testing.assert_close(values, own, rtol=0, atol=3e-7 * float(own.abs().max()))
        else:
            assert not torch.equal(values, own)


@pytest.mark.parametrize(
    ("kind", "quantize"),
    [("Q4_0", "4w"), ("Q4_1", "4w"), ("Q4_0", "8w"), ("Q5_0", "8w"), ("Q5_1", "8w"), ("Q8_0", "8w")],
)
def test_integers_of_gguf_files_are_kept(tiny, tmp_path, kind, quantize):
    file = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", quantize=kind)
    read, made = _packed(file, tmp_path, quantize=quantize)
    assert (made.kept, made.repacked) == (15, 0)
    origin = source.find(file)
    meant = source.read_model(origin, source.read_config(origin), "float32")
    assert all(torch.equal(values, meant.get_submodule(name).weight) for name, values in read.items())


def test_matrices_of_other_types_are_counted(tiny, tmp_path, monkeypatch):
    """Such as Q6_K, whose groups no program has."""
    file = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", quantize="Q4_0")
    monkeypatch.delitem(packed.FORMATS, "Q4_0")
    _, made = _packed(file, tmp_path, quantize="4w")
    assert (made.kept, made.repacked) == (0, 15)
    assert made.remarks()[-1].startswith("15 matrices of the source are quantized again")
    plain = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "plain.gguf")
    _, made = _packed(plain, tmp_path, quantize="4w")
    assert (made.kept, made.repacked) == (0, 0)


def _experts(model: Path, folder: Path, quantize: str = "4w"):
    """Return the weights of experts in a quantized program, the expected weights of ``model``, and the packing."""
    wanted = ExportRequest(model, folder / "model.pte", quantize=quantize)
    origin = source.find(model)
    meant = source.read_model(origin, source.read_config(origin), "float32")
    with Scratch(folder, origin.files()) as scratch:
        made = packing.Packing(lowering.packer(wanted, 32, scratch), scratch)
        read = source.read_model(origin, source.read_config(origin), "float32", packing=made)
        return experts.plain_weights(read), meant.state_dict(), made


def test_experts_of_a_folder_are_kept(tiny, tmp_path):
    """A file has separate matrices for each expert. A product of all experts has them concatenated."""
    folder, plain = (shutil.copytree(tiny("tiny-qwen3-moe"), tmp_path / part) for part in ("quantized", "plain"))
    test_published.quantize(
        folder, plain, test_published.AWQ, lambda *shape, seed: packers.awq(*shape, 32, seed=seed), ".experts."
    )
    read, meant, made = _experts(folder, tmp_path)
    assert len(read) == 2
    assert (made.kept, made.repacked) == (2, 0)
    for name, values in read.items():
        torch.testing.assert_close(values, meant[name], rtol=0, atol=3e-7 * float(meant[name].abs().max()))


@pytest.mark.parametrize("quantize", ["8w", "4w"])
def test_experts_in_mxfp4_are_kept_in_8_bits(tmp_path, quantize):
    """A 4-bit float is half of an integer from -12 to 12."""
    read, meant, made = _experts(test_published.gpt_oss(tmp_path)[0], tmp_path, quantize)
    assert (made.kept, made.repacked) == ((2, 0) if quantize == "8w" else (0, 2))
    assert len(read) == 2
    for name, values in read.items():
        assert torch.equal(values, meant[name]) == (quantize == "8w"), name


def test_experts_of_a_gguf_file_are_kept(tiny, tmp_path):
    folder = tiny("tiny-qwen3-moe")
    config = json.loads((folder / "config.json").read_text())
    keys = {".expert_weights_norm": config["norm_topk_prob"]}
    sparse = shutil.copytree(folder, tmp_path / "sparse")
    (sparse / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "mlp_only_layers": []}))
    loaded = {
        name: x for name, x in load_file(folder / "model.safetensors").items() if not name.startswith("model.layers.1.")
    }
    save_file(loaded, sparse / "model.safetensors", {"format": "pt"})
    file = tiny_gguf.write(sparse, tmp_path / "x.gguf", architecture="qwen3moe", keys=keys, quantize="Q4_0")
    read, meant, made = _experts(file, tmp_path)
    # Kept matrices are those of both products, of attention, the embedding that the head shares, and the router.
    assert len(read) == 2
    assert (made.kept, made.repacked) == (8, 0)
    assert all(torch.equal(values, meant[name]) for name, values in read.items())


@pytest.mark.parametrize(
    ("name", "kind", "quantize"),
    [
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
    read, meant, made = _experts(file, tmp_path, quantize)
    assert made.repacked == 0
    assert made.kept > 0
    assert bool(read) == (name != "qwen35")
    assert all(torch.equal(values, meant[name]) for name, values in read.items())


def test_columns_of_a_group_stay_together():
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    groups = Groups(codes, torch.rand(3, 2), torch.full((3, 2), 8.0))
    same, swapped = torch.arange(64), torch.arange(64).roll(32)
    assert groups.columns(same) is groups
    assert torch.equal(groups.columns(swapped).values(), groups.values()[:, swapped])
    assert groups.columns(same.flip(0)) is None
    assert groups.columns(same.roll(16)) is None


def test_a_program_has_biases(folders, tmp_path):
    """The export's check compares the program, which has integers, scales and biases of AWQ, with the model."""
    folder, _ = folders(*CASES["awq"][:2])
    lines: list[str] = []

    class Noted(Progress):
        def note(self, text: str) -> None:
            lines.append(text)

    export_program(ExportRequest(folder, tmp_path / "model.pte", quantize="4w", verify=True), Noted())
    assert any("8 matrices keep the integers" in line for line in lines)
    assert json.loads((tmp_path / "export.json").read_text())["checked"]
