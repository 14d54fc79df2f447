"""The integers and scales of GGUF's formats with groups of 32 elements of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from etkv.export.published.fp4 import floats
from etkv.export.published.packing import power_scales
from etkv.export.published.weight import Groups, Nested

_GROUP = 32
_OF_BLOCK = 8
"""Number of groups in a block of the formats with integer scales."""


def groups(blocks: Any, kind: str) -> Groups:
    """Return the integers of ``blocks``, uint8 ``[.., rows, bytes]`` in a format of :data:`FORMATS`."""
    size, decode = FORMATS[kind]
    return decode(np.ascontiguousarray(blocks).reshape(-1, blocks.shape[-1] // size, size))


def _halves(blocks: Any) -> Any:
    """Return 16-bit floats as float32 ``[rows, blocks, n]``, from bytes ``[rows, blocks, 2 * n]``."""
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _nibbles(blocks: Any, fifths: Any) -> Any:
    """Return the 32 codes of a block: the lower halves of 16 bytes, then the upper halves. ``fifths`` has fifth
    bits.
    """
    codes = np.concatenate([blocks & 15, blocks >> 4], axis=-1)
    return codes if fifths is None else codes | np.unpackbits(fifths, axis=-1, bitorder="little") << 4


def _flat(numbers: Any) -> torch.Tensor:
    """Return numbers as a matrix with the same rows."""
    return torch.from_numpy(numbers.reshape(len(numbers), -1))


def _symmetric(blocks: Any, has_fifths: bool) -> Groups:
    """Decode Q4_0 and Q5_0: a scale, and codes whose zero is the middle of their range."""
    scales = _flat(_halves(blocks[..., :2]))
    codes = _nibbles(blocks[..., -_GROUP // 2 :], blocks[..., 2:6] if has_fifths else None)
    return Groups(_flat(codes), scales, torch.full_like(scales, 16.0 if has_fifths else 8.0))


def _shifted(blocks: Any, has_fifths: bool) -> Groups:
    """Decode Q4_1 and Q5_1: a scale, the minimum, and codes that count from the minimum."""
    scales, least = np.split(_halves(blocks[..., :4]), 2, axis=-1)
    codes = _nibbles(blocks[..., -_GROUP // 2 :], blocks[..., 4:8] if has_fifths else None)
    return Groups(_flat(codes), _flat(scales), None, biases=_flat(least))


def _bytes(blocks: Any) -> Groups:
    """Decode Q8_0: a scale, and signed bytes."""
    scales = _flat(_halves(blocks[..., :2]))
    return Groups(_flat(blocks[..., 2:] ^ 128), scales, torch.full_like(scales, 128.0))


def _super(blocks: Any, has_fifths: bool) -> Groups:
    """Decode Q4_K and Q5_K: eight groups with 6-bit scales and 6-bit minimums, a 16-bit factor for scales, and one
    for minimums.

    The scales and the minimums of the first four groups are in the lower six bits of a byte each. For each of the
    last four groups, a further byte has the lower four bits of the scale in its lower half, and those of the minimum
    in its upper half. The upper two bits are the two highest bits of the first bytes.
    """
    whole, least = np.split(_halves(blocks[..., :4]), 2, axis=-1)
    first, second, third = np.split(blocks[..., 4:16], 3, axis=-1)
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    # Of 64 codes, the first 32 are in the lower halves of 32 bytes, and the others in the upper halves.
    pairs = blocks[..., -_OF_BLOCK * _GROUP // 2 :].reshape(*blocks.shape[:2], -1, 1, _GROUP)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=3).reshape(*blocks.shape[:2], _OF_BLOCK, _GROUP)
    if has_fifths:
        # Bit k of byte j is the fifth bit of code j of group k.
        bits = blocks[..., 16:48, None] >> np.arange(_OF_BLOCK, dtype=np.uint8) & 1
        codes = codes | bits.swapaxes(2, 3) << 4
    nested = Nested(_flat(scales), _flat(minima), _flat(whole), _flat(-least))
    return Groups(_flat(codes), _flat(whole * scales), None, biases=_flat(-(least * minima)), nested=nested)


def _powers(blocks: Any) -> Groups:
    """Decode MXFP4: the exponent of a power of two, and 4-bit floats."""
    scales = power_scales(torch.from_numpy(blocks[..., 0]))
    return floats(_flat(_nibbles(blocks[..., 1:], None)), scales)


FORMATS: dict[str, tuple[int, Callable[[Any], Groups]]] = {
    "MXFP4": (17, _powers),
    "Q4_0": (18, lambda blocks: _symmetric(blocks, False)),
    "Q4_1": (20, lambda blocks: _shifted(blocks, False)),
    "Q4_K": (144, lambda blocks: _super(blocks, False)),
    "Q5_0": (22, lambda blocks: _symmetric(blocks, True)),
    "Q5_1": (24, lambda blocks: _shifted(blocks, True)),
    "Q5_K": (176, lambda blocks: _super(blocks, True)),
    "Q8_0": (34, _bytes),
}
"""The name of a format -> the bytes of a block, and the function that decodes blocks ``[rows, blocks, bytes]``."""
