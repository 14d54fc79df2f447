"""Formats of packed weights on the CPU hold the integers and scales of published files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cpu_programs
import etkv
import read_models
import reference
import test_kept_weights
import tiny_gguf
from etkv.export import ExportRequest, export_program
from etkv.export.cpu import linears
from etkv.export.gguf import packed
from etkv.export.published.weight import Groups
from etkv.export.scratch import Scratch
from etkv.linear_op import rounded
from etkv.packed_weights import WeightFormat
from etkv.pte import PteFile

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


@pytest.mark.long
def test_answers_are_those_of_the_weights_in_the_file(tiny, tmp_path):
    """The export says what is kept. Logits differ by the rounding of activations to 8 bits."""
    file = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", quantize="Q4_1")
    request = ExportRequest(file, tmp_path / "model.pte", backend="cpu", quantize="8da4w", verify=True)
    noted = test_kept_weights.Noted()
    export_program(request, noted)
    assert any("15 matrices keep the integers" in line for line in noted.notes)
    assert not any("quantized again" in line for line in noted.notes)
    meant = read_models.plain(file)
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


@pytest.mark.long
def test_a_program_of_experts_in_two_formats(tiny, tmp_path):
    """The second products of an expert have the integers of the file, and the first are quantized."""
    quantized, _ = test_kept_weights.written(tiny("tiny-qwen3-moe"), tmp_path, "gptq", "down_proj")
    hf = tmp_path / "hf"
    request = ExportRequest(quantized, tmp_path / "model.pte", backend="cpu", quantize="8da4w", verify=True, keep_hf=hf)
    export_program(request)
    payloads = [json.loads(payload) for payload in PteFile(request.output).cpu_payloads()]
    (call,) = (payload for payload in payloads if payload["op"] == "routed_experts")
    assert (call["weights"], call["group_size"]) == (["int4", "int4_float16"], [32, 32])
    ids = list(range(40, 90))
    (found,) = cpu_programs.run(request.output, ids)
    assert _error(found, reference.logits(reference.load_hf(hf), ids)) < 0.2
