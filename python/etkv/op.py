"""The op that joins a model to its KV cache, ``kvcache::update_and_attend``, in plain PyTorch.

A model calls it in every layer. In an exported program a delegate runs it on a native cache; in plain PyTorch it runs
on the reference cache that is active::

    cache = etkv.reference.ContiguousCache(config)
    with etkv.op.active(cache):
        logits = model(tokens, positions)

ExecuTorch has an op of that name and signature. If ExecuTorch's op is registered first, it stays. Otherwise this module
registers its own op, which ExecuTorch's replaces when it is imported later. In both cases this module's kernel for each
device takes precedence over the op's. The kernel uses the cache of ``active``; without one it calls ExecuTorch's op. It
also keeps the dispatcher's entry alive while the op is replaced, so graphs that were traced before still run.
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
    """The interface that the op needs of a cache. The caches of :mod:`etkv.reference` have it."""

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
        """Stores a layer's rows, and returns the attention of its queries."""

    def abort(self) -> None:
        """Rolls back an unfinished forward, in which only some layers were called."""


_active: ContextVar[OpCache | None] = ContextVar("etkv.op.active", default=None)


@contextmanager
def active(cache: OpCache) -> Iterator[None]:
    """Makes the op use ``cache`` within the block, on this thread or task only.

    Blocks nest: the innermost counts. The end of a cache's outermost block rolls back an unfinished forward.
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
    """Stores a layer's new keys and values, and attends to the positions that its queries see.

    Args:
        q: ``[1, n_heads, q_len, head_dim]``, with rotary embeddings applied.
        k: ``[1, n_kv_heads, q_len, head_dim]``, likewise; ``n_heads`` is a multiple of ``n_kv_heads``.
        v: ``[1, n_kv_heads, q_len, v_head_dim]``.
        position: int32 or int64, ``[q_len]`` or ``[q_len, n]``. The first of n components is the position in
            the sequence. The others are for rotary embeddings; the cache ignores them.
        layer_id: the layer's number in the cache. If layers of a model share keys and values, it calls the op several
            times with one ``layer_id`` and the same rows. The first call stores them; later calls only attend.
        scale: the factor of the scores.
        out_dtype: the dtype of the result, independent of the cache's formats.

    Returns:
        ``[1, n_heads, q_len, v_head_dim]`` in ``out_dtype``.

    Raises:
        NoActiveCacheError: no cache is active.
        StatusError: the cache refuses the rows; it stays as it was.
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
    """Calls ExecuTorch's own op, if it is imported and has a cache."""
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
            Status.DTYPE, f"position is {str(position.dtype).removeprefix('torch.')}, expected int32 or int64"
        )
    if position.dim() not in (1, 2) or (position.dim() == 2 and position.shape[1] == 0):
        raise status_error(Status.SHAPE, f"position has shape {list(position.shape)}, expected [q_len] or [q_len, n]")
    if q.dim() == 4 and position.shape[0] != q.shape[2]:
        raise status_error(Status.SHAPE, f"position has {position.shape[0]} entries for {q.shape[2]} queries")
    first: Tensor = position if position.dim() == 1 else position[:, 0]
    return [int(at) for at in first.tolist()]


def _register() -> tuple[object, ...]:
    """Registers the op unless it exists, and the kernels that precede the op's. Returns the registrations."""
    held: list[object] = []
    if not hasattr(torch.ops.kvcache, "update_and_attend"):
        ours = torch.library.custom_op(NAME, _kernel, mutates_args=())
        ours.register_fake(_fake)
        # If another op takes the name, torch removes the definitions of this library from torch.ops, and makes a new
        # object. The dispatcher still gives the old one to tracers, so a search for the op in a graph would not find
        # it. With no definitions listed in the library, the op keeps one object.
        getattr(getattr(ours, "_lib", None), "_op_defs", set()).clear()
        held.append(ours)
    kernels = torch.library.Library("kvcache", "IMPL")
    for device in _DEVICES:
        kernels.impl("update_and_attend", _kernel, device)
    return *held, kernels


# The registrations end with these objects, so they live as long as the process.
_REGISTERED = _register()
