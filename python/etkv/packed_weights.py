"""Packed weights: matrices in the order in which ``crates/etkv-cpu/src/linear/`` reads them.

A matrix ``[out, in]`` is cut into tiles of 16 rows; the last is filled with zeros. A tile holds its 16 rows
interleaved, so that one vector has a number of each row.

``float32``, ``bfloat16``
    ``[tiles, in, 16]``.
``int8``, ``int4``
    uint8 ``[tiles, in / group, bytes]``: the 16 scales of a group in bfloat16, and after them its codes. A
    weight is its scale times its code without the offset of 128 or 8. Codes of 8 bits are ``[group / 4, 16, 4]``:
    four of row 0, four of row 1. Codes of 4 bits are ``[group / 8, 16, 4]`` bytes: the lower half of byte ``j`` has
    number ``j`` of the eight, and the upper half number ``j + 4``.

The matrices of all experts of a layer are ``[experts, tiles, ..]``. The products of two halves with one input, a gate
and what it gates, alternate there: a tile of the gate, and the tile of the same rows of the other half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 16
"""The rows of a tile."""

_SCALES = 2 * ROWS
"""The bytes of a tile's scales."""

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
"""A format -> the bits of a weight."""

_PART = 1 << 18
"""The weights of a part of a matrix that are packed at once."""

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored. ``group_size`` weights of a row share a scale; 0 in formats without scales.

    Where weights are integers, the inputs of products are rounded to 8 bits in groups of the same size.
    """

    name: str
    group_size: int = 0

    def __post_init__(self) -> None:
        """Raise :class:`ValueError` for a format that the kernels lack."""
        if self.name not in BITS:
            raise ValueError(f"expected weights in {', '.join(BITS)}, got {self.name!r}")
        if self.name in _FLOATS and self.group_size:
            raise ValueError(f"weights in {self.name} have no groups, got a group size of {self.group_size}")
        if self.name not in _FLOATS and (self.group_size < 32 or self.group_size % 32):
            raise ValueError(f"expected a group size that is a multiple of 32, got {self.group_size}")

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of packed weights."""
        return _FLOATS.get(self.name, torch.uint8)

    @property
    def offset(self) -> int:
        """Return the code of zero."""
        return 1 << (BITS[self.name] - 1)

    def shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Return the shape of a packed matrix ``[rows, columns]``.

        Raises :class:`ValueError` if groups do not divide a row.
        """
        tiles = -(-rows // ROWS)
        if self.name in _FLOATS:
            return tiles, columns, ROWS
        if columns % self.group_size:
            raise ValueError(f"group-size {self.group_size} does not divide {columns}, the width of the weights")
        return tiles, columns // self.group_size, _SCALES + self.group_size * ROWS * BITS[self.name] // 8

    def width(self, shape: Sequence[int]) -> int:
        """Return the columns of a packed matrix of this shape."""
        return shape[1] * (self.group_size or 1)

    def pack(self, matrix: Tensor) -> Tensor:
        """Return the packed ``matrix``, ``[out, in]``.

        Raises :class:`ValueError` if it cannot be quantized: a weight is not finite, or groups do not divide a row.
        """
        packed = torch.empty(self.shape(*matrix.shape), dtype=self.dtype)
        # Parts that stay in a core's cache while they are packed.
        step = max(1, _PART // (ROWS * matrix.shape[1]))
        for first in range(0, len(packed), step):
            rows = matrix[first * ROWS : (first + step) * ROWS]
            packed[first : first + step] = self._packed(_tiles(rows.float()))
        return packed

    def _packed(self, tiles: Tensor) -> Tensor:
        """Return packed ``tiles``, ``[tiles, 16, in]`` in float32."""
        if self.name in _FLOATS:
            return tiles.transpose(1, 2).to(_FLOATS[self.name])
        groups = tiles.unflatten(2, (-1, self.group_size))
        # The weight of the largest magnitude gets the code of the largest magnitude, which is negative.
        least, most = groups.aminmax(dim=3)
        extreme = torch.where(-least >= most, least, most)
        if not bool(torch.isfinite(extreme).all()):
            raise ValueError("weights are not finite")
        scales = (extreme / -self.offset).bfloat16()
        inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
        codes = (groups * inverse.unsqueeze(3)).round_().clamp_(-self.offset, self.offset - 1).add_(self.offset)
        codes = codes.to(torch.uint8).transpose(1, 2)
        if self.name == "int4":
            low, high = codes.unflatten(3, (-1, 2, 4)).unbind(4)
            packed = (low | high << 4).transpose(2, 3)
        else:
            packed = codes.unflatten(3, (-1, 4)).transpose(2, 3)
        in_bytes = scales.transpose(1, 2).contiguous().view(torch.uint8)
        return torch.cat([in_bytes, packed.flatten(2)], dim=2)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the weights of a packed matrix, ``[rows, in]`` in float32 with the rows that fill the last tile."""
        if self.name in _FLOATS:
            return packed.float().transpose(1, 2).flatten(0, 1)
        scales = packed[..., :_SCALES].contiguous().view(torch.bfloat16).float()
        codes = packed[..., _SCALES:]
        if self.name == "int4":
            codes = codes.unflatten(2, (-1, ROWS, 4))
            # [tiles, groups, eights, rows, halves, 4] -> [tiles, rows, groups, eights, halves, 4]
            codes = torch.stack([codes & 15, codes >> 4], dim=4).permute(0, 3, 1, 2, 4, 5)
        else:
            codes = codes.unflatten(2, (-1, ROWS, 4)).permute(0, 3, 1, 2, 4)
        numbers = codes.flatten(3).float() - self.offset
        return (numbers * scales.transpose(1, 2).unsqueeze(3)).flatten(2).flatten(0, 1)


def padded(n: int) -> int:
    """Return the rows of ``n`` rows in whole tiles."""
    return -(-n // ROWS) * ROWS


def _tiles(matrix: Tensor) -> Tensor:
    """Return the rows in tiles, ``[tiles, 16, in]``."""
    missing = -len(matrix) % ROWS
    if missing:
        matrix = torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])])
    tiles: Tensor = matrix.unflatten(0, (-1, ROWS))
    return tiles


def alternate(gate: Tensor, up: Tensor) -> Tensor:
    """Return the rows of two halves ``[rows, ...]`` in alternating tiles, each half filled to whole tiles."""
    halves = torch.stack([_tiles(half.reshape(len(half), -1)) for half in (gate, up)], dim=1)
    return halves.flatten(0, 2).reshape(-1, *gate.shape[1:])


def apart(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves whose tiles alternate in ``rows``."""
    gate, up = rows.unflatten(0, (-1, 2, ROWS)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)
