"""The method ``mxfp4`` of gpt-oss: experts in 4-bit floats, with a power of two for each 32 elements."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from etkv.export.published.format import Format
from etkv.export.published.packing import power_scales, unpack_fp4
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Decoded, Weight

GROUP = 32
"""Number of elements that share a scale."""


class Mxfp4(Format):
    """Decodes ``mxfp4``. A parameter is ``[experts, in, out]``, and its blocks ``[experts, out, groups, 16]``."""

    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:

        for part in ("blocks", "scales"):
            if name.endswith(f"_{part}"):
                return name.removesuffix(f"_{part}"), part
        return None

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        blocks, scales = (self._settings.part(parts, name, part) for part in ("blocks", "scales"))
        if len(blocks.shape) != 4:
            raise self._settings.refuse(f"tensor {blocks.name} is {blocks.described()}, expected 4 axes")
        self._settings.check(blocks, ("uint8",), (*blocks.shape[:3], GROUP // 2))
        self._settings.check(scales, ("uint8",), blocks.shape[:3])
        return Decoded(partial(_decode, blocks, scales))


def _decode(blocks: Stored, scales: Stored) -> torch.Tensor:
    groups = unpack_fp4(blocks.read())
    groups *= power_scales(scales.read()).unsqueeze(-1)
    return groups.flatten(2).transpose(1, 2).contiguous()
