"""The op ``kvcache::update_and_attend``, by which a model uses its KV cache, in plain PyTorch.

A model calls it in every layer. In an exported program a delegate runs it on a native cache. In plain PyTorch it runs
on the active reference cache::

    cache = etkv.reference.ContiguousCache(config)
    with etkv.op.active(cache):
        logits = model(tokens, positions)

ExecuTorch has an op of the same name and signature. If ExecuTorch's op is registered first, it stays. Otherwise this
module registers its own op, and ExecuTorch's op replaces this op if it is imported later. In both cases this module
also registers a kernel for each device, which takes precedence over the op's own kernel. The kernel uses the cache of
:func:`active`. Without an active cache it calls ExecuTorch's op. The kernel also keeps the dispatcher's entry alive
while the op is replaced, so graphs that were traced before still run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from etkv.errors import Status, StatusError, status_error
from etkv.reference.errors import NoActiveCacheError
from etkv.reference.state import RecurrentState

NAME = "kvcache::update_and_attend"
"""The op's name. :func:`update_and_attend` calls the op that is registered under this name."""

SINKS = "kvcache::update_and_attend.sinks"
"""The name of the op's overload with learned sinks and a softcap."""

_EXECUTORCH = "executorch.extension.llm.cache.update_and_attend"
_DEVICES = ("CPU", "CUDA", "MPS")


class OpCache(Protocol):
    """The interface of a cache for the op. The caches of :mod:`etkv.reference` have it."""

    def update_and_attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: list[int],
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Stores a layer's rows, and returns the attention of its queries."""

    def abort(self) -> None:
        """Rolls back an unfinished forward, in which only some layers were called."""


_active: ContextVar[OpCache | None] = ContextVar("etkv.op.active", default=None)
_active_state: ContextVar[RecurrentState | None] = ContextVar("etkv.op.active_state", default=None)


@contextmanager
def active(cache: OpCache | None, state: RecurrentState | None = None) -> Iterator[None]:
    """Activates ``cache`` and ``state`` within the block, on this thread or task only.

    Blocks nest: the innermost block applies. The end of a cache's outermost block rolls back an unfinished forward.
    """
    outer, outer_state = _active.get(), _active_state.get()
    token, state_token = _active.set(cache), _active_state.set(state)
    try:
        yield
    finally:
        _active.reset(token)
        _active_state.reset(state_token)
        if cache is not None and outer is not cache:
            cache.abort()
        if state is not None and outer_state is not state:
            state.abort()


def active_state() -> RecurrentState | None:
    """Returns the active state of recurrent layers, or None."""
    return _active_state.get()


