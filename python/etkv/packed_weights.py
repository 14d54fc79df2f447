"""Packed weights: matrices in the memory order that ``crates/etkv-cpu/src/linear/`` reads.

A matrix ``[out, in]`` is split into tiles of 16 rows. The last tile is padded with zeros. A tile stores its 16 rows
interleaved, so that a vector register gets one element of each row.

``float32``, ``bfloat16``
    ``[tiles, in, 16]``.
``int8``, ``int4``
    uint8 ``[tiles, in / group, bytes]``: the 16 scales of a group in bfloat16, and after them its codes. A weight is
    its scale times (code - offset), with an offset of 128 or 8. Codes of 8 bits are ``[group / 4, 16, 4]``: four codes
    of row 0, then four codes of row 1, and so on. Codes of 4 bits are ``[group / 8, 16, 4]`` bytes, which hold eight
    codes of each row: byte ``j`` has code ``j`` in its lower half and code ``j + 4`` in its upper half.
``int8_float16``, ``int8_float32``, ``int4_float16``, ``int4_float32``
    The same as ``int8`` and ``int4``, with scales in float16 or float32: for published weights whose scales are not
    exact in bfloat16.
``int8_bfloat16_biased``, ``int8_float16_biased``, ``int8_float32_biased``, and the same of ``int4``
    The 16 scales of a group, 16 biases of the same dtype, and the codes. A weight is its scale times its code, rounded
    to float32, plus the bias.
``int8_nested``, ``int4_nested``
    The same as the formats with biases, but each scale and each bias is a byte times a factor, as in GGUF's ``Q4_K``:
    uint8 ``[tiles, in / group / 8, bytes]``. Eight groups have 16 factors of scales and 16 factors of biases in
    float16, and each group has 16 bytes of scales, 16 bytes of biases, and its codes.
``fp4``
    The same as ``int4`` with 4-bit floats (E2M1) as codes, as in ``mxfp4``. A weight is its scale times twice the value
    of its code.

The matrices of all experts of a layer are ``[experts, tiles, ..]``. In them the tiles of a gate alternate with the
tiles of the product that it gates: a tile of the gate, then the tile of the same rows of the other matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 16
"""Number of rows in a tile."""

NESTED = 8
"""Number of groups that share the factors of a nested format."""


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a group: ``n`` in ``dtype`` for each row, and ``factors`` that it shares with other groups."""

    dtype: torch.dtype
    n: int = 1
    factors: int = 0

    @property
    def size(self) -> int:
        """Return the bytes of a group's numbers."""
        return self.n * self.dtype.itemsize * ROWS

    @property
    def sharing(self) -> int:
        """Return the number of groups that share factors."""
        return NESTED if self.factors else 1


_NUMBERS = {
    "": _Numbers(torch.bfloat16),
    "_float16": _Numbers(torch.float16),
    "_float32": _Numbers(torch.float32),
    "_bfloat16_biased": _Numbers(torch.bfloat16, 2),
    "_float16_biased": _Numbers(torch.float16, 2),
    "_float32_biased": _Numbers(torch.float32, 2),
    "_nested": _Numbers(torch.uint8, 2, 2),
}
"""Suffix of a format's name -> the numbers of a group. Formats with the same ``n`` are in the order of their size."""

