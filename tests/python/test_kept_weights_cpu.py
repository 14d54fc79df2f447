"""CPU programs keep the integers and scales of published files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cpu_programs
import etkv
import published_packers as packers
import reference
import test_kept_weights
import test_published
import tiny_gguf
from etkv.export import Progress, experts, export_program, lowering, packing, source
from etkv.export.cpu import linears
from etkv.export.gguf import packed
from etkv.export.published.weight import Groups
from etkv.export.request import ExportRequest
from etkv.export.scratch import Scratch
from etkv.linear_op import rounded
from etkv.packed_weights import WeightFormat
from etkv.pte import PteFile

folders = test_kept_weights.folders
GPTQ, OF_ATTENTION = test_kept_weights.GPTQ, test_kept_weights.OF_ATTENTION

ROWS, COLUMNS = 40, 512


def _groups(kind: str, bits: int, group_size: int) -> Groups:
    """Return random integers, and scales of the dtype ``kind``. Some scales are tiny, negative or zero."""
    generator = torch.Generator().manual_seed(bits)
    shape = ROWS, COLUMNS // group_size
    codes = torch.randint(0, 1 << bits, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
    scales = torch.randn(shape, generator=generator).to(getattr(torch, kind))
    scales[:3, 0] = torch.tensor([0.0, 6e-8, -1e-5])
    return Groups(codes, scales.float(), torch.full(shape, 1 << (bits - 1)).float())


def _blocks(kind: str) -> Groups:
    """Return random blocks of a format of GGUF. The numbers in float16 are at their beginning."""
    size, _ = packed.FORMATS[kind]
    per_block = 256 if kind.endswith("_K") else 32
    n_floats = {"MXFP4": 0, "Q8_0": 1}.get(kind, 2)
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (ROWS, COLUMNS // per_block, size), dtype=np.uint8)
    halves = generator.normal(0, 0.01, (*blocks.shape[:2], n_floats)).astype(np.float16)
    blocks[..., : 2 * n_floats] = halves.view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(110, 130, blocks.shape[:2])
    return packed.groups(blocks.reshape(ROWS, -1), kind)


def _with_zeros(kind: str, bits: int, group_size: int) -> Groups:
    made = _groups(kind, bits, group_size)
    assert made.zeros is not None
    return dataclasses.replace(
        made, zeros=torch.arange(made.zeros.numel()).view(made.zeros.shape).float() % (1 << bits)
    )


def _with_biases(kind: str) -> Groups:
    """Return random integers and scales as :func:`_groups` does, with biases instead of zero points, as in files of
    mlx-lm.
    """
    made = _groups(kind, 4, 64)
    return dataclasses.replace(made, zeros=None, biases=-made.scales.roll(1, 0))


def _thirds(groups: Groups) -> Groups:
    """Return the groups with scales that are not exact in bfloat16."""
    return dataclasses.replace(groups, scales=groups.scales / 3)


FORMATS: dict[str, tuple[Callable[[], Groups], int, str | None, int]] = {
    "float16": (lambda: _groups("float16", 4, 32), 4, "int4_float16", 32),
    "float16 in 8 bits": (lambda: _groups("float16", 8, 32), 8, "int8_float16", 32),
    "bfloat16": (lambda: _groups("bfloat16", 4, 128), 4, "int4", 128),
    "float32": (lambda: _groups("float32", 4, 64), 4, "int4_float32", 64),
    "float32, groups of a row": (lambda: _groups("float32", 8, 512), 8, "int8_float32", 256),
    "zeros": (lambda: _with_zeros("float16", 4, 128), 4, "int4_float32_biased", 128),
    "zeros in 8 bits": (lambda: _with_zeros("bfloat16", 8, 64), 8, "int8_float32_biased", 64),
    # The product of a zero point and a float32 scale would be rounded.
    "zeros and float32": (lambda: _with_zeros("float32", 4, 32), 4, None, 0),
    "biases": (lambda: _with_biases("bfloat16"), 4, "int4_bfloat16_biased", 64),
    "MXFP4": (lambda: _blocks("MXFP4"), 4, "fp4", 32),
    "MXFP4 in 8 bits": (lambda: _blocks("MXFP4"), 8, "fp4", 32),
    "floats and float32": (lambda: _thirds(_blocks("MXFP4")), 8, "int8_float32", 32),
    "floats and float32 in 4 bits": (lambda: _thirds(_blocks("MXFP4")), 4, None, 0),
    "Q4_1": (lambda: _blocks("Q4_1"), 4, "int4_float16_biased", 32),
    "Q5_1": (lambda: _blocks("Q5_1"), 8, "int8_float16_biased", 32),
    "Q4_K": (lambda: _blocks("Q4_K"), 4, "int4_nested", 32),
    "Q5_K": (lambda: _blocks("Q5_K"), 8, "int8_nested", 32),
    "Q5_K in 4 bits": (lambda: _blocks("Q5_K"), 4, None, 0),
}


_SYMMETRIC = {name for _, _, name, _ in FORMATS.values() if name and not name.endswith(("_biased", "_nested"))}


class _Layers(torch.nn.Module):
    """Pairs of an embedding and a linear layer that share their weights."""

    def __init__(self, packed: list[tuple[linears.Packer, tuple[torch.Tensor, WeightFormat]]]) -> None:
        super().__init__()
        self.embeddings, self.heads = torch.nn.ModuleList(), torch.nn.ModuleList()
        for packer, weights in packed:
            embedding, head = torch.nn.Embedding(ROWS, COLUMNS), torch.nn.Linear(COLUMNS, ROWS, bias=False)
            for layer, layers in ((embedding, self.embeddings), (head, self.heads)):
                del layer.weight
                layer.__class__ = packer.install(layer, weights)
                layers.append(layer)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [embedding(ids) for embedding in self.embeddings] + [head(x) for head in self.heads]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, list[torch.Tensor]]:
    """Return the rows of the embedding and the products of each case. One program computes them all.

    Each input of the products has one element other than 0, which 8 bits represent exactly.
    """
    from executorch import exir

    from etkv.export.cpu.partitioner import CPUPartitioner

    folder = tmp_path_factory.mktemp("program")
    cases = {case: (make(), bits) for case, (make, bits, name, _) in FORMATS.items() if name}
    given = torch.arange(ROWS)[None], 127 * torch.eye(COLUMNS)
    with Scratch(folder) as scratch:
        packed = []
        for groups, bits in cases.values():
            packer = linears.Packer(f"int{bits}", 32, scratch)
            weights = packer.keep(groups, torch.float32)
            assert weights is not None
            packed.append((packer, weights))
        edge = exir.to_edge_transform_and_lower(
            torch.export.export(_Layers(packed), given),
            partitioner=[CPUPartitioner("all")],
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        (folder / "model.pte").write_bytes(edge.to_executorch().buffer)
    with etkv.load(folder / "model.pte", None) as program:
        made = program.execute(*given)
    return {case: [made[at], made[at + len(cases)]] for at, case in enumerate(cases)}


@pytest.mark.parametrize("case", FORMATS)
def test_formats_hold_the_numbers_of_a_file(tmp_path, case):
    make, bits, name, group_size = FORMATS[case]
    groups = make()
    with Scratch(tmp_path) as scratch:
        found = linears.Packer(f"int{bits}", 32, scratch).keep(groups, torch.float32)
        if name is None:
            assert found is None
            return
        assert found is not None
        packed, fmt = found
        assert fmt == WeightFormat(name, group_size)
        assert torch.equal(fmt.unpack(packed)[:ROWS], groups.values())


@pytest.mark.parametrize("case", [case for case, (_, _, name, _) in FORMATS.items() if name])
def test_a_program_has_the_numbers_of_a_file(outputs, case):
    """The rows of the embedding equal those of the file bit for bit."""
    make, _, name, _ = FORMATS[case]
    groups = make()
    values, (rows, products) = groups.values(), outputs[case]
    assert torch.equal(rows[0], values)
    if name in _SYMMETRIC:
        # A sum of integers times a scale is rounded once.
        integers = groups.codes.float() - groups.zeros[0, 0]
        scales = groups.scales.repeat_interleave(COLUMNS // groups.scales.shape[1], 1)
        assert torch.equal(products, (127 * integers * scales).T)
    else:
        # The term with the scale and the term with the bias are rounded separately.
        size = 127 * (groups.codes.max() * groups.scales.abs().max() + values.abs().max())
        assert bool(((products - (values * 127).T).abs() <= 2.0**-22 * size).all())


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
    "awq": (
        test_published.AWQ,
        lambda *shape, seed: packers.awq(*shape, 32, seed=seed),
        "8da4w",
        None,
        "int4_float32_biased",
    ),
    # The differences of codes and zero points fit 8 bits.
    "awq in 8 bits": (
        test_published.AWQ,
        lambda *shape, seed: packers.awq(*shape, 32, seed=seed),
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
        ("Q4_1", "8da4w", "int4_float16_biased"),
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


@pytest.mark.parametrize("quantize", ["8da4w", "8da8w"])
def test_experts_in_mxfp4_are_kept(tmp_path, quantize):
    read, found, meant, made = _packed(test_published.gpt_oss(tmp_path)[0], tmp_path / "made", quantize)
    assert read
    assert (made.kept, made.repacked) == (2, 0)
    assert len(found) == 2
    assert all(torch.equal(values, meant.state_dict()[name]) for name, values in found.items())


def test_answers_are_those_of_the_weights_in_the_file(tiny, tmp_path):
    """The export says what is kept. Logits differ by the rounding of activations to 8 bits."""
    file = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", quantize="Q4_1")
    lines: list[str] = []

    class Noted(Progress):
        def note(self, text: str) -> None:
            lines.append(text)

    request = ExportRequest(file, tmp_path / "model.pte", backend="cpu", quantize="8da4w", verify=True)
    export_program(request, Noted())
    assert any("15 matrices keep the integers" in line for line in lines)
    assert not any("quantized again" in line for line in lines)
    origin = source.find(file)
    meant = source.read_model(origin, source.read_config(origin), "float32")
    meant.set_attn_implementation("eager")
    ids = list(range(40, 90))
    (found,) = cpu_programs.run(request.output, ids)
    assert _error(found, reference.logits(meant, ids)) < 0.1
    for layer in meant.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0], 32))
    # Not zero: the program and the reference round some activations in opposite directions.
    assert _error(found, reference.logits(meant, ids)) < 0.01


def _error(found: torch.Tensor, expected: Any) -> float:
    return float((found - torch.as_tensor(expected)).std() / found.std())


@pytest.mark.skipif(not reference.EVERYTHING, reason="exports once more: make test-long")
def test_a_program_of_experts_in_two_formats(tiny, tmp_path):
    """The second products of an expert have the integers of the file, and the first are quantized."""
    folder, plain = (shutil.copytree(tiny("tiny-qwen3-moe"), tmp_path / part) for part in ("quantized", "plain"))
    test_published.quantize(folder, plain, GPTQ, CASES["gptq"][1], "down_proj")
    hf = tmp_path / "hf"
    request = ExportRequest(folder, tmp_path / "model.pte", backend="cpu", quantize="8da4w", verify=True, keep_hf=hf)
    export_program(request)
    payloads = [json.loads(payload) for payload in PteFile(request.output).cpu_payloads()]
    (call,) = (payload for payload in payloads if payload["op"] == "routed_experts")
    assert (call["weights"], call["group_size"]) == (["int4", "int4_float16"], [32, 32])
    ids = list(range(40, 90))
    (found,) = cpu_programs.run(request.output, ids)
    assert _error(found, reference.logits(reference.load_hf(hf), ids)) < 0.2
