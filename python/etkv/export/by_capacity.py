"""The op that chooses between two tensors by the capacity of the cache, which is known when a program is loaded.

On MLX the choice is a ``where`` with a constant flag, false, whose name the pass ``by_capacity`` of
``crates/etkv-mlx-program`` knows. On the CPU it is a call of etkv, see :mod:`etkv.export.cpu.calls`.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAG = "etkv_capacity_over_{}"
"""The name of a limit's flag in MLX programs."""

_capacity: ContextVar[int] = ContextVar("capacity", default=0)
"""The capacity, in positions, by which the op chooses in plain PyTorch."""


@torch.library.custom_op("etkv::select_by_capacity", mutates_args=())
def select_by_capacity(within: torch.Tensor, beyond: torch.Tensor, limit: int) -> torch.Tensor:
    """Return ``beyond`` if the capacity of the cache is more than ``limit`` positions, else ``within``.

    Both have the same shape and dtype.
    """
    return (beyond if _capacity.get() > limit else within).clone()


@select_by_capacity.register_fake
def _(within: torch.Tensor, beyond: torch.Tensor, limit: int) -> torch.Tensor:
    return torch.empty_like(within)


@contextlib.contextmanager
def capacity(positions: int) -> Iterator[None]:
    """Let the op in plain PyTorch choose as for a cache of ``positions`` positions."""
    token = _capacity.set(positions)
    try:
        yield
    finally:
        _capacity.reset(token)