def update_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Stores a layer's new keys and values, and attends to the positions that its queries see.

    With sinks or a softcap it calls the overload :data:`SINKS`, which ExecuTorch's op lacks.

    Args:
        q: ``[1, n_heads, q_len, head_dim]``, with rotary embeddings applied.
        k: ``[1, n_kv_heads, q_len, head_dim]``, also rotated; ``n_heads`` is a multiple of ``n_kv_heads``.
        v: ``[1, n_kv_heads, q_len, v_head_dim]``.
        position: int32 or int64, ``[q_len]`` or ``[q_len, n]``. The first of n components is the position in
            the sequence. The others are for rotary embeddings; the cache ignores them.
        layer_id: the layer's number in the cache. If layers of a model share keys and values, the model calls the op
            several times with one ``layer_id`` and the same rows. The first call stores them; later calls only attend.
        scale: the factor of the scores.
        out_dtype: the dtype of the result, independent of the cache's formats.
        sinks: ``[n_heads]``, learned logits. A head's logit is one more score in the softmax of the head, with a value
            of zeros.
        softcap: the bound c of the scaled scores, which become c * tanh(score / c); 0 for none. Sinks are not bounded.

    Returns:
        ``[1, n_heads, q_len, v_head_dim]`` in ``out_dtype``.

    Raises:
        NoActiveCacheError: no cache is active.
        StatusError: the cache refuses the rows, and is unchanged.
    """
    attended: Tensor
    if sinks is None and softcap == 0.0:
        attended = torch.ops.kvcache.update_and_attend(q, k, v, position, layer_id, scale, out_dtype)
    else:
        overload = torch.ops.kvcache.update_and_attend.sinks
        attended = overload(q, k, v, position, layer_id, scale, out_dtype, sinks, softcap)
    return attended


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, layer_id: int, scale: float, out_dtype: torch.dtype
) -> Tensor:
    cache = _active.get()
    if cache is None:
        return _without_cache(q, k, v, position, layer_id, scale, out_dtype)
    return _attend(cache, q, k, v, position, layer_id, scale, out_dtype)


def _sinks_kernel(*arguments: Any) -> Tensor:
    *plain, sinks, softcap = arguments
    cache = _active.get()
    if cache is None:
        raise NoActiveCacheError
    return _attend(cache, *plain, sinks=None if sinks is None else sinks.cpu(), softcap=softcap)


def _attend(
    cache: OpCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
    **more: Any,
) -> Tensor:
    positions = positions_of(cache, position, q.shape[2] if q.dim() == 4 else None)
    # The reference stores its rows on the CPU.
    out = cache.update_and_attend(layer_id, q.cpu(), k.cpu(), v.cpu(), positions, scale, out_dtype, **more)
    return out.to(q.device)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, layer_id: int, scale: float, out_dtype: torch.dtype, *_: object
) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)


def _without_cache(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, layer_id: int, scale: float, out_dtype: torch.dtype
) -> Tensor:
    """Computes the op with the cache of ExecuTorch's op, or raises :class:`NoActiveCacheError` if that op has no
    cache.
    """
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


def positions_of(owner: OpCache | RecurrentState, position: Tensor, n_tokens: int | None) -> list[int]:
    """Returns the positions of a step's tokens. Refuses another number of positions than ``n_tokens``, unless
    ``n_tokens`` is None. A refusal rolls back the forward of ``owner``.
    """
    try:
        return _positions(position, n_tokens)
    except StatusError:
        owner.abort()
        raise


def _positions(position: Tensor, n_tokens: int | None) -> list[int]:
    if position.dtype not in (torch.int32, torch.int64):
        raise status_error(
            Status.DTYPE, f"position is {str(position.dtype).removeprefix('torch.')}, expected int32 or int64"
        )
    if position.dim() not in (1, 2) or (position.dim() == 2 and position.shape[1] == 0):
        raise status_error(Status.SHAPE, f"position has shape {list(position.shape)}, expected [q_len] or [q_len, n]")
    if n_tokens is not None and position.shape[0] != n_tokens:
        raise status_error(Status.SHAPE, f"expected a position for each of {n_tokens} queries, got {position.shape[0]}")
    first: Tensor = position if position.dim() == 1 else position[:, 0]
    return [int(at) for at in first.tolist()]


def _register() -> tuple[object, ...]:
    """Registers the op unless it exists, and the kernels that take precedence. Returns the registrations."""
    held: list[object] = []
    if not hasattr(torch.ops.kvcache, "update_and_attend"):
        ours = torch.library.custom_op(NAME, _kernel, mutates_args=())
        ours.register_fake(_fake)
        # If another op is registered under the name, torch removes the op objects of this library's definitions from
        # torch.ops, and creates new objects. Tracers still get the old objects from the dispatcher, so a search for
        # the op in a graph would fail. So this empties the library's list of definitions: then the op keeps its object.
        getattr(getattr(ours, "_lib", None), "_op_defs", set()).clear()
        held.append(ours)
    overload = torch.library.Library("kvcache", "FRAGMENT")
    overload.define(
        f"{SINKS.partition('::')[2]}(Tensor q, Tensor k, Tensor v, Tensor position, SymInt layer_id, float scale, "
        "ScalarType out_dtype, Tensor? sinks, float softcap) -> Tensor"
    )
    torch.library.register_fake(SINKS, _fake, lib=overload)
    kernels = torch.library.Library("kvcache", "IMPL")
    for device in _DEVICES:
        kernels.impl("update_and_attend", _kernel, device)
        kernels.impl("update_and_attend.sinks", _sinks_kernel, device)
    return *held, overload, kernels


# The registrations last as long as these objects, so they live as long as the process.
_REGISTERED = _register()
