"""NVFP4 and MXFP4 in linear layers: 4-bit floats, two in a byte, with a scale for each 16 or 32 elements."""

from __future__ import annotations

from functools import partial

import torch

from etkv.export.published.packing import power_scales, unpack_fp4
from etkv.export.published.settings import Settings
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Decoded, Weight


def nvfp4(settings: Settings, packed: Stored, scale: Stored, whole: Stored | None, *, divides: bool) -> Weight:
    """Return the weight of ``packed`` bytes [rows, columns / 2].

    ``scale`` has an 8-bit float for each 16 elements. ``whole`` is a factor for all scales, or a divisor if it
    ``divides``. Without ``whole``, scales are powers of two for each 32 elements.
    """
    if len(packed.shape) != 2:
        raise settings.refuse(f"tensor {packed.name} is {packed.described()}, expected a matrix")
    columns = packed.shape[1] * 2
    size = 32 if whole is None else 16
    if columns % size:
        raise settings.refuse(f"tensor {packed.name} has rows of {columns} numbers, and groups have {size}")
    settings.check(packed, ("uint8",), packed.shape)
    dtypes = ("uint8", "float8_e8m0fnu") if whole is None else ("float8_e4m3fn",)
    settings.check(scale, dtypes, (packed.shape[0], columns // size))
    if whole is not None and (whole.dtype != "float32" or whole.shape not in ((), (1,))):
        raise settings.refuse(f"tensor {whole.name} is {whole.described()}, expected one number in float32")
    return Decoded(partial(_decode, packed, scale, whole, divides))


def _decode(packed: Stored, scale: Stored, whole: Stored | None, divides: bool) -> torch.Tensor:
    if whole is None:
        scales = power_scales(scale.read())
    else:
        scales = scale.read().float()
        scales = scales / whole.read() if divides else scales * whole.read()
    groups: torch.Tensor = unpack_fp4(packed.read()).unflatten(1, (scales.shape[1], -1))
    groups *= scales.unsqueeze(2)
    return groups.flatten(1)
