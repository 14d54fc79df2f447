"""NVFP4 and MXFP4 in linear layers: 4-bit floats, two in a byte, with a scale for each 16 or 32 elements.

Such a float is half of an integer from -12 to 12. So a program with integers of 8 bits can have these weights exactly.
CPU programs store floats of MXFP4 in 4 bits. MLX programs in `4w` do so for experts.
"""

from __future__ import annotations

from functools import partial

import torch

from etkv.export.published.packing import power_scales
from etkv.export.published.settings import Settings
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Grouped, Groups, Weight
from etkv.packed_weights import DOUBLED, looked_up

_ZERO = 12
"""The code of zero in :func:`groups_of`."""


def groups_of(packed: torch.Tensor, scales: torch.Tensor) -> Groups:
    """Return the floats in the bytes of ``packed``, ``[rows, columns / 2]``, as integers.

    The lower half of a byte comes first. ``scales`` is float32 ``[rows, groups]``.
    """
    return floats(torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1), scales)


def floats(codes: torch.Tensor, scales: torch.Tensor) -> Groups:
    """Return the floats with the bits ``codes``, uint8 ``[rows, columns]``, as integers."""
    table = torch.tensor([_ZERO + sign * double for sign in (1, -1) for double in DOUBLED], dtype=torch.uint8)
    return Groups(looked_up(table, codes), scales / 2, torch.full_like(scales, _ZERO))


def nvfp4(settings: Settings, packed: Stored, scale: Stored, whole: Stored | None, *, divides: bool) -> Weight:
    """Return the weight of ``packed`` bytes [rows, columns / 2].

    ``scale`` has an 8-bit float for each 16 elements. ``whole`` is a factor for all scales, or a divisor if
    ``divides`` is set. Without ``whole``, each 32 elements have a power of two as their scale.
    """
    if len(packed.shape) != 2:
        raise settings.refuse(f"tensor {packed.name} is {packed.described()}, expected a matrix")
    columns = packed.shape[1] * 2
    size = 32 if whole is None else 16
    if columns % size:
        raise settings.refuse(f"tensor {packed.name} has rows of {columns} numbers, expected a multiple of {size}")
    settings.check(packed, ("uint8",), packed.shape)
    dtypes = ("uint8", "float8_e8m0fnu") if whole is None else ("float8_e4m3fn",)
    settings.check(scale, dtypes, (packed.shape[0], columns // size))
    if whole is not None and (whole.dtype != "float32" or whole.shape not in ((), (1,))):
        raise settings.refuse(f"tensor {whole.name} is {whole.described()}, expected one number in float32")
    return Grouped(partial(_groups, packed, scale, whole, divides))


def _groups(packed: Stored, scale: Stored, whole: Stored | None, divides: bool) -> Groups:
    if whole is None:
        scales = power_scales(scale.read())
    else:
        scales = scale.read().float()
        scales = scales / whole.read() if divides else scales * whole.read()
    return groups_of(packed.read(), scales)
