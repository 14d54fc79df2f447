"""The op that joins a model to its KV cache, ``kvcache::update_and_attend``, in plain PyTorch.

A model calls it in every layer. In an exported program a delegate runs it on a native cache; in plain PyTorch it runs
on the reference cache that is active::

    cache = etkv.reference.ContiguousCache(config)
    with etkv.op.active(cache):
        logits = model(tokens, positions)

ExecuTorch has an op of that name and signature. Where it was registered first, it stays; otherwise this module
registers its own, which ExecuTorch's replaces when it is imported later. Either way ``active`` is what decides: a
kernel for each device goes before the one that came with the op, and leaves the call to ExecuTorch's caches where no
cache is active here. That kernel also keeps the dispatcher's entry of the op alive while the op is replaced, so that
graphs which were traced before still run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from etkv.errors import Status, StatusError, status_error
from etkv.reference.errors import NoActiveCacheError

NAME = "kvcache::update_and_attend"
"""The op's name; :func:`update_and_attend` calls whichever op has it."""

_EXECUTORCH = "executorch.extension.llm.cache.update_and_attend"
_DEVICES = ("CPU", "CUDA", "MPS")


class OpCache(Protocol):
    """What the op needs of a cache. Those of :mod:`etkv.reference` have it."""

    def update_and_attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: list[int],
        scale: float,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """The attention of a layer's queries, whose rows are stored before."""

    def abort(self) -> None:
        """Forgets a forward that only some layers were called of."""


_active: ContextVar[OpCache | None] = ContextVar("etkv.op.active", default=None)


@contextmanager
def active(cache: OpCache) -> Iterator[None]:
    """Makes ``cache`` the one that the op uses, within the block and on this thread or task only.

    Blocks nest: the innermost counts. A forward that is not finished when the outermost block of its cache ends has not
    been.
    """
    outer = _active.get()
    token = _active.set(cache)
    try:
        yield
    finally:
        _active.reset(token)
        if outer is not cache:
            cache.abort()


def update_and_attend(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, layer_id: int, scale: float, out_dtype: torch.dtype
) -> Tensor:
    """Stores a layer's new keys and values, and attends to all that its queries see.

    Args:
        q: ``[1, n_heads, q_len, head_dim]``, rotated already.
        k: ``[1, n_kv_heads, q_len, head_dim]``, likewise; ``n_heads`` is a multiple of ``n_kv_heads``.
        v: ``[1, n_kv_heads, q_len, v_head_dim]``.
        position: int32 or int64, ``[q_len]`` or ``[q_len, n]``. Of n components the first is the position in the
            sequence; the others are for rotary embeddings, and nothing to a cache.
        layer_id: the layer, by its number in the cache. A model whose layers share keys and values names one layer in
            several calls, each with the rows of the first: they are stored once, and the calls that follow only attend.
        scale: of the scores.
        out_dtype: of the result, whatever the cache stores.

    Returns:
        ``[1, n_heads, q_len, v_head_dim]`` in ``out_dtype``.

    Raises:
        NoActiveCacheError: where it runs and no cache is active.
        StatusError: what the cache refuses, which leaves it as it was.
    """
    attended: Tensor = torch.ops.kvcache.update_and_attend(q, k, v, position, layer_id, scale, out_dtype)
    return attended


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, layer_id: int, scale: float, out_dtype: torch.dtype
) -> Tensor:
    cache = _active.get()
    if cache is None:
        return _without_cache(q, k, v, position, layer_id, scale, out_dtype)
    try:
        positions = _positions(position, q)
    except StatusError:
        cache.abort()
        raise
    # The reference keeps its rows on the CPU.
    out = cache.update_and_attend(layer_id, q.cpu(), k.cpu(), v.cpu(), positions, scale, out_dtype)
    return out.to(q.device)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, layer_id: int, scale: float, out_dtype: torch.dtype
) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)


def _without_cache(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, layer_id: int, scale: float, out_dtype: torch.dtype
) -> Tensor:
    """What ExecuTorch's own op does, where it is there and has a cache."""
    executorch = sys.modules.get(_EXECUTORCH)
    if executorch is None:
        raise NoActiveCacheError
    try:
        cache = executorch.REGISTRY.current()
    except RuntimeError:
        raise NoActiveCacheError from None
    keys, values, spec = cache.update_and_fetch(layer_id, k, v, position)
    attended: Tensor = executorch.attend(q, keys, values, spec, scale, out_dtype)
    return attended


def _positions(position: Tensor, q: Tensor) -> list[int]:
    if position.dtype not in (torch.int32, torch.int64):
        raise status_error(
            Status.DTYPE, f"position is {str(position.dtype).removeprefix('torch.')}, it is int32 or int64"
        )
    if position.dim() not in (1, 2) or (position.dim() == 2 and position.shape[1] == 0):
        raise status_error(Status.SHAPE, f"position has shape {list(position.shape)}, it is [q_len] or [q_len, n]")
    if q.dim() == 4 and position.shape[0] != q.shape[2]:
        raise status_error(Status.SHAPE, f"position has {position.shape[0]} entries for {q.shape[2]} queries")
    first: Tensor = position if position.dim() == 1 else position[:, 0]
    return [int(at) for at in first.tolist()]


def _register() -> tuple[object, ...]:
    """Registers the op where nobody has, and the kernels that go before its own; what holds them."""
    held: list[object] = []
    if not hasattr(torch.ops.kvcache, "update_and_attend"):
        ours = torch.library.custom_op(NAME, _kernel, mutates_args=())
        ours.register_fake(_fake)
        # Where another op takes the name, torch has torch.ops forget what this library defined, and make a new object.
        # The dispatcher goes on giving the old one to tracers, and who looks for the op in a graph would not find it. A
        # library that tells of no definitions leaves it one object.
        getattr(getattr(ours, "_lib", None), "_op_defs", set()).clear()
        held.append(ours)
    kernels = torch.library.Library("kvcache", "IMPL")
    for device in _DEVICES:
        kernels.impl("update_and_attend", _kernel, device)
    return *held, kernels


# For as long as the process lives: they are gone with the objects that registered them.
_REGISTERED = _register()
