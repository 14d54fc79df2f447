"""The method ``mxfp4`` of gpt-oss: experts in 4-bit floats, with a power of two for each 32 elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from etkv.export.published.format import Format
from etkv.export.published.fp4 import groups_of
from etkv.export.published.packing import power_scales, unpack_fp4
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Groups, Weight

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
        return _Experts(blocks, scales)


@dataclass(frozen=True)
class _Experts(Weight):
    """The weights of one product of all experts."""

    blocks: Stored
    scales: Stored

    def read(self) -> torch.Tensor:
        """Return the values, ``[experts, in, out]`` in float32."""
        groups = unpack_fp4(self.blocks.read())
        groups *= power_scales(self.scales.read()).unsqueeze(-1)
        return groups.flatten(2).transpose(1, 2).contiguous()

    def groups(self) -> Groups:
        """Return the rows of all experts as integers."""
        scales = power_scales(self.scales.read()).flatten(0, 1)
        return groups_of(self.blocks.read().flatten(0, 1).flatten(1), scales)
