"""ExecuTorch's Metal kernels: etkv's replacements, compared with ExecuTorch's eager references."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etkv import _mlx_serialization, describe_program, load
from etkv.errors import EtkvError
from mlx_programs import Function, write
from reference import EVERYTHING

_mlx_serialization.ensure_available()

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOATS = [F32, F16, BF16]
ROUNDOFF = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
"""dtype -> the largest relative error of rounding to it."""

FORMATS = {"q4_k": 144, "q5_k": 176, "q6_k": 210}
"""The bytes of a super-block of 256 elements."""


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """Register the operators whose kernels are tested."""
    import executorch.backends.mlx.custom_kernel_ops.gated_delta_rule
    import executorch.backends.mlx.custom_kernel_ops.tq4_compress
    import executorch.backends.mlx.custom_kernel_ops.tq_dequant
    import executorch.backends.mlx.custom_kernel_ops.tq_norm  # noqa: F401


def outputs(path: Path, *inputs: Tensor) -> list[Tensor]:
    with load(path, None) as program:
        return program.execute(*inputs)


def numbers(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_close(found: Tensor, expected: Tensor, errors: float) -> None:
    """Compare with the result in float32. The tolerance is ``errors`` roundings of the largest element."""
    assert found.shape == expected.shape
    limit = errors * ROUNDOFF[found.dtype] * max(1e-30, expected.abs().max().item())
    worst = (found.double() - expected.double()).abs().max().item()
    assert worst <= limit, f"{worst} of {limit}"


# ---- TurboQuant ------------------------------------------------------------

SHAPES = [(1, 1, 1, 64), (2, 3, 5, 128), (7, 64), (64,)]


def in_floats(shapes: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return each shape with each dtype in `make test-long`, else every second shape with one dtype, because an export
    takes a second.
    """
    if EVERYTHING:
        return [(shape, dtype) for shape in shapes for dtype in FLOATS]
    return [(shape, FLOATS[index % len(FLOATS)]) for index, shape in enumerate(shapes[::2])]


def boundaries(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1.5, 1.5, 15).to(dtype)


@pytest.mark.parametrize(("shape", "dtype"), in_floats([*SHAPES, (3, 2), (1, 4, 6)]))
def test_values_become_codes(shape, dtype, tmp_path):
    codes, limits = torch.ops.mlx.tq4_compress, boundaries(dtype)
    values = numbers(*shape, dtype=dtype)
    # Include values on each boundary and beyond all boundaries.
    edges = torch.cat([limits, torch.tensor([-torch.inf, torch.inf, 0.0]).to(dtype)])
    values.view(-1)[: edges.numel()] = edges[: values.numel()]
    path = write(Function(codes), (values, limits), tmp_path / "codes.pte")
    (found,) = outputs(path, values, limits)
    assert found.dtype == torch.uint8
    assert torch.equal(found, codes(values, limits))