_FP4 = "fp4"

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of E2M1, 4-bit floats. The highest of the four bits is the sign."""

_INTEGERS = {
    **{f"int{bits}{end}": (bits, numbers) for bits in (8, 4) for end, numbers in _NUMBERS.items()},
    _FP4: (4, _NUMBERS[""]),
}
"""Format with groups -> the bits of a weight, and the numbers of a group."""

_PART = 1 << 18
"""Number of weights that are packed at once."""

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class WeightFormat:
    """A storage format of weights. ``group_size`` weights of a row share a scale; 0 in formats without scales.

    If weights have scales, the inputs of products are rounded to 8 bits in groups of the same size.
    """

    name: str
    group_size: int = 0

    def __post_init__(self) -> None:
        """Raise :class:`ValueError` for a format that the kernels do not support."""
        names = (*_FLOATS, *_INTEGERS)
        if self.name not in names:
            raise ValueError(f"expected weights in {', '.join(names)}, got {self.name!r}")
        if self.name in _FLOATS and self.group_size:
            raise ValueError(f"expected a group size of 0 for weights in {self.name}, got {self.group_size}")
        if self.name not in _FLOATS and (self.group_size < 32 or self.group_size % 32):
            raise ValueError(f"expected a group size that is a multiple of 32, got {self.group_size}")

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of packed weights."""
        return _FLOATS.get(self.name, torch.uint8)

    @property
    def _bits(self) -> int:
        return _INTEGERS[self.name][0]

    @property
    def _numbers(self) -> _Numbers:
        return _INTEGERS[self.name][1]

    @property
    def offset(self) -> int:
        """Return the number that stands for zero; 0 for floats of 4 bits."""
        return 0 if self.name == _FP4 else 1 << (self._bits - 1)

    def shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Return the shape of a packed matrix ``[rows, columns]``.

        Raises :class:`ValueError` if ``columns`` is not a multiple of the group size.
        """
        tiles = -(-rows // ROWS)
        if self.name in _FLOATS:
            return tiles, columns, ROWS
        numbers = self._numbers
        if columns % (self.group_size * numbers.sharing):
            raise ValueError(f"group-size {self.group_size} does not divide {columns}, the width of the weights")
        size = numbers.sharing * (numbers.size + self.group_size * ROWS * self._bits // 8)
        return tiles, columns // self.group_size // numbers.sharing, size + 2 * numbers.factors * ROWS

    def width(self, shape: Sequence[int]) -> int:
        """Return the columns of a packed matrix of this shape."""
        return shape[1] * (self.group_size * self._numbers.sharing if self.group_size else 1)

    def pack(self, matrix: Tensor) -> Tensor:
        """Return the packed ``matrix``, ``[out, in]``.

        Raises :class:`ValueError` if a weight is not finite, if a row is not a multiple of the group size, or if the
        format has biases or floats: only published weights have them.
        """
        if self.group_size and (self._numbers.n > 1 or self.name == _FP4):
            raise ValueError(f"cannot quantize weights to {self.name}: only published weights have this format")
        packed = torch.empty(self.shape(*matrix.shape), dtype=self.dtype)
        # Pack in parts that fit a core's cache.
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
        # The weight of the largest magnitude gets the code of the largest magnitude. This code is negative.
        least, most = groups.aminmax(dim=3)
        extreme = torch.where(-least >= most, least, most)
        if not bool(torch.isfinite(extreme).all()):
            raise ValueError("cannot quantize weights that are not finite")
        offset = self.offset
        scales = (extreme / -offset).to(self._numbers.dtype)
        inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
        codes = (groups * inverse.unsqueeze(3)).round_().clamp_(-offset, offset - 1).add_(offset)
        return self._joined(codes.to(torch.uint8), [scales])

    def keep(self, codes: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        """Return the packed matrix of ``codes``, uint8 ``[out, in]``.

        ``numbers`` are the scales, ``[out, in / group]``, and the biases if the format has them. In nested formats
        they are the bytes of scales, the bytes of biases, and the factors of each, ``[out, in / group / 8]``. They
        must be exact in their dtype.
        """
        own, tiles = self._numbers, [_tiles(part) for part in numbers]
        of_groups = [part.to(own.dtype) for part in tiles[: own.n]]
        factors = [part.to(torch.float16) for part in tiles[own.n :]]
        return self._joined(_tiles(codes).unflatten(2, (-1, self.group_size)), of_groups, factors)

    def _joined(self, codes: Tensor, numbers: Sequence[Tensor], factors: Sequence[Tensor] = ()) -> Tensor:
        """Return packed tiles of ``codes``, uint8 ``[tiles, 16, groups, group]``, and numbers ``[tiles, 16, n]``."""
        codes = codes.transpose(1, 2)
        if self._bits == 4:
            low, high = codes.unflatten(3, (-1, 2, 4)).unbind(4)
            packed = (low | high << 4).transpose(2, 3)
        else:
            packed = codes.unflatten(3, (-1, 4)).transpose(2, 3)
        groups = torch.cat([*map(_bytes, numbers), packed.flatten(2)], dim=2)
        if factors:
            groups = torch.cat([*map(_bytes, factors), groups.unflatten(1, (-1, NESTED)).flatten(2)], dim=2)
        return groups

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the weights of a packed matrix, ``[rows, in]`` in float32, including the padding of the last tile."""
        if self.name in _FLOATS:
            return packed.float().transpose(1, 2).flatten(0, 1)
        numbers, factors = self._numbers, []
        if numbers.factors:
            first, packed = packed.split([2 * numbers.factors * ROWS, packed.shape[2] - 2 * numbers.factors * ROWS], 2)
            factors = _of_rows(first, torch.float16, numbers.factors)
            packed = packed.unflatten(2, (NESTED, -1)).flatten(1, 2)
        scales, *biases = _of_rows(packed[..., : numbers.size], numbers.dtype, numbers.n)
        if factors:
            scales, biases = (
                scales * factors[0].repeat_interleave(NESTED, 2),
                [biases[0] * factors[1].repeat_interleave(NESTED, 2)],
            )
        codes = packed[..., numbers.size :]
        if self._bits == 4:
            codes = codes.unflatten(2, (-1, ROWS, 4))
            # [tiles, groups, eights, rows, halves, 4] -> [tiles, rows, groups, eights, halves, 4]
            codes = torch.stack([codes & 15, codes >> 4], dim=4).permute(0, 3, 1, 2, 4, 5)
        else:
            codes = codes.unflatten(2, (-1, ROWS, 4)).permute(0, 3, 1, 2, 4)
        weights = codes.flatten(3)
        weights = looked_up(_doubles(), weights) if self.name == _FP4 else weights.float()
        if biases:
            weights = weights * scales.unsqueeze(3) + biases[0].unsqueeze(3)
        else:
            weights = (weights - self.offset) * scales.unsqueeze(3)
        return weights.flatten(2).flatten(0, 1)


