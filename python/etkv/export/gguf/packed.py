"""The integers and scales of GGUF's formats with one scale for each 32 numbers of a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from etkv.export.published.weight import Groups

_GROUP = 32

BITS = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}
"""A format -> the bits of its integers."""


def groups(blocks: Any, kind: str) -> Groups:
    """Return the integers of ``blocks``, uint8 ``[rows, bytes]`` in the format ``kind``, a key of :data:`BITS`.

    A block has its scale in float16 first. In formats of 4 and 5 bits a byte has number ``j`` in its lower half and
    number ``j + 16`` in its upper half, and the fifth bits of all numbers lie together.
    """
    rows = blocks.shape[0]
    apart = np.ascontiguousarray(blocks).reshape(rows, -1, 2 + _GROUP * BITS[kind] // 8)
    scales = torch.from_numpy(apart[..., :2].copy().view(np.float16)[..., 0].astype(np.float32))
    if kind == "Q8_0":
        codes, zero = apart[..., 2:] ^ 128, 128.0
    else:
        halves = apart[..., -_GROUP // 2 :]
        codes, zero = np.concatenate([halves & 15, halves >> 4], axis=-1), 8.0
        if kind == "Q5_0":
            codes |= np.unpackbits(apart[..., 2:6], axis=-1, bitorder="little") << 4
            zero = 16.0
    return Groups(torch.from_numpy(codes.reshape(rows, -1)), scales, torch.full_like(scales, zero))
