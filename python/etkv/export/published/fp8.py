"""The methods ``fp8`` and ``fbgemm_fp8``: 8-bit floats with a scale for each tensor, row or block.

DeepSeek-V3, Qwen3 FP8 and Ministral 3 are published in this form. The names of scales differ between publishers. A
scale is always a factor, even if its name ends in ``inv``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch

from etkv.export.published.format import Format
from etkv.export.published.packing import power_scales, scale_blocks
from etkv.export.published.settings import FLOATS, Settings
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Decoded, Weight

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_SCALES = (".weight_scale_inv", ".weight_scale", ".qscale_weight", ".scale")
"""The suffixes of the names of scales."""

_OF_EXPERTS = "_scale_inv"
"""The suffix of the name of scales for a parameter with the weights of all experts."""


class Fp8(Format):
    """Decodes ``fp8``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        block = settings.values.get("weight_block_size")
        self._block = None if block is None else settings.block("weight_block_size", block)
        scheme = settings.values.get("activation_scheme")
        self.activations = "in 8 bits" if scheme in ("dynamic", "static") or settings.method == "fbgemm_fp8" else None

    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:
        for end in _SCALES:
            weight = name.removesuffix(end) + ".weight"
            if name.endswith(end) and weight in tensors and (end != ".scale" or tensors[weight].dtype in FLOAT8):
                return weight, "scale"
        weight = name.removesuffix(_OF_EXPERTS)
        return (weight, "scale") if name.endswith(_OF_EXPERTS) and weight in tensors else None

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        codes, scale = self._settings.part(parts, name, "weight"), self._settings.part(parts, name, "scale")
        if codes.dtype not in FLOAT8 or len(codes.shape) < 2:
            raise self._settings.refuse(f"tensor {codes.name} is {codes.described()}, but has a scale, {scale.name}")
        return scaled(self._settings, codes, scale, self._block)


def scaled(settings: Settings, codes: Stored, scale: Stored, block: tuple[int, int] | None) -> Weight:
    """Return the weight of ``codes`` [.., rows, columns] times ``scale``.

    The scale is one number, one number for each row, or one for each ``block`` of rows and columns. Scales in uint8 are
    powers of two. Raises :class:`EtkvError` for another shape or dtype.
    """
    if scale.dtype not in (*FLOATS, "uint8", "float8_e8m0fnu"):
        raise settings.refuse(f"tensor {scale.name} is {scale.described()}, expected floating-point numbers")
    rows, columns = codes.shape[-2:]
    grids = {(*codes.shape[:-2], rows, 1): (1, columns)}
    if block is not None:
        grids = {(*codes.shape[:-2], -(-rows // block[0]), -(-columns // block[1])): block} | grids
    shape = scale.shape
    if math.prod(shape) == 1:
        return Decoded(partial(_decode, codes, scale, (1,) * len(codes.shape), (rows, columns)))
    if len(shape) == len(codes.shape) - 1:
        # One scale for each row, or one for each expert.
        shape = (*shape, 1) if shape[-1] == rows else shape
    if len(codes.shape) == 3 and math.prod(shape) == codes.shape[0] != rows:
        shape = (codes.shape[0], 1, 1)
        grids[shape] = (rows, columns)
    if shape not in grids:
        expected = " or ".join(str(list(grid)) for grid in grids)
        raise settings.refuse(
            f"tensor {scale.name} is {scale.described()}, expected {expected} for a weight {list(codes.shape)}"
        )
    return Decoded(partial(_decode, codes, scale, shape, grids[shape]))


def _decode(codes: Stored, scale: Stored, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    factors = scale.read()
    factors = power_scales(factors) if factors.element_size() == 1 else factors.float()
    return scale_blocks(codes.read().float(), factors.reshape(shape), block)
