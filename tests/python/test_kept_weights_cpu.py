"""CPU programs keep the integers and scales of published files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import etkv
import published_packers as packers
import test_kept_weights
import test_published
import tiny_gguf
from etkv.export import experts, lowering, packing, source
from etkv.export.cpu import linears
from etkv.export.published.weight import Groups
from etkv.export.request import ExportRequest
from etkv.export.scratch import Scratch

folders = test_kept_weights.folders
GPTQ, OF_ATTENTION = test_kept_weights.GPTQ, test_kept_weights.OF_ATTENTION

COLUMNS = 512


def _groups(kind: str, bits: int, group_size: int, rows: int = 40) -> Groups:
    """Return random integers, and scales of the dtype ``kind``, of which some are tiny, negative or zero."""
    generator = torch.Generator().manual_seed(bits)
    shape = rows, COLUMNS // group_size
    codes = torch.randint(0, 1 << bits, (rows, COLUMNS), generator=generator, dtype=torch.uint8)
    scales = torch.randn(shape, generator=generator).to(getattr(torch, kind))
    scales[:3, 0] = torch.tensor([0.0, 6e-8, -1e-5])
    return Groups(codes, scales.float(), torch.full(shape, 1 << (bits - 1)).float())


FORMATS = [
    ("float16", 4, 32, "int4_float16", 32),
    ("float16", 8, 32, "int8_float16", 32),
    ("bfloat16", 4, 128, "int4", 128),
    ("float32", 4, 64, "int4_float32", 64),
    ("float32", 8, 512, "int8_float32", 256),
]


class _Model(torch.nn.Module):
    """An embedding and a linear layer with the same weights."""

    def __init__(self, groups: Groups, bits: int, scratch: Scratch) -> None:
        super().__init__()
        rows, columns = groups.codes.shape
        self.embedding, self.head = torch.nn.Embedding(rows, columns), torch.nn.Linear(columns, rows, bias=False)
        packer = linears.Packer(f"int{bits}", 32, scratch)
        packed = packer.keep(groups, torch.float32)
        assert packed is not None
        for layer in (self.embedding, self.head):
            del layer.weight
            layer.__class__ = packer.install(layer, packed)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embedding(ids), self.head(x)


@pytest.mark.parametrize(("kind", "bits", "group_size", "name", "taken"), FORMATS)
def test_a_program_has_the_numbers_of_a_file(tmp_path, kind, bits, group_size, name, taken):
    """Rows of the embedding are bitwise equal, and so are products with one-hot inputs, which are exact in 8 bits."""
    from executorch import exir

    from etkv.export.cpu.partitioner import CPUPartitioner

    groups = _groups(kind, bits, group_size)
    with Scratch(tmp_path) as scratch:
        model = _Model(groups, bits, scratch)
        assert (model.head.etkv_format, model.head.etkv_group) == (name, taken)
        values = groups.values()
        assert torch.equal(model.head.plain(), values)
        given = torch.arange(len(values))[None], 127 * torch.eye(COLUMNS)
        edge = exir.to_edge_transform_and_lower(
            torch.export.export(model, given),
            partitioner=[CPUPartitioner("all")],
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        path = tmp_path / "model.pte"
        path.write_bytes(edge.to_executorch().buffer)
    with etkv.load(path, None) as program:
        rows, products = program.execute(*given)
    assert torch.equal(rows[0], values)
    # A product is 127 times a weight, rounded once.
    assert torch.equal(products, (values * 127).T)


def _packed(model: Path, folder: Path, quantize: str, group_size: int | None = None):
    """Return the model's packed layers, the expected weights, and the packing."""
    folder.mkdir(exist_ok=True)
    wanted = ExportRequest(model, folder / "model.pte", backend="cpu", quantize=quantize, group_size=group_size)
    origin = source.find(model)
    meant = source.read_model(origin, source.read_config(origin), "float32")
    with Scratch(folder, origin.files()) as scratch:
        made = packing.Packing(lowering.packer(wanted, group_size or 32, scratch), scratch)
        read = source.read_model(origin, source.read_config(origin), "float32", packing=made)
        layers = {name: (layer.etkv_format, layer.plain().clone()) for name, layer in packing.layers(read)}
        return layers, experts.plain_weights(read), meant, made


