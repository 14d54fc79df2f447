"""Linear layers and embeddings for the CPU: each becomes a call of ``etkv::linear`` or ``etkv::embedding``.

A layer keeps its class, see :mod:`etkv.export.packing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from etkv.export import packing, parallel
from etkv.export.cpu import experts
from etkv.linear_op import embedding, linear
from etkv.packed_weights import ROWS, WeightFormat, floats_of, holding

if TYPE_CHECKING:
    from etkv.export.published.weight import Groups
    from etkv.export.scratch import Scratch


class _Packed(packing.PackedLayer):
    """A layer with packed weights, ``[rows, columns]``."""

    packed: torch.Tensor
    etkv_format: str
    etkv_group: int

    def plain(self) -> torch.Tensor:
        """Return the dequantized weights in float32."""
        fmt = WeightFormat(self.etkv_format, self.etkv_group)
        return fmt.unpack(self.packed)[: self.etkv_shape()[0]]


class PackedLinear(_Packed, torch.nn.Linear):  # type: ignore[override] # The weights are no parameter.
    """A linear layer with packed weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the products, ``[.., out]``."""
        made: torch.Tensor = linear(input, self.packed, self.bias, self.etkv_format, self.etkv_group, self.out_features)
        return made


class PackedEmbedding(_Packed, torch.nn.Embedding):  # type: ignore[override] # The weights are no parameter.
    """An embedding with packed weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the embedding's rows for ids."""
        made: torch.Tensor = embedding(input, self.packed, self.etkv_format, self.etkv_group, self.num_embeddings)
        return made


_BITS = {"int4": 4, "int8": 8}
"""The formats of quantized weights -> their bits."""

_PART = 1 << 18
"""Number of weights that a core packs at once."""


class Packer:
    """Packs weights in the format ``name``.

    ``group_size`` elements of a row share a scale; ``None`` is the largest group that divides a row, see
    :func:`largest_group`. Integers of a file keep their groups, unless the group size ``is_fixed``. With a fixed
    size, integers are kept if the fixed size divides their own group size.
    """

    def __init__(self, name: str, group_size: int | None, scratch: Scratch, is_fixed: bool = False) -> None:
        self._name, self._group_size, self._scratch, self._is_fixed = name, group_size, scratch, is_fixed
        self.rounds = name != "bfloat16"
        experts.register()

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, WeightFormat]:
        """Return packed weights in a file, and their format."""
        fmt = WeightFormat(self._name, self._group(largest_group(weight.shape[1])))
        return self._filled(weight.shape, fmt, lambda rows: fmt.pack(weight[rows])), fmt

    def keep(
        self, groups: Groups, dtype: torch.dtype, of_experts: bool = False
    ) -> tuple[torch.Tensor, WeightFormat] | None:
        """Return packed integers and scales of a file, and their format; None if no format holds them, or if scales or
        biases are not finite.

        Scales are not rounded to ``dtype``.
        """
        bits = _BITS.get(self._name)
        if bits is None or groups.order is not None:
            return None
        own = groups.codes.shape[1] // groups.scales.shape[1]
        size = self._group_size if self._is_fixed and self._group_size else largest_group(own)
        if own % size or not groups.is_finite():
            return None
        found = _stored(groups, bits, size)
        if found is None:
            return None
        codes, numbers, fmt = found
        numbers = [part.repeat_interleave(own // size, dim=1) for part in numbers]
        return self._filled(codes.shape, fmt, lambda rows: fmt.keep(codes[rows], [part[rows] for part in numbers])), fmt

    def _filled(self, shape: torch.Size, fmt: WeightFormat, packed: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Return a packed matrix of ``shape`` in a file. ``packed`` returns the packed tiles of some rows."""
        rows, columns = shape
        made = self._scratch.empty(fmt.shape(rows, columns), fmt.dtype)

        def fill(tiles: slice) -> None:
            made[tiles] = packed(slice(tiles.start * ROWS, tiles.stop * ROWS))

        parallel.by_parts(len(made), max(1, _PART // (ROWS * columns)), fill)
        return made

    def install(self, layer: Any, packed: tuple[torch.Tensor, WeightFormat]) -> type[packing.PackedLayer]:
        """Store packed weights in ``layer``."""
        tensor, fmt = packed
        layer.register_buffer("packed", tensor)
        layer.etkv_format, layer.etkv_group = fmt.name, fmt.group_size
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = layer.bias.data.float()
        return PackedLinear if isinstance(layer, torch.nn.Linear) else PackedEmbedding

    def pack_experts(self, module: Any, kept: packing.FileIntegers) -> None:
        """Pack the weights of experts in place."""
        experts.pack_module(module, self._name, self._group(experts.GROUP_SIZE), self._scratch.empty, kept)

    def _group(self, usual: int) -> int:
        """Return the group size, by default ``usual``; 0 in formats without scales."""
        return 0 if self._name == "bfloat16" else self._group_size or usual


def _stored(groups: Groups, bits: int, size: int) -> tuple[torch.Tensor, list[torch.Tensor], WeightFormat] | None:
    """Return the codes of ``groups``, their scales and biases, and a format with groups of ``size`` weights that
    holds them.

    Return None if no format holds the file's weights bit for bit.
    """
    signed = groups.signed(5)
    if signed is None:
        signed = groups.signed(bits) if bits > 4 else None
    elif int(signed.min()) < -8 or int(signed.max()) > 7:
        # These may be floats of 4 bits, which are halves of integers.
        found = floats_of(signed, size, groups.scales)
        if found is not None:
            return found[0], [groups.scales], found[1]
        signed = signed if bits > 4 else None
    if signed is not None:
        codes = (signed.short() + (1 << (bits - 1))).to(torch.uint8)
        return codes, [groups.scales], holding(bits, size, groups.scales)
    if int(groups.codes.max()) >= 1 << bits:
        return None
    own = groups.codes.shape[1] // groups.scales.shape[1]
    if groups.nested is not None and own == size:
        return groups.codes, groups.nested.all(), WeightFormat(f"int{bits}_nested", size)
    biases = groups.biases
    if groups.zeros is not None:
        # The product of a number of 11 bits and a difference of codes is exact in float32, and so is a sum of such
        # products.
        halves = (groups.scales.to(dtype).float() for dtype in (torch.float16, torch.bfloat16))
        if not any(torch.equal(half, groups.scales) for half in halves) or bool((groups.zeros % 1).any()):
            return None
        biases = -groups.zeros * groups.scales
    if biases is None or not bool(torch.isfinite(biases).all()):
        return None
    return groups.codes, [groups.scales, biases], holding(bits, size, groups.scales, biases)


def largest_group(width: int) -> int:
    """Return the largest supported group size that divides a row of ``width`` weights."""
    return max((size for size in range(32, 257, 32) if width % size == 0), default=32)
