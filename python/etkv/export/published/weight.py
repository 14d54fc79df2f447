"""Weights for a loader. A weight is decoded when it is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from etkv.errors import EtkvError
from etkv.export.published.stored import Stored


class Weight(ABC):
    """A weight of a checkpoint."""

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Return the values."""

    def groups(self) -> Groups | None:
        """Return the integers and scales of a quantized weight; ``None`` if the weight is not stored as integers, or if
        they cannot be kept.
        """
        return None

    @property
    def is_quantized(self) -> bool:
        """Return whether the weight is stored with fewer bits than float16 has."""
        return True


@dataclass(frozen=True)
class Plain(Weight):
    """A weight that is not quantized."""

    stored: Stored

    def read(self) -> torch.Tensor:
        """Return the values in the dtype of the file."""
        return self.stored.read()

    @property
    def is_quantized(self) -> bool:
        return False


@dataclass(frozen=True)
class Decoded(Weight):
    """A weight that a function decodes to float32."""

    decode: Callable[[], torch.Tensor]

    def read(self) -> torch.Tensor:
        """Return the values in float32."""
        return self.decode()


@dataclass(frozen=True)
class Nested:
    """The scales and biases of groups, as GGUF's formats store them: each is a byte times a factor that eight groups
    share.

    ``scales`` and ``biases`` are uint8 ``[rows, groups]``. Their factors are float32 ``[rows, groups / 8]``, and exact
    in float16.
    """

    scales: torch.Tensor
    biases: torch.Tensor
    factors_of_scales: torch.Tensor
    factors_of_biases: torch.Tensor

    def all(self) -> list[torch.Tensor]:
        """Return the tensors in the order of the fields."""
        return [self.scales, self.biases, self.factors_of_scales, self.factors_of_biases]


@dataclass(frozen=True)
class Groups:
    """A matrix of integers in groups that share a scale: a weight is ``(code - zero) * scale``.

    ``codes`` is ``[rows, columns]``, unsigned. ``scales`` and ``zeros`` are float32 ``[rows, groups]``. ``order`` is
    the group of each column; ``None`` if groups are contiguous columns. With ``biases`` ``[rows, groups]``, a weight is
    ``code * scale + bias``, and there are no zeros and no order. ``nested`` has the factors of scales and biases, if
    the file stores them so.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    nested: Nested | None = None

    def values(self) -> torch.Tensor:
        """Return the weights in float32."""
        codes = self.codes.float()
        if self.zeros is not None and self.order is not None:
            return (codes - self.zeros[:, self.order]) * self.scales[:, self.order]
        groups: torch.Tensor = codes.unflatten(1, (self.scales.shape[1], -1))
        if self.zeros is not None:
            groups = groups - self.zeros.unsqueeze(2)
        groups = groups * self.scales.unsqueeze(2)
        return (groups if self.biases is None else groups + self.biases.unsqueeze(2)).flatten(1)

    def is_finite(self) -> bool:
        """Return whether all scales and biases are finite. Those of a damaged file may not be."""
        numbers = [self.scales] if self.biases is None else [self.scales, self.biases]
        return all(bool(torch.isfinite(part).all()) for part in numbers)

    def signed(self, bits: int) -> torch.Tensor | None:
        """Return ``code - zero``, int8 ``[rows, columns]``; ``None`` if a value exceeds ``bits`` bits.

        Groups must be contiguous columns.
        """
        if self.order is not None or self.zeros is None:
            return None
        zeros = self.zeros.short()
        groups = self.codes.short().unflatten(1, (self.scales.shape[1], -1)) - zeros.unsqueeze(2)
        half = 1 << (bits - 1)
        fits = bool((zeros == self.zeros).all()) and -half <= int(groups.min()) and int(groups.max()) < half
        return groups.flatten(1).to(torch.int8) if fits else None

    def rows(self, arranged: Callable[[torch.Tensor], torch.Tensor]) -> Groups:
        """Return the groups of the rows that ``arranged`` selects, a function that selects or reorders the rows of a
        matrix.
        """
        parts = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "biases": self.biases}
        made = {name: arranged(part) for name, part in parts.items() if part is not None}
        nested = None if self.nested is None else Nested(*map(arranged, self.nested.all()))
        return replace(self, **made, nested=nested)

    def columns(self, order: torch.Tensor) -> Groups | None:
        """Return the groups with column ``order[i]`` as column ``i``; ``None`` if that would divide a group.

        Groups must be contiguous columns.
        """
        if torch.equal(order, torch.arange(len(order))):
            return self
        size = self.codes.shape[1] // self.scales.shape[1]
        first = order[::size]
        if self.order is not None or not torch.equal(order, (first.unsqueeze(1) + torch.arange(size)).flatten()):
            return None
        groups = first // size
        parts = {"scales": self.scales, "zeros": self.zeros, "biases": self.biases}
        made = {name: part[:, groups] for name, part in parts.items() if part is not None}
        # Eight groups share the factors, and they may be apart now.
        return replace(self, codes=self.codes[:, order], **made, nested=None)


def joined(parts: Sequence[Groups]) -> Groups | None:
    """Concatenate the rows of ``parts``; return ``None`` if their groups have different layouts."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        alike = part.scales.shape[1] == first.scales.shape[1] and part.codes.shape[1] == first.codes.shape[1]
        if not alike or part.order is not None or (part.zeros is None) != (first.zeros is None):
            return None

    def rows(name: str) -> torch.Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)

    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    whole = [part.nested.all() for part in parts if part.nested is not None]
    nested = Nested(*map(torch.cat, zip(*whole, strict=True))) if len(whole) == len(parts) else None
    return Groups(codes, scales, rows("zeros"), biases=rows("biases"), nested=nested)


@dataclass(frozen=True)
class Grouped(Weight):
    """A matrix of integers in groups."""

    read_groups: Callable[[], Groups]
    """Returns the integers, scales and zero points."""

    def read(self) -> torch.Tensor:
        """Return the values in float32."""
        return self.read_groups().values()

    def groups(self) -> Groups:
        """Return the integers, scales and zero points."""
        return self.read_groups()


class State(dict[str, Any]):
    """Weights by name, for transformers' loader, which reads a value as ``value[...]``.

    transformers collects the errors of single weights and raises another error in the end. ``failure`` is the first
    error.
    """

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        super().__init__({name: _Value(self, weight) for name, weight in weights.items()})
        self.failure: EtkvError | None = None
        self._read: list[Weight] = []

    def read(self, weight: Weight) -> torch.Tensor:
        """Return the values of ``weight``, and record that it was read."""
        self._read.append(weight)
        try:
            return weight.read()
        except EtkvError as error:
            self.failure = self.failure or error
            raise

    def taken(self) -> list[Weight]:
        """Return the weights that were read since the last call."""
        found, self._read = self._read, []
        return found


@dataclass(frozen=True)
class _Value:
    state: State
    weight: Weight

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.state.read(self.weight)[index]
