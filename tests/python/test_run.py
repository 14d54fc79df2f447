"""``etkv_run``: calls a method once on tensors from a file."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import mlx_programs
import op_program
import reference
from etkv import CacheConfig, LayerConfig
from runners import FAILED, MISUSED, refused, runner

DTYPES = (torch.float32, torch.float16, torch.int32, torch.int64, torch.bfloat16, torch.bool, torch.uint8)
"""The dtypes in the order of their numbers in a file."""

KV = CacheConfig([LayerConfig(2, 32)] * 2, capacity=16, k_format="f32", v_format="f32")


class Every(torch.nn.Module):
    """Returns a reshaped tensor of each dtype, and a sum."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*(tensor.reshape(-1, 2) for tensor in tensors), tensors[0] + 1)


class Number(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
        return x + x, n


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def every(folder) -> Path:
    example = tuple(torch.zeros(2, 4).to(dtype) for dtype in DTYPES)
    rows = torch.export.Dim("rows", min=1, max=8)
    return mlx_programs.write(Every(), example, folder / "every.pte", dynamic_shapes=(({0: rows},) * len(DTYPES),))


@pytest.fixture(scope="module")
def attention(folder) -> Path:
    return op_program.export(KV, folder / "attention.pte", most_tokens=8)


def packed(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the contents of a file with ``tensors``."""
    data = struct.pack("<I", len(tensors))
    for tensor in tensors:
        data += struct.pack(f"<II{tensor.dim()}i", DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape)
        data += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return data


def unpacked(data: bytes) -> list[torch.Tensor]:
    """Return the tensors in the contents of a file."""
    (count,), data = struct.unpack_from("<I", data), data[4:]
    tensors = []
    for _ in range(count):
        dtype, rank = struct.unpack_from("<II", data)
        shape = struct.unpack_from(f"<{rank}i", data, 8)
        head, size = 8 + 4 * rank, DTYPES[dtype].itemsize * torch.Size(shape).numel()
        tensors.append(torch.frombuffer(bytearray(data[head : head + size]), dtype=DTYPES[dtype]).reshape(shape))
        data = data[head + size :]
    assert not data
    return tensors


def inputs(rows: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [(torch.rand(rows, 4) * 9 - (4 if dtype.is_signed else 0)).to(dtype) for dtype in DTYPES]


def command(program: Path, folder: Path, data: bytes, *options: object) -> list[object]:
    (folder / "in.bin").write_bytes(data)
    (folder / "out.bin").unlink(missing_ok=True)
    words = [runner("run"), "--pte", program, "--input", folder / "in.bin", "--output", folder / "out.bin"]
    return [*words, *options]


def run(program: Path, folder: Path, tensors: Sequence[torch.Tensor], *options: object) -> list[torch.Tensor]:
    """Return the outputs of one call, and check the printed lines about them."""
    done = reference.run(command(program, folder, packed(tensors), *options))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    outputs = unpacked((folder / "out.bin").read_bytes())
    names = ("f32", "f16", "i32", "i64", "bf16", "bool", "u8")
    lines = [f"{names[DTYPES.index(output.dtype)]} {list(output.shape)}" for output in outputs]
    assert done.stdout.splitlines() == lines
    return outputs


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_dtype_goes_in_and_out(every, tmp_path, rows):
    given = inputs(rows)
    outputs = run(every, tmp_path, given)
    assert len(outputs) == len(DTYPES) + 1
    for output, expected in zip(outputs, Every()(*given), strict=True):
        assert (output.dtype, output.shape) == (expected.dtype, expected.shape)
        assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("spec", "atol"), [("16,2,2,32", 1e-6), ("16,2,2,32,6", 1e-6), ("16,2,2,32,5", 2e-3), ("16,2,2,32,row-int4", 0.5)]
)
def test_a_kv_cache(attention, tmp_path, spec, atol):
    """The first token sees only itself, so its output is its value."""
    torch.manual_seed(0)
    positions = torch.arange(4)
    rows = [torch.randn(1, heads, 4, 32) for _ in KV.layers for heads in (4, 2, 2)]
    outputs = run(attention, tmp_path, [positions, *rows], "--kv-cache", spec)
    assert [list(output.shape) for output in outputs] == [[1, 4, 4, 32]] * 2
    for layer, output in enumerate(outputs):
        values = rows[3 * layer + 2].repeat_interleave(2, 1)
        torch.testing.assert_close(output[:, :, 0], values[:, :, 0], rtol=0, atol=atol)


def test_integers_are_tensors_of_rank_0(folder, tmp_path):
    program = mlx_programs.write(Number(), (torch.zeros(3), 7), folder / "number.pte", delegated=False)
    x = torch.arange(3.0)
    doubled, number = run(program, tmp_path, [x, torch.tensor(7)])
    assert torch.equal(doubled, x + x)
    assert torch.equal(number, torch.tensor(7))
    for wrong in (torch.tensor([7]), torch.tensor(7, dtype=torch.int32)):
        refused(command(program, tmp_path, packed([x, wrong])), FAILED, "input 1", "an integer, i64 []")


def test_another_method(exported, tmp_path):
    program = exported("tiny-llama") / "model.pte"
    (most,) = run(program, tmp_path, [], "--method", "get_max_ctx_len")
    assert (most.dtype, most.dim()) == (torch.int64, 0)
    assert most > 0
    refused(command(program, tmp_path, packed([]), "--method", "no"), FAILED, "no method no; it has ", "forward")


SIMPLE = packed([torch.zeros(2, 3)])
"""A count, a dtype, a rank, two sizes, and 24 bytes of data."""


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", ["truncated: the number of tensors takes 4 bytes, 0 are left"]),
        (SIMPLE[:4], ["truncated: the dtype of tensor 0 of 1 takes 4 bytes, 0 are left"]),
        (SIMPLE[:9], ["truncated: the rank of tensor 0 of 1 takes 4 bytes, 1 are left"]),
        (SIMPLE[:19], ["truncated: the shape of tensor 0 of 1 takes 8 bytes, 7 are left"]),
        (SIMPLE[:-1], ["truncated: the data of tensor 0 of 1 takes 24 bytes, 23 are left"]),
        (SIMPLE + b"12345", ["has 5 bytes after its 1 tensor, expected none"]),
        (struct.pack("<I", 2) + SIMPLE[4:], ["truncated: the dtype of tensor 1 of 2"]),
        (struct.pack("<IIIi", 1, 7, 1, 0), ["tensor 0 of 1 has dtype 7, expected 0 (f32) to 6 (u8)"]),
        (struct.pack("<III", 1, 0, 17), ["tensor 0 of 1 has rank 17, expected at most 16"]),
        (struct.pack("<IIIi", 1, 0, 1, -3), ["tensor 0 of 1 has size -3, expected at least 0"]),
        (struct.pack("<III4i", 1, 0, 4, *[2**31 - 1] * 4), ["[2147483647, 2147483647,", f"at most {2**63 - 1} bytes"]),
        (struct.pack("<III4i", 1, 0, 4, *[2**31 - 1] * 3, 0), [f"expected at most {2**63 - 1} bytes"]),
        (struct.pack("<III1i", 1, 0, 1, 2**31 - 1), ["the data of tensor 0 of 1 takes 8589934588 bytes, 0 are left"]),
        (struct.pack("<IIIi3B", 1, 5, 1, 3, 0, 1, 2), ["has the bool 2 at element 2, expected 0 or 1"]),
    ],
)
def test_files_that_are_not_of_tensors(every, tmp_path, data, told):
    refused(command(every, tmp_path, data), FAILED, str(tmp_path / "in.bin"), *told)
    assert not (tmp_path / "out.bin").exists()


def replaced(index: int, tensor: torch.Tensor) -> bytes:
    given = inputs()
    given[index] = tensor
    return packed(given)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (packed(inputs()[1:]), ["the method forward takes 7 inputs, --input has 6 tensors"]),
        (replaced(0, inputs()[1]), ["input 0", "at most f32 [8, 4], --input has f16 [3, 4]"]),
        (replaced(0, torch.zeros(12)), ["input 0", "at most f32 [8, 4], --input has f32 [12]"]),
        (packed(inputs(9)), ["input 0", "at most f32 [8, 4], --input has f32 [9, 4]"]),
        (replaced(2, torch.zeros(0, 4, dtype=torch.int32)), []),
    ],
)
def test_inputs_that_do_not_fit(every, tmp_path, data, told):
    refused(command(every, tmp_path, data), FAILED, *told)
    assert not (tmp_path / "out.bin").exists()


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("16,2,2", ["capacity,n_layers,n_kv_heads,head_dim[,dtype]", "3 parts"]),
        ("16,2,2,32,6,6", ["6 parts"]),
        ("0,2,2,32", ["the capacity of --kv-cache is a whole number from 1 to 2147483647", '"0"']),
        ("16,65537,2,32", ["the n_layers of --kv-cache is a whole number from 1 to 65536", '"65537"']),
        ("16,2,2x,32", ["the n_kv_heads", '"2x"']),
        ("16,2,2,", ["the head_dim", '""']),
        ("16,2,2,32,7", ["--kv-cache: unknown storage format `7`", "bf16"]),
    ],
)
def test_sizes_of_a_cache_that_are_refused(attention, tmp_path, spec, told):
    refused(command(attention, tmp_path, packed([]), "--kv-cache", spec), MISUSED, *told)


def test_other_refusals(every, attention, tmp_path):
    rows = [torch.randn(1, heads, 4, 32) for _ in KV.layers for heads in (4, 2, 2)]
    data = packed([torch.arange(4), *rows])
    refused(command(attention, tmp_path, data), FAILED, "the program keeps its KV cache outside")
    refused(command(attention, tmp_path, data, "--kv-cache", "3,2,2,32"), FAILED, "3")
    refused(command(attention, tmp_path, data, "--kv-cache", "16,1,2,32"), FAILED, "layer")
    refused([runner("run"), "--pte", every], MISUSED, "--pte, --input and --output are needed")
    refused(command(tmp_path / "no.pte", tmp_path, SIMPLE), FAILED, "there is no program at")
    words = command(every, tmp_path, packed(inputs()))
    refused([*words, "--input", tmp_path], FAILED, "there is no file of tensors at")
    refused([*words, "--output", tmp_path / "no" / "out.bin"], FAILED, "cannot write the tensors", "No such file")
    damaged = tmp_path / "damaged.pte"
    damaged.write_bytes(every.read_bytes()[:200])
    refused(command(damaged, tmp_path, SIMPLE), FAILED, "truncated or damaged")


def test_help_and_version():
    told = reference.run([runner("run"), "--help"])
    assert told.returncode == 0
    for option in ("--pte", "--input", "--output", "--kv-cache", "--method"):
        assert option in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert reference.run([runner("run"), "--version"]).stdout.startswith("etkv_run ")