def _doubles() -> Tensor:
    """Return twice the value of each 4-bit float."""
    return torch.tensor([*DOUBLED, *(-double for double in DOUBLED)], dtype=torch.float32)


def looked_up(table: Tensor, indices: Tensor) -> Tensor:
    """Return the numbers of ``table`` at ``indices``, uint8 with any number of axes.

    torch makes larger copies of indices, so this looks them up in parts.
    """
    made = torch.empty(indices.shape, dtype=table.dtype)
    for to, part in zip(made.flatten().split(_PART), indices.flatten().split(_PART), strict=True):
        to.copy_(table[part.int()])
    return made


def floats_of(doubles: Tensor, group_size: int, scales: Tensor) -> tuple[Tensor, WeightFormat] | None:
    """Return weights, which are ``doubles`` times float32 ``scales``, as codes of ``fp4``, and the format.

    ``doubles`` are integers. Return None if one is not twice the value of a 4-bit float, or if a scale is not exact in
    bfloat16.
    """
    most = DOUBLED[-1]
    table = torch.full((2 * most + 1,), 255, dtype=torch.uint8)
    # Zero gets the code without a sign.
    for code, double in reversed(list(enumerate(_doubles().int().tolist()))):
        table[double + most] = code
    if not torch.equal(scales.bfloat16().float(), scales) or int(doubles.min()) < -most or int(doubles.max()) > most:
        return None
    codes = looked_up(table, (doubles + most).to(torch.uint8))
    return None if int(codes.max()) == 255 else (codes, WeightFormat(_FP4, group_size))


def _bytes(numbers: Tensor) -> Tensor:
    """Return numbers ``[tiles, 16, n]`` in the order of tiles, uint8 ``[tiles, n, bytes]``."""
    return numbers.transpose(1, 2).contiguous().view(torch.uint8)


def _of_rows(packed: Tensor, dtype: torch.dtype, n: int) -> list[Tensor]:
    """Return ``n`` numbers of each row and group, each float32 ``[tiles, 16, groups]``.

    ``packed`` is ``[tiles, groups, bytes]``.
    """
    numbers = packed.contiguous().view(dtype).float().unflatten(2, (n, ROWS))
    return [of_kind.transpose(1, 2) for of_kind in numbers.unbind(2)]


def holding(bits: int, group_size: int, *numbers: Tensor) -> WeightFormat:
    """Return the smallest format of ``bits``-bit integers that stores ``numbers`` without rounding.

    These are float32 scales, or float32 scales and biases.
    """
    ends = (
        end
        for end, own in _NUMBERS.items()
        if own.n == len(numbers) and not own.factors
        if all(torch.equal(part.to(own.dtype).float(), part) for part in numbers)
    )
    return WeightFormat(f"int{bits}{next(ends)}", group_size)


def padded(n: int) -> int:
    """Return ``n`` rows, rounded up to whole tiles."""
    return -(-n // ROWS) * ROWS


def _tiles(matrix: Tensor) -> Tensor:
    """Return the rows in tiles, ``[tiles, 16, in]``."""
    missing = -len(matrix) % ROWS
    if missing:
        matrix = torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])])
    tiles: Tensor = matrix.unflatten(0, (-1, ROWS))
    return tiles


def filled(matrix: Tensor) -> Tensor:
    """Return the rows of ``matrix``, padded with rows of zeros to whole tiles."""
    return _tiles(matrix).flatten(0, 1)


def alternate(gate: Tensor, up: Tensor) -> Tensor:
    """Return the rows of two matrices ``[rows, ...]`` in alternating tiles, each padded to whole tiles."""
    halves = torch.stack([_tiles(half.reshape(len(half), -1)) for half in (gate, up)], dim=1)
    return halves.flatten(0, 2).reshape(-1, *gate.shape[1:])


def apart(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two matrices whose tiles alternate in ``rows``."""
    gate, up = rows.unflatten(0, (-1, 2, ROWS)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)
