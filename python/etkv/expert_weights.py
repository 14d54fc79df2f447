"""The weights of one product of all experts, in the order in which ``crates/etkv-cpu/src/experts/`` reads them.

An expert's matrix ``[out, in]`` is cut into tiles of 16 rows; the last is filled with zeros. A tile holds its 16 rows
interleaved, so that one vector has a number of each row. The products of two halves with one input, a gate and what it
gates, alternate: a tile of the gate, and the tile of the same rows of the other half.

``float32``, ``bfloat16``
    ``[experts, tiles, in, 16]``.
``int8``, ``int4``
    uint8 ``[experts, tiles, in / group, bytes]``: the 16 scales of a group in bfloat16, and after them its codes. A
    weight is its scale times its code without the offset of 128 or 8. Codes of 8 bits are ``[group / 4, 16, 4]``:
    four of row 0, four of row 1. Codes of 4 bits are ``[group / 8, 16, 4]`` bytes: the lower half of byte ``j`` has
    number ``j`` of the eight, and the upper half number ``j + 4``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 16
"""The rows of a tile."""

_SCALES = 2 * ROWS
"""The bytes of a tile's scales."""

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
"""A format -> the bits of a weight."""

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

    def shape(self, experts: int, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the packed weights of ``experts`` matrices ``[rows, columns]``."""
        tiles = -(-rows // ROWS)
        if self.name in _FLOATS:
            return experts, tiles, columns, ROWS
        if columns % self.group_size:
            raise ValueError(f"group-size {self.group_size} does not divide {columns}, the width of experts")
        size = _SCALES + self.group_size * ROWS * BITS[self.name] // 8
        return experts, tiles, columns // self.group_size, size

    def pack(self, matrix: Tensor) -> Tensor:
        """Return one expert's packed ``matrix``, ``[out, in]``.

        Raises :class:`ValueError` if it cannot be quantized: a weight is not finite, or groups do not divide a row.
        """
        shape = self.shape(1, *matrix.shape)
        tiles = _tiles(matrix.float())
        if self.name in _FLOATS:
            return tiles.transpose(1, 2).to(_FLOATS[self.name]).contiguous()
        if not bool(torch.isfinite(tiles).all()):
            raise ValueError("an expert has weights that are not finite")
        groups = tiles.unflatten(2, (-1, self.group_size))
        # The weight of the largest magnitude gets the code of the largest magnitude, which is negative.
        extreme = groups.gather(3, groups.abs().argmax(dim=3, keepdim=True))
        scales = (extreme / -self.offset).bfloat16()
        inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
        codes = (groups * inverse).round().clamp(-self.offset, self.offset - 1) + self.offset
        codes = codes.to(torch.uint8).transpose(1, 2)
        if self.name == "int4":
            low, high = codes.unflatten(3, (-1, 2, 4)).unbind(4)
            packed = (low | high << 4).transpose(2, 3)
        else:
            packed = codes.unflatten(3, (-1, 4)).transpose(2, 3)
        in_bytes = scales[..., 0].transpose(1, 2).contiguous().view(torch.uint8)
        return torch.cat([in_bytes, packed.flatten(2)], dim=2).reshape(shape[1:]).contiguous()

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the weights of one expert, ``[rows, in]`` in float32 with the rows that fill the last tile."""
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
