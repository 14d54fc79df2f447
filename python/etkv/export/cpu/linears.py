"""Linear layers and embeddings for the CPU: each becomes a call of ``etkv::linear`` or ``etkv::embedding``.

A layer keeps its class and the hooks on it, and packed weights take the place of its own. Layers with the same weights,
such as an embedding and a head that is tied to it, share the packed ones.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from etkv.linear_op import embedding, linear
from etkv.packed_weights import WeightFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel


class _Packed(torch.nn.Module):
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

    @property
    def weight(self) -> torch.Tensor:
        """The weights in float32, for code that reads a layer's weights by itself."""
        return self.plain()


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


_KINDS: dict[Any, Any] = {
    torch.nn.Linear: PackedLinear,
    torch.nn.Embedding: PackedEmbedding,
}


def pack(model: PreTrainedModel, name: str, group_size: int | None) -> None:
    """Pack the weights of every linear layer and embedding of ``model`` in format ``name``.

    ``group_size`` elements share a scale; None takes the largest group that divides a row, see :func:`largest_group`.
    Each layer's own weights are freed before the next layer's are packed.

    Raises :class:`ValueError` for weights that the format cannot have.
    """
    layers = [(path, module, base) for path, module in model.named_modules() if (base := _base(module))]
    uses = Counter(id(module.weight) for _, module, _ in layers)
    # Has the weights too: their ids would be used again.
    shared: dict[int, tuple[torch.Tensor, torch.Tensor, WeightFormat]] = {}
    for path, module, base in layers:
        weight = module._parameters.pop("weight")
        if uses[id(weight)] == 1:
            packed, fmt = _pack(path, weight, name, group_size)
        else:
            if id(weight) not in shared:
                shared[id(weight)] = weight, *_pack(path, weight, name, group_size)
            _, packed, fmt = shared[id(weight)]
        module.register_buffer("packed", packed)
        module.etkv_format, module.etkv_group = fmt.name, fmt.group_size
        if getattr(module, "bias", None) is not None:
            module.bias.data = module.bias.data.float()
        own: Any = type(module)
        module.__class__ = _class(own, _KINDS[base])


def _pack(path: str, weight: torch.Tensor, name: str, group_size: int | None) -> tuple[torch.Tensor, WeightFormat]:
    try:
        fmt = WeightFormat(name, 0 if name in ("float32", "bfloat16") else group_size or largest_group(weight.shape[1]))
        return fmt.pack(weight.detach()), fmt
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def largest_group(width: int) -> int:
    """Return the largest group of weights of a row of ``width`` that may share a scale."""
    return max((size for size in range(32, 257, 32) if width % size == 0), default=32)


def _base(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """Return the class of torch that packed weights are for, if ``module`` is of it and has weights of its own."""
    if isinstance(module, _Packed):
        return None
    return next((base for base in _KINDS if isinstance(module, base)), None)


@functools.cache
def _class(own: Any, packed: Any) -> Any:
    """Return a class that computes what ``own`` does, with ``packed`` for the product or the rows."""
    if own in _KINDS:
        return packed
    return type(f"Packed{own.__name__}", (own, packed), {})


def layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Return the layers of ``model`` with packed weights, each with its name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, _Packed))


def plain_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the dequantized weights of packed layers under the names that they had."""
    return {f"{name}.weight": module.plain() for name, module in layers(model)}
