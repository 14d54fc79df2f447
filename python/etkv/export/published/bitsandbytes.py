"""The method ``bitsandbytes``: weights in 4 bits (NF4, FP4) and in 8 bits (LLM.int8).

With 4 bits, a table has the value of each code, and each block of the flattened matrix has a scale. The scales may
themselves be codes of 8 bits with a table, scales of blocks and an offset. A tensor of bytes has the sizes as JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from etkv.export.published.format import Format, beside
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Decoded, Grouped, Groups, Weight

_PARTS = re.compile(
    r"(?P<weight>.*\.weight)\.(?P<part>absmax|quant_map|nested_absmax|nested_quant_map"
    r"|quant_state\.bitsandbytes__(nf4|fp4))"
)
_OF_8_BITS = {".SCB": "scale", ".weight_format": "format"}
_HIGHEST = 127.0
"""In 8 bits, a row's scale is the magnitude of this code."""


class BitsAndBytes(Format):
    """Decodes ``bitsandbytes``."""

    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:
        found = _PARTS.fullmatch(name)
        if found is not None:
            return found["weight"], found["part"].split(".")[0]
        return beside(name, tensors, _OF_8_BITS)

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        settings = self._settings
        codes = settings.part(parts, name, "weight")
        if "quant_state" not in parts:
            scale = settings.part(parts, name, "scale")
            if len(codes.shape) != 2:
                raise settings.refuse(f"tensor {codes.name} is {codes.described()}, expected a matrix")
            # Other layouts are for specific GPUs, and have other numbers.
            if "format" in parts and int(parts["format"].read()) != 0:
                raise settings.refuse(
                    f"weight {name} has the layout {int(parts['format'].read())}, expected 0 (row by row)"
                )
            settings.check(codes, ("int8",), codes.shape)
            settings.check(scale, ("float32",), codes.shape[:1])
            return Grouped(partial(_rows, codes, scale))
        state = self._state(name, parts["quant_state"])
        shape, block = state["shape"], state["blocksize"]
        count = math.prod(shape)
        settings.check(codes, ("uint8",), (-(-count // 2), 1))
        settings.check(settings.part(parts, name, "quant_map"), ("float32",), (16,))
        blocks = -(-count // block)
        scales = settings.part(parts, name, "absmax")
        if "nested_blocksize" not in state:
            settings.check(scales, ("float32",), (blocks,))
        else:
            settings.check(scales, ("uint8",), (blocks,))
            settings.check(settings.part(parts, name, "nested_quant_map"), ("float32",), (256,))
            nested = -(-blocks // state["nested_blocksize"])
            settings.check(settings.part(parts, name, "nested_absmax"), ("float32",), (nested,))
        return Decoded(partial(_blocks, dict(parts), state))

    def _state(self, name: str, stored: Stored) -> dict[str, Any]:
        """Return the sizes of a weight. Raises :class:`EtkvError` if they are not valid."""
        try:
            state: dict[str, Any] = json.loads(bytes(stored.read().tolist()))
            sizes = [
                state["blocksize"],
                *state["shape"],
                *([state["nested_blocksize"]] if "nested_blocksize" in state else []),
            ]
            if not all(isinstance(size, int) and size > 0 for size in sizes):
                raise ValueError(f"sizes are {sizes}")
            if "nested_blocksize" in state:
                state["nested_offset"] = float(state["nested_offset"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._settings.refuse(f"tensor {stored.name} has no sizes of weight {name} ({error})") from error
        return state


def _rows(codes: Stored, scale: Stored) -> Groups:
    scales = (scale.read() / _HIGHEST).unsqueeze(1)
    return Groups(codes.read().view(torch.uint8) ^ 128, scales, torch.full_like(scales, 128.0))


def _blocks(parts: Mapping[str, Stored], state: Mapping[str, Any]) -> torch.Tensor:
    packed, scales = parts["weight"].read().flatten(), parts["absmax"].read()
    if "nested_blocksize" in state:
        table, outer = parts["nested_quant_map"].read(), parts["nested_absmax"].read()
        of_blocks = outer.repeat_interleave(state["nested_blocksize"])[: len(scales)]
        scales = table[scales.int()] * of_blocks + state["nested_offset"]
    count = math.prod(state["shape"])
    # The upper half of a byte is the first code.
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[:count]
    values = parts["quant_map"].read()[codes.int()]
    values *= scales.repeat_interleave(state["blocksize"])[:count]
    return values.reshape(state["shape"])
