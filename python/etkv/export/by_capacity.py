"""The op that chooses between two tensors by the cache's capacity. The capacity is known when a program is loaded.

In an MLX program the choice is a ``where`` whose flag is a constant, false. The pass ``by_capacity`` of
``crates/etkv-mlx-program`` finds the flag by its name and sets it. In a CPU program the choice is a call of etkv, see
:mod:`etkv.export.cpu.calls`.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAG = "etkv_capacity_over_{}"
"""The flag's name in MLX programs. It contains the limit."""

_capacity: ContextVar[int] = ContextVar("capacity", default=0)
"""The capacity, in positions, that the op uses in plain PyTorch."""


@torch.library.custom_op("etkv::select_by_capacity", mutates_args=())
def select_by_capacity(within: torch.Tensor, beyond: torch.Tensor, limit: int) -> torch.Tensor:
    """Return ``beyond`` if the cache has a capacity of more than ``limit`` positions, else ``within``.

    Both have the same shape and dtype.
    """
    return (beyond if _capacity.get() > limit else within).clone()


select_by_capacity.register_fake(lambda within, *_: torch.empty_like(within))


@contextlib.contextmanager
def capacity(positions: int) -> Iterator[None]:
    """Within the block, the op in plain PyTorch chooses for a cache of ``positions`` positions."""
    token = _capacity.set(positions)
    try:
        yield
    finally:
        _capacity.reset(token)