CASES: dict[str, tuple[dict[str, Any], Any, str, int | None, str | None]] = {
    "gptq": (
        GPTQ,
        lambda *shape, seed: packers.gptq(*shape, 32, 4, symmetric=True, seed=seed),
        "8da4w",
        None,
        "int4_float16",
    ),
    "compressed-tensors": (
        test_published._packed(4),
        lambda *shape, seed: packers.packed_integers(*shape, 32, 4, seed=seed),
        "8da4w",
        None,
        "int4",
    ),
    "gptq in 8 bits": (
        {**GPTQ, "bits": 8},
        lambda *shape, seed: packers.gptq(*shape, 32, 8, symmetric=True, seed=seed),
        "8da8w",
        None,
        "int8_float16",
    ),
    "larger groups than asked for": (
        {**GPTQ, "group_size": 64},
        lambda *shape, seed: packers.gptq(*shape, 64, 4, symmetric=True, seed=seed),
        "8da4w",
        32,
        "int4_float16",
    ),
    "smaller groups than asked for": (
        GPTQ,
        lambda *shape, seed: packers.gptq(*shape, 32, 4, symmetric=True, seed=seed),
        "8da4w",
        64,
        None,
    ),
    "more bits than asked for": (
        {**GPTQ, "bits": 8},
        lambda *shape, seed: packers.gptq(*shape, 32, 8, symmetric=True, seed=seed),
        "8da4w",
        None,
        None,
    ),
    "columns in another order": (
        {**GPTQ, "desc_act": True},
        lambda *shape, seed: packers.gptq(
            *shape, 32, 4, group_of=[column % 2 for column in range(shape[1])], symmetric=True, seed=seed
        ),
        "8da4w",
        None,
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_integers_are_kept_where_tiles_take_them(folders, tmp_path, case):
    settings, pack, quantize, group_size, name = CASES[case]
    folder, plain = folders(settings, pack)
    layers, _, _, made = _packed(folder, tmp_path, quantize, group_size)
    assert (made.kept, made.repacked) == ((OF_ATTENTION, 0) if name else (0, OF_ATTENTION))
    origin = source.find(plain)
    meant = source.read_model(origin, source.read_config(origin), "float32")
    for layer, (found, values) in layers.items():
        is_kept = bool(name) and "self_attn" in layer
        assert torch.equal(values, meant.get_submodule(layer).weight) == is_kept
        assert found == (name if is_kept else f"int{quantize[3]}")


@pytest.mark.parametrize(
    ("kind", "quantize", "name"),
    [
        ("Q4_0", "8da4w", "int4_float16"),
        ("Q4_0", "8da8w", "int8_float16"),
        ("Q5_0", "8da8w", "int8_float16"),
        ("Q8_0", "8da8w", "int8_float16"),
    ],
)
def test_integers_of_gguf_files_are_kept(tiny, tmp_path, kind, quantize, name):
    """The integers of the embedding, which the head shares, are also kept."""
    file = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", quantize=kind)
    layers, _, meant, made = _packed(file, tmp_path / "made", quantize)
    assert (made.kept, made.repacked) == (15, 0)
    for layer, (found, values) in layers.items():
        assert found == name
        assert torch.equal(values, meant.get_submodule(layer).weight)


@pytest.mark.parametrize(("chosen", "n_kept"), [(".experts.", 2), ("down_proj", 2)])
def test_experts_of_a_folder_are_kept(tiny, tmp_path, chosen, n_kept):
    """The integers of both products are kept, or only those of the second. The products then have different formats.
    One layer has no experts.
    """
    folder, plain = (shutil.copytree(tiny("tiny-qwen3-moe"), tmp_path / part) for part in ("quantized", "plain"))
    test_published.quantize(folder, plain, GPTQ, CASES["gptq"][1], chosen)
    _, found, meant, made = _packed(folder, tmp_path / "made", "8da4w")
    assert (made.kept, made.repacked) == (n_kept, 0)
    assert len(found) == 2
    for name, values in found.items():
        is_kept = chosen == ".experts." or "down_proj" in name
        assert torch.equal(values, meant.state_dict()[name]) == is_kept
