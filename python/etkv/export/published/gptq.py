"""The method ``gptq``: integers of 2, 3, 4 and 8 bits.

Matrices are stored transposed, and a word has numbers of one column. Checkpoints of the first format
(``checkpoint_format`` ``gptq``) store each zero point minus 1. The second format (``gptq_v2``) stores zero points.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from etkv.export.published.format import Format, replaced
from etkv.export.published.packing import unpack_words, words_of
from etkv.export.published.settings import FLOATS, Settings
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Grouped, Groups, Weight

_BITS = (2, 3, 4, 8)


class Gptq(Format):
    """Decodes ``gptq``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._bits = settings.one_of("bits", _BITS, 4)
        self._group_size = settings.group_size()
        # Packages use two names for the format.
        names = [name for name in ("checkpoint_format", "format") if settings.values.get(name)]
        formats = {settings.one_of(name, ("gptq", "gptq_v2"), "gptq") for name in names} or {"gptq"}
        if len(formats) > 1:
            raise settings.refuse(f"{' and '.join(names)} differ: {' and '.join(sorted(formats))}")
        self._adds_one = formats == {"gptq"}
        self._has_own = bool(settings.values.get("dynamic"))
        self._has_order = self._has_own or bool(settings.values.get("desc_act"))

    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:
        return replaced(name, ("qweight", "qzeros", "scales", "g_idx"))

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        settings = self._settings
        codes, zeros, scales = (settings.part(parts, name, part) for part in ("qweight", "qzeros", "scales"))
        if len(codes.shape) != 2 or len(scales.shape) != 2:
            raise settings.refuse(
                f"tensors {codes.name} and {scales.name} are {codes.described()} and {scales.described()}, expected "
                "matrices"
            )
        order = settings.part(parts, name, "g_idx") if self._has_order else parts.get("g_idx")
        bits = self._bits
        columns = codes.shape[0] * 32 // bits if order is None else order.shape[0]
        if self._has_own:
            # The number of bits may differ between layers. It follows from the shapes.
            bits = next((bits for bits in _BITS if words_of(columns, bits) == codes.shape[0]), bits)
        groups, rows = scales.shape
        settings.check(codes, ("int32",), (words_of(columns, bits), rows))
        settings.check(zeros, ("int32",), (groups, words_of(rows, bits)))
        settings.check(scales, FLOATS, (groups, rows))
        if order is not None:
            settings.check(order, ("int32", "int64"), (columns,))
        size = columns if self._group_size == -1 else self._group_size
        if not self._has_own and groups != -(-columns // size):
            raise settings.refuse(f"weight {name} has {groups} groups in {columns} columns, but group_size is {size}")
        of_columns = self._order(name, order, columns, groups)
        if self._adds_one:
            self._check_zeros(name, zeros, bits, rows)
        read = partial(_groups, codes, zeros, scales, of_columns, bits, columns, int(self._adds_one))
        return Grouped(read)

    def _order(self, name: str, order: Stored | None, columns: int, groups: int) -> torch.Tensor | None:
        """Return the group of each column; None if groups are contiguous columns of one size."""
        size = columns // groups if columns % groups == 0 else self._group_size
        plain = torch.arange(columns) // size
        if order is None:
            return None if columns % groups == 0 else plain
        found = order.read().long()
        if bool((found < 0).any()) or bool((found >= groups).any()):
            raise self._settings.refuse(f"tensor {order.name} has groups outside of the {groups} groups of {name}")
        return None if columns % groups == 0 and bool((found == plain).all()) else found

    def _check_zeros(self, name: str, zeros: Stored, bits: int, rows: int) -> None:
        """Raise :class:`EtkvError` for a zero point of 0 in the first format, where -1 stands for 0.

        Some packages read the -1 as 0, others as the number after the highest code. Some packages overwrite the
        neighbouring zero points when they write the -1.
        """
        highest = (1 << bits) - 1
        if bool((unpack_words(zeros.read(), bits, rows) == highest).any()):
            raise self._settings.refuse(
                f"weight {name} has a zero point of 0, which checkpoints of format gptq store as -1: packages read it "
                f"as 0 or as {highest + 1}"
            )


def _groups(
    codes: Stored, zeros: Stored, scales: Stored, order: torch.Tensor | None, bits: int, columns: int, added: int
) -> Groups:
    return Groups(
        unpack_words(codes.read().T, bits, columns),
        scales.read().float().T,
        (unpack_words(zeros.read(), bits, scales.shape[1]).float() + added).T,
        order,
    )
