"""The storage formats, and how each format rounds rows.

A row is one position of one KV head: the last axis of a tensor. Each row is encoded separately. Codes, scales and
offsets equal those of the native caches, so :meth:`Format.stored` returns the numbers that native attention reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from etkv.reference.errors import invalid

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}  # formats that store rows unpacked
F16_MAX = 65504.0  # the largest float16, which limits stored scales and offsets
E4M3_MAX = 448.0  # the largest eight-bit float with three bits of mantissa
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # the magnitudes of four-bit floats by code


@dataclass(frozen=True)
class Planes:
    """Stored rows: one code for each element, one scale for each group of elements, and in some formats an offset.

    ``codes`` are numbers, not bits, in the shape of the rows. The last axis of ``scales`` and ``offsets`` has one
    element for each group. Scales in uint8 are exponent bits of float32, so the scales are powers of two.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def decode(self) -> Tensor:
        """Returns the rows, in float32: codes times scales, plus offsets."""
        scales = (self.scales.int() << 23).view(torch.float32) if self.scales.dtype == torch.uint8 else self.scales
        groups: Tensor = self.codes.unflatten(-1, (scales.shape[-1], -1)) * scales.float().unsqueeze(-1)
        return (groups if self.offsets is None else groups + self.offsets.float().unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class Format:
    """A storage format."""

    name: str
    granule: int  # head_dim is a multiple of this
    encode: Callable[[Tensor], Planes] | None = None  # None for the floats

    @property
    def is_float(self) -> bool:
        return self.encode is None

    def check(self, head_dim: int, place: str = "") -> None:
        if head_dim % self.granule:
            takes = f"{self.name} needs a head_dim that is a multiple of {self.granule}"
            raise invalid(f"{place}{takes}, got head_dim {head_dim}")

    def stored(self, rows: Tensor) -> Tensor:
        """Returns rows of any float dtype after storage: float32, ``[..., head_dim]``.

        Values beyond the range of float16 become infinite in ``f16``, as in the native caches.
        """
        if self.encode is None:
            return rows.to(FLOATS[self.name]).float()
        return self.encode(rows.float()).decode()


def format_of(name: str) -> Format:
    """Returns the format of this name. ``affine4`` is ``affine4g32``."""
    if name in FLOATS:
        return Format(name, 1)
    if name in _SCALED:
        return Format(name, *_SCALED[name])
    affine = re.fullmatch(r"affine([234568])(?:g(32|64|128))?", name)
    if affine is None:
        known = ", ".join([*FLOATS, "affine<2|3|4|5|6|8>[g<32|64|128>]", *_SCALED])
        raise invalid(f"unknown storage format `{name}`; available: {known}")
    bits, group = int(affine[1]), int(affine[2] or 32)
    return Format(f"affine{bits}g{group}", group, lambda rows: affine_planes(rows, bits, group))


def affine_planes(rows: Tensor, bits: int, group: int) -> Planes:
    """Returns MLX's affine quantization: integers from 0 to 2^bits - 1, and a float16 scale and offset for each group.

    The offset is the group's minimum or maximum, whichever has the larger magnitude. The scale is negative if the
    offset is the maximum. The scale is adjusted so that zero is an integer number of scales from the offset. Scale and
    offset are rounded to float16 after the codes are computed.
    """
    groups = rows.clamp(-F16_MAX, F16_MAX).unflatten(-1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    most = float(2**bits - 1)
    low_is_larger = low.abs() > high.abs()
    scale = ((high - low) / most).clamp(min=1e-7)
    scale = torch.where(low_is_larger, scale, -scale)
    edge = torch.where(low_is_larger, low, high)
    steps_to_zero = (edge / scale).round()
    exact_zero = steps_to_zero != 0
    scale = torch.where(exact_zero, edge / steps_to_zero, scale)
    offset = torch.where(exact_zero, edge, torch.zeros_like(edge))
    codes = ((groups - offset) / scale).round().clamp(0.0, most)
    return Planes(codes.flatten(-2), scale.squeeze(-1).half(), offset.squeeze(-1).half())


def mx_planes(rows: Tensor, top: int, to_element: Callable[[Tensor], Tensor]) -> Planes:
    """Returns OCP microscaling elements: 32 elements share a scale, which is a power of two.

    The scale is the smallest power of two with which the group's largest magnitude is at most 1.75 * 2^``top``: 448 for
    E4M3, and 7 for E2M1. The largest E2M1 value is 6, so a 7 is stored as 6. This loses less than the next
    larger scale would.
    """
    groups = rows.unflatten(-1, (-1, 32))
    peaks = groups.abs().amax(-1)
    # A positive float32 has 23 bits of mantissa below its exponent. A mantissa above 1.75 carries into the exponent.
    exponents = (peaks.view(torch.int32) + 0x001F_FFFF) >> 23
    scales = (exponents.clamp(min=top) - top).clamp(max=254 - top)
    inverse = ((254 - scales) << 23).view(torch.float32)
    return Planes(to_element(groups * inverse.unsqueeze(-1)).flatten(-2), scales.to(torch.uint8))


def nvfp4_planes(rows: Tensor) -> Planes:
    """Returns E2M1 elements. 16 elements share an E4M3 scale, which is their largest magnitude divided by 6."""
    groups = rows.unflatten(-1, (-1, 16))
    scales = to_e4m3(groups.abs().amax(-1) / 6.0)
    inverse = scales.masked_fill(scales == 0, 1.0).reciprocal()
    return Planes(to_e2m1(groups * inverse.unsqueeze(-1)).flatten(-2), scales)


def row_planes(rows: Tensor, most: float, to_element: Callable[[Tensor], Tensor]) -> Planes:
    """Returns elements with one float16 scale for each row, which maps the largest magnitude to ``most``."""
    scales = (rows.abs().amax(-1, keepdim=True) / most).clamp(max=F16_MAX).half()
    # A row of zeros has scale 0, so any elements represent it.
    return Planes(to_element(rows / scales.masked_fill(scales == 0, 1.0).float()), scales)


def to_e2m1(values: Tensor) -> Tensor:
    """Returns the nearest four-bit floats, ties to the even code. Magnitudes above 6 become 6."""
    distances = (values.abs().unsqueeze(-1) - E2M1).abs()
    codes = torch.arange(len(E2M1))
    # Of two codes at the same distance, the even code wins.
    nearest = torch.where(distances == distances.amin(-1, keepdim=True), codes % 2, 2).argmin(-1)
    return E2M1[nearest].copysign(values)


def to_e4m3(values: Tensor) -> Tensor:
    """Returns the nearest eight-bit floats, ties to even. Magnitudes above 448 become 448."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


_SCALED: dict[str, tuple[int, Callable[[Tensor], Planes]]] = {
    "mxfp8": (32, lambda rows: mx_planes(rows, 8, to_e4m3)),
    "mxfp4": (32, lambda rows: mx_planes(rows, 2, to_e2m1)),
    "nvfp4": (16, nvfp4_planes),
    "row-int4": (8, lambda rows: row_planes(rows, 7.0, lambda values: values.round().clamp(-8.0, 7.0))),
    "row-fp4": (8, lambda rows: row_planes(rows, 6.0, to_e2m1)),
}
"""Formats without offsets: their granule, and the function that encodes their rows."""
