"""The method ``awq`` of AutoAWQ: integers of 4 bits with zero points.

Matrices are stored transposed. In the layout ``gemm`` a word has eight outputs in the order of ``_ORDER``; in ``gemv``
a word has eight inputs in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from etkv.export.published.format import Format, replaced
from etkv.export.published.packing import unpack_words
from etkv.export.published.settings import FLOATS, Settings
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Grouped, Groups, Weight

_BITS = 4
_IN_WORD = 32 // _BITS
_LAYOUT = ("version", "format", "checkpoint_format")
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each of the eight outputs in a word of ``gemm``."""


class Awq(Format):
    """Decodes ``awq``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        settings.one_of("bits" if "bits" in settings.values else "w_bit", (_BITS,), _BITS)
        # Packages use three names for the layout. Runtimes convert the layout gemm when they load weights, and write
        # other names.
        named = {name: str(settings.values[name]).lower() for name in _LAYOUT if settings.values.get(name)}
        for name, layout in named.items():
            if layout not in ("gemm", "gemv", "exllama", "ipex"):
                raise settings.refuse(f"{name} is {layout!r}, expected gemm or gemv")
        self._is_gemv = "gemv" in named.values()
        if self._is_gemv and len(set(named.values())) > 1:
            raise settings.refuse(f"{' and '.join(named)} differ: {' and '.join(named.values())}")
        settings.one_of("zero_point", (True,), True)
        self._group_size = settings.group_size("group_size" if "group_size" in settings.values else "q_group_size")

    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:
        return replaced(name, ("qweight", "qzeros", "scales"))

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        settings = self._settings
        codes, zeros, scales = (settings.part(parts, name, part) for part in ("qweight", "qzeros", "scales"))
        if len(codes.shape) != 2:
            raise settings.refuse(f"tensor {codes.name} is {codes.described()}, expected a matrix")
        columns = codes.shape[1] * _IN_WORD if self._is_gemv else codes.shape[0]
        rows = codes.shape[0] if self._is_gemv else codes.shape[1] * _IN_WORD
        size = columns if self._group_size == -1 else self._group_size
        if columns % size:
            raise settings.refuse(f"group_size {size} does not divide {columns}, the columns of {name}")
        groups = columns // size
        settings.check(codes, ("int32",), codes.shape)
        if self._is_gemv:
            # Rows of scales and zero points are padded to whole words.
            words = zeros.shape[-1]
            if words * _IN_WORD < groups:
                raise settings.refuse(
                    f"tensor {zeros.name} is {zeros.described()}, expected zero points of {groups} groups"
                )
            settings.check(zeros, ("int32",), (rows, words))
            settings.check(scales, FLOATS, (rows, words * _IN_WORD))
            return Grouped(partial(_gemv, codes, zeros, scales, groups))
        settings.check(zeros, ("int32",), (groups, codes.shape[1]))
        settings.check(scales, FLOATS, (groups, rows))
        return Grouped(partial(_gemm, codes, zeros, scales))


def _gemm(codes: Stored, zeros: Stored, scales: Stored) -> Groups:
    def outputs(stored: Stored) -> torch.Tensor:
        numbers = unpack_words(stored.read(), _BITS, stored.shape[1] * _IN_WORD)
        ordered: torch.Tensor = numbers.unflatten(1, (-1, _IN_WORD))[:, :, list(_ORDER)]
        return ordered.flatten(1).T

    return Groups(outputs(codes).contiguous(), scales.read().float().T, outputs(zeros).float())


def _gemv(codes: Stored, zeros: Stored, scales: Stored, groups: int) -> Groups:
    return Groups(
        unpack_words(codes.read(), _BITS, codes.shape[1] * _IN_WORD),
        scales.read().float()[:, :groups],
        unpack_words(zeros.read(), _BITS, groups).float(),
    )
