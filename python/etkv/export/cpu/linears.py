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
from etkv.packed_weights import ROWS, WeightFormat

if TYPE_CHECKING:
    from etkv.export.published.weight import Groups
    from etkv.export.scratch import Scratch


class _Packed(packing.PackedLayer):
    """A layer with packed weights, ``[rows, columns]``."""

    packed: torch.Tensor
    etkv_format: str
    etkv_group: int

    def plain(self) -> torch.Tensor:
        """Return the weights in float32, dequantized."""
        fmt = WeightFormat(self.etkv_format, self.etkv_group)
        return fmt.unpack(self.packed)[: self.etkv_rows()]

    def etkv_rows(self) -> int:
        """Return the rows of the weights."""
        raise NotImplementedError


class PackedLinear(_Packed, torch.nn.Linear):  # type: ignore[override] # The weights are no parameter.
    """A linear layer with packed weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the products, ``[.., out]``."""
        made: torch.Tensor = linear(input, self.packed, self.bias, self.etkv_format, self.etkv_group, self.out_features)
        return made

    def etkv_rows(self) -> int:
        """Return the elements of an output."""
        return self.out_features


class PackedEmbedding(_Packed, torch.nn.Embedding):  # type: ignore[override] # The weights are no parameter.
    """An embedding with packed weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids."""
        made: torch.Tensor = embedding(input, self.packed, self.etkv_format, self.etkv_group, self.num_embeddings)
        return made

    def etkv_rows(self) -> int:
        """Return the size of the vocabulary."""
        return self.num_embeddings


_PART = 1 << 18
"""The weights that a core packs at once."""


class Packer:
    """Packs weights in the format ``name``.

    ``group_size`` elements of a row share a scale; ``None`` takes the largest group that divides a row, see
    :func:`largest_group`.
    """

    def __init__(self, name: str, group_size: int | None, scratch: Scratch) -> None:
        self._name, self._group_size, self._scratch = name, group_size, scratch
        self.rounds = name != "bfloat16"
        experts.register()

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, WeightFormat]:
        """Return packed weights, in a file, and their format."""
        rows, columns = weight.shape
        fmt = WeightFormat(self._name, self._group(largest_group(columns)))
        packed = self._scratch.empty(fmt.shape(rows, columns), fmt.dtype)

        def fill(tiles: slice) -> None:
            packed[tiles] = fmt.pack(weight[tiles.start * ROWS : tiles.stop * ROWS])

        parallel.by_parts(len(packed), max(1, _PART // (ROWS * columns)), fill)
        return packed, fmt

    def keep(self, groups: Groups, dtype: torch.dtype) -> None:
        """Return nothing: scales are in bfloat16, which has fewer digits than those of files."""

    def install(self, layer: Any, packed: tuple[torch.Tensor, WeightFormat]) -> type[packing.PackedLayer]:
        """Give packed weights to ``layer``."""
        tensor, fmt = packed
        layer.register_buffer("packed", tensor)
        layer.etkv_format, layer.etkv_group = fmt.name, fmt.group_size
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = layer.bias.data.float()
        return PackedLinear if isinstance(layer, torch.nn.Linear) else PackedEmbedding

    def pack_experts(self, module: Any, pack: Callable[[str, torch.Tensor], Any]) -> None:
        """Pack the weights of experts in place. Their products have tiles of their own."""
        experts.pack_module(module, self._name, self._group(experts.GROUP_SIZE), self._scratch.empty)

    def _group(self, usual: int) -> int:
        """Return the weights that share a scale, ``usual`` unless they are given; 0 in formats without scales."""
        return 0 if self._name == "bfloat16" else self._group_size or usual


def largest_group(width: int) -> int:
    """Return the largest group of weights of a row of ``width`` that may share a scale."""
    return max((size for size in range(32, 257, 32) if width % size == 0), default=32)
