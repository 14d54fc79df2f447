"""Quantizes weights for MLX: integers of 4 or 8 bits in groups of a row that share a scale.

Experts in MXFP4 keep the floats of the file, which MLX calls ``mxfp4``: codes of 4 bits, and in uint8 the exponent of a
power of two for each 32 codes.

A scale minimizes the squares of its group's errors. Scales and integers are computed alternately. Groups do not depend
on each other, so a matrix is quantized in parts that fit a core's cache, on all cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from etkv import packed_weights
from etkv.export import parallel
from etkv.export.published.packing import FP4, power_scales

if TYPE_CHECKING:
    from etkv.export.published.weight import Groups

_PART = 1 << 17
"""Number of weights in a part. With its intermediate values, a part fits a core's cache."""

_MXFP4_GROUP = 32
"""Number of floats that share a power of two."""

_TURNS = 20
"""Maximum number of iterations."""

_SETTLED = 1e-5
"""A scale has converged if its relative change is below this. Changing one integer changes a scale by more."""

_EPS = torch.finfo(torch.float32).eps
"""Minimum scale."""


def quantize(
    weight: torch.Tensor, bits: int, group_size: int, empty: Callable[..., torch.Tensor] = torch.empty
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed integers of ``weight``, ``[rows, columns]``, and its scales, ``[rows, groups]`` in its dtype.

    Packed integers are uint32 ``[rows, columns * bits / 32]``: each integer plus 8 or 128, the first in the lowest
    bits. A weight is its scale times its integer. ``empty`` allocates both tensors.

    Raises :class:`ValueError` if a weight is not finite.
    """
    rows, columns = weight.shape
    packed = empty((rows, columns * bits // 32), dtype=torch.uint32)
    scales = empty((rows, columns // group_size), dtype=weight.dtype)

    def fill(part: slice) -> None:
        groups = weight[part].detach().float().unflatten(1, (-1, group_size))
        integers, scale = _fit(groups.flatten(0, 1), bits)
        scales[part] = scale.view(-1, columns // group_size).to(scales.dtype)
        packed[part] = _pack(integers.view(-1, columns), bits)

    parallel.by_parts(rows, max(1, _PART // columns), fill)
    return packed, scales


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, bits: int, dtype: torch.dtype, biases: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weights of packed integers in ``dtype``.

    Without ``biases``, integers and scales are those of :func:`quantize`. With ``biases``, a weight is its scale times
    its unsigned integer, plus the bias of its group. With ``scales`` in uint8, a weight is a float of MXFP4.
    """
    parts = _dequantized(packed, scales, bits, dtype, biases)
    # Interleave the even and the odd columns.
    return parts.transpose(-1, -2).flatten(-2) if bits == 4 else parts.flatten(-2)


def product(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: int, biases: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the products ``[.., rows]`` of ``x``, ``[.., columns]``, with a matrix of packed integers."""
    if bits == 4:
        # Reorder the columns of x, which is faster than reordering those of the matrix.
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    weights = _dequantized(packed, scales, bits, x.dtype, biases)
    made: torch.Tensor = x @ weights.flatten(-2).T
    return made


def _dequantized(
    packed: torch.Tensor, scales: torch.Tensor, bits: int, dtype: torch.dtype, biases: torch.Tensor | None
) -> torch.Tensor:
    """Return weights ``[.., rows, parts, columns / parts]``. For 4 bits, the parts are the even and the odd columns."""
    codes = packed.view(torch.uint8).unsqueeze(-2)
    are_floats = has_floats(scales)
    if bits == 4:
        parts = torch.empty((*codes.shape[:-2], 2, codes.shape[-1]), dtype=dtype)
        for half, of_half in ((slice(0, 1), codes & 15), (slice(1, 2), codes >> 4)):
            parts[..., half, :] = packed_weights.looked_up(FP4.to(dtype), of_half) if are_floats else of_half
    else:
        parts = codes.to(dtype)
    groups = parts.unflatten(-1, (scales.shape[-1], -1))
    of_groups = scales.unsqueeze(-1).unsqueeze(-3)
    if are_floats:
        groups.mul_(power_scales(of_groups))
    elif biases is None:
        groups.sub_(1 << (bits - 1)).mul_(of_groups)
    else:
        groups.mul_(of_groups).add_(biases.unsqueeze(-1).unsqueeze(-3))
    return parts


def has_floats(scales: torch.Tensor) -> bool:
    """Return whether ``scales`` are those of weights in MXFP4."""
    return scales.dtype == torch.uint8


def biases_of(scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the biases with which a scale times an unsigned integer equals the scale times a signed integer."""
    return scales * -(1 << (bits - 1))


def shifts(scales: torch.Tensor, biases: torch.Tensor | None, bits: int) -> torch.Tensor | None:
    """Return ``biases`` for :func:`dequantize`, or None if they equal :func:`biases_of`. With None one rounding is
    saved.
    """
    return None if biases is None or torch.equal(biases, biases_of(scales, bits)) else biases


def keep(
    groups: Groups, bits: int, dtype: torch.dtype, with_floats: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Return the packed integers, scales and biases of ``groups`` for :func:`dequantize`.

    Return None if integers exceed ``bits`` bits, if groups are not contiguous columns, or if scales or biases are not
    finite in ``dtype``. Biases are None if weights are scales times signed integers. With ``with_floats``, weights in
    MXFP4 are returned as floats.
    """
    if groups.order is not None:
        return None
    scales = groups.scales.to(dtype)
    if not bool(torch.isfinite(scales).all()):
        return None
    signed = groups.signed(bits)
    if signed is not None:
        return _pack(signed.short(), bits), scales, None
    if int(groups.codes.max()) >= 1 << bits:
        floats = _floats(groups, dtype) if with_floats and bits == 4 else None
        return None if floats is None else (*floats, None)
    unsigned = groups.codes.short() - (1 << (bits - 1))
    biases = groups.biases if groups.zeros is None else -groups.zeros * groups.scales
    if biases is None:
        return _pack(unsigned, bits), scales, None
    biases = biases.to(dtype)
    return (_pack(unsigned, bits), scales, biases) if bool(torch.isfinite(biases).all()) else None


def _floats(groups: Groups, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the packed floats and the exponents of ``groups`` of MXFP4; None if they have others."""
    doubles, size = groups.signed(8), groups.codes.shape[1] // groups.scales.shape[1]
    if doubles is None or size != _MXFP4_GROUP:
        return None
    found = packed_weights.floats_of(doubles, size, groups.scales)
    powers = 2 * groups.scales
    exponents = powers.to(torch.float8_e8m0fnu)
    is_finite = float(powers.max()) * float(FP4.max()) <= torch.finfo(dtype).max
    if found is None or not is_finite or not torch.equal(exponents.float(), powers):
        return None
    return _packed_codes(found[0], 4), exponents.view(torch.uint8)


def _fit(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers and the scales of ``groups``, ``[groups, size]``. All are in float32."""
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    scale = (groups.abs().amax(dim=1) / -least).clamp_min_(_EPS)
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("cannot quantize weights that are not finite")
    # Continue only with groups whose scale has changed. The scales of the other groups would stay the same.
    moving, scale_of_moving, left = None, scale, groups
    for _ in range(_TURNS):
        integers = (left / scale_of_moving.unsqueeze(1)).round_().clamp_(least, most)
        squares = integers.square().sum(dim=1)
        found = (left * integers).sum(dim=1) / squares
        found = torch.where(squares > 0, found, scale_of_moving).clamp_min_(_EPS)
        changed = ((found - scale_of_moving).abs_() >= _SETTLED * scale_of_moving).nonzero().squeeze(1)
        if moving is None:
            scale, moving = found, changed
        else:
            scale[moving] = found
            moving = moving[changed]
        if not len(moving):
            break
        left, scale_of_moving = left[changed], found[changed]
    return (groups / scale.unsqueeze(1)).round_().clamp_(least, most), scale


def _pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    return _packed_codes((integers + (1 << (bits - 1))).to(torch.uint8), bits)


def _packed_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 4:
        low, high = codes.unflatten(1, (-1, 2)).unbind(2)
        codes = low | high << 4
    return codes.view(torch.uint32)