@pytest.mark.parametrize(("shape", "dtype"), in_floats(SHAPES))
def test_codes_become_values(shape, dtype, tmp_path):
    codes = np.random.default_rng(0).integers(0, 256, [*shape[:-1], shape[-1] // 2], np.uint8)
    inputs = torch.from_numpy(codes), numbers(*shape[:-1], 1, dtype=dtype), numbers(16, dtype=dtype, seed=1)
    path = write(Function(torch.ops.mlx.tq_dequant), inputs, tmp_path / "values.pte")
    (found,) = outputs(path, *inputs)
    assert found.dtype == dtype
    assert torch.equal(found, torch.ops.mlx.tq_dequant(*inputs))


@pytest.mark.parametrize(("shape", "dtype"), in_floats([*SHAPES, (3, 32), (5, 96)]))
def test_norms(shape, dtype, tmp_path):
    norms, x = torch.ops.mlx.tq_norm, numbers(*shape, dtype=dtype)
    path = write(Function(norms), (x,), tmp_path / "norms.pte")
    (found,) = outputs(path, x)
    assert found.dtype == dtype
    check_close(found, norms(x.float()), 4 if dtype == F32 else 1.01)


def test_a_kernel_for_any_number_of_tokens(tmp_path):
    limits, centroids = boundaries(F32), torch.linspace(-1.6, 1.6, 16)

    def there_and_back(x: Tensor) -> Tensor:
        norms = torch.ops.mlx.tq_norm(x)
        codes = torch.ops.mlx.tq4_compress(x / norms, limits)
        return torch.ops.mlx.tq_dequant(codes, norms, centroids)

    tokens = torch.export.Dim("tokens", min=1, max=64)
    path = write(Function(there_and_back), (numbers(1, 3, 64),), tmp_path / "any.pte", dynamic_shapes=(({1: tokens},),))
    for n in (1, 3, 64):
        x = numbers(1, n, 64, seed=n)
        (found,) = outputs(path, x)
        check_close(found, there_and_back(x), 4)


# ---- GGUF ------------------------------------------------------------------


def blocks(ggml_type: str, rows: int, features: int, seed: int = 0) -> Tensor:
    """Return super-blocks of random bytes, with scales of about 1e-3."""
    random = np.random.default_rng(seed)
    made = random.integers(0, 256, [rows, features // 256, FORMATS[ggml_type]], np.uint8)
    at, n = (208, 1) if ggml_type == "q6_k" else (0, 2)
    scales = random.uniform(-1e-3, 1e-3, [*made.shape[:2], n]).astype(np.float16)
    made[..., at : at + 2 * n] = scales.view(np.uint8)
    return torch.from_numpy(made.reshape(rows, -1))


@pytest.fixture
def direct(monkeypatch):
    """Make the exporter write kernels instead of MLX's own packed weights."""
    import executorch.backends.mlx.custom_kernel_ops.gguf.patterns  # noqa: F401

    monkeypatch.setenv("ET_MLX_EMIT_DIRECT_GGUF", "1")


def weight(ggml_type: str, rows: int, features: int, dtype: torch.dtype) -> Any:
    from executorch.extension.llm.export.gguf import ExportableGGUFTensor

    return ExportableGGUFTensor.from_raw(blocks(ggml_type, rows, features), ggml_type, dtype)


def linear(ggml_type: str, outputs: int, features: int, dtype: torch.dtype, bias: bool) -> torch.nn.Linear:
    made = torch.nn.Linear(features, outputs, bias=bias).to(dtype)
    made.weight = torch.nn.Parameter(weight(ggml_type, outputs, features, dtype), requires_grad=False)
    return made


LINEAR = [
    # Leading axes, outputs, features, dtype, bias.
    ((1,), 256, 256, F32, True),
    ((1, 1), 1, 512, BF16, False),
    ((5,), 37, 256, F16, True),
    ((2, 3), 300, 1024, F32, False),
    ((1, 40), 300, 768, BF16, True),
    ((1, 70), 2100, 512, F32, True),
]
MIDDLE = [(1,), (5,), (2, 3)]
"""Leading axes of the layers that run in `make test-long` only."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case[0] in MIDDLE else (), id=str(case)) for case in LINEAR]
)
@pytest.mark.parametrize("ggml_type", FORMATS)
def test_linear_layers_of_gguf(ggml_type, case, direct, tmp_path):
    leading, n, features, dtype, bias = case
    model = linear(ggml_type, n, features, dtype, bias)
    x = numbers(*leading, features, dtype=dtype)
    path = write(model, (x,), tmp_path / "linear.pte")
    (found,) = outputs(path, x)
    assert found.dtype == dtype
    wide = model.weight.dequantize(F32)
    expected = torch.nn.functional.linear(x.float(), wide, model.bias.float() if bias else None)
    check_close(found, expected, features**0.5 if dtype == F32 else 1.1)


@pytest.mark.parametrize("ggml_type", FORMATS)
def test_a_layer_for_one_row_and_for_several(ggml_type, direct, tmp_path):
    """The exporter writes a choice of two kernels if the number of rows is dynamic."""
    model = linear(ggml_type, 40, 256, BF16, bias=True)
    tokens = torch.export.Dim("tokens", min=1, max=64)
    path = write(model, (numbers(1, 3, 256, dtype=BF16),), tmp_path / "linear.pte", dynamic_shapes=({1: tokens},))
    name = f"gguf_{ggml_type.replace('_', '')}".encode()
    assert all(name + form in path.read_bytes() for form in (b"_matvec", b"_matmul"))
    wide = model.weight.dequantize(F32)
    for n in (1, 2, 64):
        x = numbers(1, n, 256, dtype=BF16, seed=n)
        (found,) = outputs(path, x)
        check_close(found, torch.nn.functional.linear(x.float(), wide, model.bias.float()), 1.1)


def test_mlx_s_own_packed_weights_take_rows_of_any_shape(direct, monkeypatch, tmp_path):
    """The exporter prefers MLX's packed weights to a kernel. On a CPU, MLX's half-precision product also sums in half
    precision.
    """
    monkeypatch.setenv("ET_MLX_EMIT_DIRECT_GGUF", "0")
    x = numbers(6, 512, dtype=BF16)
    found = []
    for shape in ([1, 6], [6], [2, 3]):
        model = linear("q4_k", 40, 512, BF16, bias=False)
        path = write(model, (x.reshape(*shape, 512),), tmp_path / "packed.pte")
        assert b"gguf_q4k_mat" not in path.read_bytes()
        found += outputs(path, x.reshape(*shape, 512))
        assert found[-1].shape == (*shape, 40)
    assert all(torch.equal(other.reshape(6, 40), found[0].reshape(6, 40)) for other in found)


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=() if dtype == BF16 else pytest.mark.long) for dtype in FLOATS]
)
@pytest.mark.parametrize("ggml_type", FORMATS)
def test_rows_of_gguf(ggml_type, dtype, direct, tmp_path):
    model = torch.nn.Embedding(45, 512)
    model.weight = torch.nn.Parameter(weight(ggml_type, 45, 512, dtype), requires_grad=False)
    tokens = torch.export.Dim("tokens", min=1, max=64)
    path = write(model, (torch.arange(6).reshape(2, 3),), tmp_path / "rows.pte", dynamic_shapes=({1: tokens},))
    wide = model.weight.dequantize(F32)
    for ids in ([[44], [0]], [[3, 3, 44, 1], [0, 9, 12, 13]]):
        (found,) = outputs(path, torch.tensor(ids))
        assert found.dtype == dtype
        check_close(found, wide[torch.tensor(ids)], 4 if dtype == F32 else 1.01)
    for wrong in (45, -1):
        with pytest.raises(EtkvError, match=f"expected an index .* from 0 to 44, got {wrong}"):
            outputs(path, torch.tensor([[0], [wrong]]))


# ---- The gated delta rule --------------------------------------------------


class GatedDelta(torch.nn.Module):
    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.register_buffer("state", state)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return torch.ops.mlx.gated_delta_rule(q, k, v, g, beta, self.state, use_custom_kernel=True)


def delta_inputs(batch: int, n: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int, seed: int) -> list[Tensor]:
    k = torch.nn.functional.normalize(numbers(batch, n, k_heads, k_dim, seed=seed), dim=-1)
    gates = [torch.sigmoid(2 + numbers(batch, n, v_heads, seed=seed + 1 + i)) for i in range(2)]
    q, v = numbers(batch, n, k_heads, k_dim, seed=seed + 3), numbers(batch, n, v_heads, v_dim, seed=seed + 4)
    return [q, k, v, *gates]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 32, 8), (1, 2, 4, 64, 24), (2, 2, 2, 32, 5)], ids=str)
def test_the_gated_delta_rule(sizes, tmp_path):
    batch, k_heads, v_heads, k_dim, v_dim = sizes
    sizes = (k_heads, v_heads, k_dim, v_dim)
    model = GatedDelta(torch.zeros(batch, v_heads, v_dim, k_dim))
    tokens = torch.export.Dim("tokens", min=1, max=256)
    inputs = delta_inputs(batch, 3, *sizes, seed=0)
    path = write(model, inputs, tmp_path / "delta.pte", dynamic_shapes=({1: tokens},) * 5)
    eager = GatedDelta(torch.zeros(batch, v_heads, v_dim, k_dim))
    with load(path, None) as program:
        # Each step continues from the state of the step before.
        for seed, n in enumerate((5, 1, 1, 33, 70)):
            inputs = delta_inputs(batch, n, *sizes, seed=10 * seed)
            (found,) = program.execute(*inputs)
            check_close(found, eager(*inputs), 256)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_the_gated_delta_rule_in_half_precision(dtype, tmp_path):
    inputs = [array.to(dtype) for array in delta_inputs(1, 40, 2, 4, 32, 16, seed=0)]
    path = write(GatedDelta(torch.zeros(1, 4, 16, 32, dtype=dtype)), inputs, tmp_path / "delta.pte")
    (found,) = outputs(path, *inputs)
    assert found.dtype == dtype
    # As in the kernel, the state stays in float32 until the last token.
    expected = GatedDelta(torch.zeros(1, 4, 16, 32))(*[array.float() for array in inputs])
    check_close(found, expected, 1.1)


# ---- The description of a kernel -------------------------------------------


def test_a_kernel_is_described_without_its_source(tmp_path):
    path = write(Function(torch.ops.mlx.tq_norm), (numbers(3, 32),), tmp_path / "norms.pte")
    described = describe_program(path)
    assert described["refused"] is None
    (fields,) = [node["fields"] for node in described["instructions"] if node["operation"] == "MetalKernel"]
    assert fields.startswith('name: "tq_norm", source: ')
    assert "simd_sum" not in fields
    assert "using namespace" not in fields
    assert re.search(r"source: \d{3} bytes, inputs: \[t0\], outputs: \[t1\], .* header: \d+ bytes, ", fields), fields


# ---- Kernels that are refused ----------------------------------------------


def test_another_kernel_is_refused_by_name(tmp_path):
    path = write(Function(torch.ops.mlx.tq_norm), (numbers(3, 32),), tmp_path / "norms.pte")
    data = path.read_bytes()
    assert data.count(b"\0tq_norm\0") == 1
    path.write_bytes(data.replace(b"\0tq_norm\0", b"\0tq_morn\0"))
    with pytest.raises(EtkvError, match="Metal kernel `tq_morn`: this build has no implementation of it"):
        load(path, None)
