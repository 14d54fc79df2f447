"""Packs matrices in the formats of published checkpoints, number by number.

Each function returns the tensors of one layer, by the suffixes of their names, and the expected weight
``[rows, columns]`` in float32. The code uses only loops and integers, and shares nothing with the exporter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]

_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
_AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]
"""The indices of the eight outputs in a word, beginning at the lowest bits."""


def numbers(bits: int, *shape: int, seed: int = 0, low: int = 0) -> Tensor:
    """Return random integers of ``bits`` bits that are at least ``low``."""
    return torch.randint(low, 1 << bits, shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return random scales in the usual range of weights."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.001).to(dtype)


def words(row: Sequence[int], bits: int) -> list[int]:
    """Return the int32 words with the numbers of ``row``, packed beginning at the lowest bit."""
    stream = 0
    for place, number in enumerate(row):
        stream |= int(number) << place * bits
    count = -(-len(row) * bits // 32)
    found = [(stream >> 32 * word) & 0xFFFFFFFF for word in range(count)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in found]


def in_words(matrix: Tensor, bits: int) -> Tensor:
    """Return the rows of ``matrix`` packed in words."""
    return torch.tensor([words(row, bits) for row in matrix.tolist()], dtype=torch.int32)


def weight(codes: Tensor, scale: Tensor, zero: Tensor, group_of: Sequence[int]) -> Tensor:
    """Return the weights [rows, columns] of ``codes``, with scales and zero points [rows, groups]."""
    made = []
    for of_row, zeros, factors in zip(codes.tolist(), zero.tolist(), scale.tolist(), strict=True):
        made.append([(code - zeros[group]) * factors[group] for code, group in zip(of_row, group_of, strict=True)])
    return torch.tensor(made)


def awq(rows: int, columns: int, group_size: int, *, is_gemv: bool = False, seed: int = 0) -> Packed:
    """Return a layer of AutoAWQ in 4 bits."""
    groups = columns // group_size
    codes, zeros = numbers(4, rows, columns, seed=seed), numbers(4, rows, groups, seed=seed + 1)
    scale = scales(rows, groups, seed=seed)
    plain = weight(codes, scale, zeros, [column // group_size for column in range(columns)])
    if is_gemv:
        filled = 8 * (128 // group_size)
        missing = -groups % filled
        pad = torch.nn.functional.pad
        zeros, scale = pad(zeros, (0, missing)), pad(scale, (0, missing))
        return {"qweight": in_words(codes, 4), "qzeros": in_words(zeros, 4), "scales": scale}, plain

    def gemm(matrix: Tensor) -> Tensor:
        order = [word * 8 + place for word in range(rows // 8) for place in _AWQ_PLACES]
        return in_words(matrix.T[:, order], 4)

    return {"qweight": gemm(codes), "qzeros": gemm(zeros), "scales": scale.T.contiguous()}, plain


def gptq(
    rows: int,
    columns: int,
    group_size: int,
    bits: int,
    *,
    group_of: Sequence[int] | None = None,
    is_second: bool = False,
    symmetric: bool = False,
    seed: int = 0,
) -> Packed:
    """Return a layer of GPTQ. ``group_of`` is the group of each column. ``is_second`` selects the second format."""
    group_of = group_of or [column // group_size for column in range(columns)]
    groups = max(group_of) + 1
    codes = numbers(bits, rows, columns, seed=seed)
    # The first format has no zero point of 0.
    zeros = numbers(bits, rows, groups, seed=seed + 1, low=0 if is_second else 1)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    scale = scales(rows, groups, seed=seed)
    stored = zeros if is_second else zeros - 1
    made = {
        "qweight": in_words(codes.T.contiguous().T, bits).T.contiguous(),
        "qzeros": in_words(stored.T, bits),
        "scales": scale.T.contiguous(),
        "g_idx": torch.tensor(group_of, dtype=torch.int32),
    }
    return made, weight(codes, scale, zeros, group_of)


def packed_integers(
    rows: int, columns: int, group_size: int, bits: int, *, symmetric: bool = True, seed: int = 0
) -> Packed:
    """Return a layer of compressed-tensors in the format pack-quantized."""
    groups = columns // group_size
    codes, zeros = numbers(bits, rows, columns, seed=seed), numbers(bits, rows, groups, seed=seed + 1)
    scale = scales(rows, groups, seed=seed, dtype=torch.bfloat16)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    made = {
        "weight_packed": in_words(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        made["weight_zero_point"] = in_words(zeros.T, bits).T.contiguous()
    return made, weight(codes, scale, zeros, [column // group_size for column in range(columns)])


def integers(rows: int, columns: int, *, symmetric: bool = True, seed: int = 0) -> Packed:
    """Return a layer of compressed-tensors in the format int-quantized, with a scale for each row."""
    codes = numbers(8, rows, columns, seed=seed) - 128
    zeros = torch.zeros(rows, 1, dtype=torch.int64) if symmetric else numbers(7, rows, 1, seed=seed) - 64
    scale = scales(rows, 1, seed=seed, dtype=torch.bfloat16)
    made = {"weight": codes.to(torch.int8), "weight_scale": scale}
    if not symmetric:
        made["weight_zero_point"] = zeros.to(torch.int8)
    return made, weight(codes, scale, zeros, [0] * columns)


def fp8(
    rows: int,
    columns: int,
    block: tuple[int, int] | None,
    *,
    scale_shape: tuple[int, ...] | None = None,
    scale_name: str = "weight_scale_inv",
    as_powers: bool = False,
    seed: int = 0,
) -> Packed:
    """Return a layer in 8-bit floats with a scale for each block, or with scales of shape ``scale_shape``."""
    codes = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
    grid = (rows, 1) if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    if as_powers:
        stored = numbers(3, *grid, seed=seed).to(torch.uint8) + 118
        scale = torch.tensor([[2.0 ** (byte - 127) for byte in row] for row in stored.tolist()])
    else:
        stored = scale = scales(*(grid if scale_shape is None else scale_shape), seed=seed, dtype=torch.float32)
    made = codes.float()
    for row in range(rows):
        for column in range(columns):
            if block is not None:
                factor = scale[row // block[0], column // block[1]]
            else:
                factor = scale.flatten()[row if scale.numel() == rows else 0]
            made[row, column] *= factor
    return {"weight": codes, scale_name: stored}, made


def _fp4(codes: Tensor, factor: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return bytes with two numbers each, and each number times the factor of its group."""
    in_bytes, made = [], []
    for of_row, factors in zip(codes.tolist(), factor.tolist(), strict=True):
        in_bytes.append([low + 16 * high for low, high in zip(of_row[::2], of_row[1::2], strict=True)])
        made.append([_FP4[code] * factors[column // group_size] for column, code in enumerate(of_row)])
    return torch.tensor(in_bytes, dtype=torch.uint8), torch.tensor(made)


def nvfp4(rows: int, columns: int, *, divides: bool, seed: int = 0) -> Packed:
    """Return a layer in NVFP4: of compressed-tensors if the global scale divides, else of Model Optimizer."""
    scale = (scales(rows, columns // 16, seed=seed) * 20000).to(torch.float8_e4m3fn)
    whole = torch.tensor([3000.0]) if divides else torch.tensor(1 / 3000.0)
    factor = scale.float() / whole if divides else scale.float() * whole
    in_bytes, made = _fp4(numbers(4, rows, columns, seed=seed), factor, 16)
    if divides:
        return {"weight_packed": in_bytes, "weight_scale": scale, "weight_global_scale": whole}, made
    return {"weight": in_bytes, "weight_scale": scale, "weight_scale_2": whole}, made


def mxfp4(rows: int, columns: int, seed: int = 0) -> Packed:
    """Return a layer of compressed-tensors in MXFP4: bytes with two numbers each, and exponents of groups of 32."""
    exponents = numbers(3, rows, columns // 32, seed=seed).to(torch.uint8) + 118
    factor = torch.tensor([[2.0 ** (byte - 127) for byte in row] for row in exponents.tolist()])
    in_bytes, made = _fp4(numbers(4, rows, columns, seed=seed), factor, 32)
    return {"weight_packed": in_bytes, "weight_scale": exponents}, made


def bitsandbytes(rows: int, columns: int, *, is_nested: bool, seed: int = 0) -> Packed:
    """Return a layer of bitsandbytes in 4 bits, with blocks of 64 numbers."""
    table = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    codes = numbers(4, rows * columns, seed=seed).tolist()
    blocks = rows * columns // 64
    state: dict[str, object] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    made = {
        "weight": torch.tensor([[16 * high + low] for high, low in zip(codes[::2], codes[1::2], strict=True)]).byte(),
        "weight.quant_map": table,
    }
    scale = scales(blocks, seed=seed, dtype=torch.float32)
    if is_nested:
        of_scales = torch.rand(256, generator=torch.Generator().manual_seed(seed))
        inner, outer = numbers(8, blocks, seed=seed), scales(-(-blocks // 8), seed=seed, dtype=torch.float32)
        scale = torch.tensor([of_scales[code] * outer[block // 8] + 0.25 for block, code in enumerate(inner.tolist())])
        made |= {"weight.nested_quant_map": of_scales, "weight.nested_absmax": outer, "weight.absmax": inner.byte()}
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.25}
    else:
        made["weight.absmax"] = scale
    made["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode())).byte()
    values = [table[code] * scale[place // 64] for place, code in enumerate(codes)]
    return made, torch.stack(values).reshape(rows, columns)


def llm_int8(rows: int, columns: int, seed: int = 0) -> Packed:
    """Return a layer of bitsandbytes in 8 bits."""
    codes = numbers(8, rows, columns, seed=seed) - 128
    scale = scales(rows, seed=seed, dtype=torch.float32)
    made = {"weight": codes.to(torch.int8), "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return made, codes.float() * (scale / 127.0).unsqueeze(1)
