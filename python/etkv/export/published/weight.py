"""A weight as a loader takes it: values that are decoded when they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from etkv.export.published.stored import Stored


class Weight(ABC):
    """A weight of a checkpoint. transformers reads it as ``weight[...]``, one weight at a time."""

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Return the values."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the values, or a part of them."""
        return self.read()[index]


@dataclass(frozen=True)
class Plain(Weight):
    """A weight that is stored as it is."""

    stored: Stored

    def read(self) -> torch.Tensor:
        """Return the values in the type of the file."""
        return self.stored.read()


@dataclass(frozen=True)
class Decoded(Weight):
    """A weight that a function decodes, to float32."""

    decode: Callable[[], torch.Tensor]

    def read(self) -> torch.Tensor:
        """Return the values in float32."""
        return self.decode()


@dataclass(frozen=True)
class Groups:
    """A matrix of integers in groups that share a scale: a weight is ``(code - zero) * scale``.

    ``codes`` is ``[rows, columns]``, unsigned. ``scales`` and ``zeros`` are float32 ``[rows, groups]``. ``order`` is
    the group of each column; ``None`` where columns follow each other.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Return the weights in float32."""
        codes = self.codes.float()
        if self.order is not None:
            return (codes - self.zeros[:, self.order]) * self.scales[:, self.order]
        groups: torch.Tensor = codes.unflatten(1, (self.scales.shape[1], -1))
        return ((groups - self.zeros.unsqueeze(2)) * self.scales.unsqueeze(2)).flatten(1)


@dataclass(frozen=True)
class Grouped(Weight):
    """A matrix of integers of ``bits`` bits, in groups of ``group_size`` columns."""

    bits: int
    group_size: int
    read_groups: Callable[[], Groups]
    """Returns the integers, scales and zero points."""

    def read(self) -> torch.Tensor:
        """Return the values in float32."""
        return self.read_groups().values()
