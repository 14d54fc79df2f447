"""Bytes of caches: the bytes that they hold now, the bytes that they will hold, and the process's memory budget."""

from __future__ import annotations

import atexit
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etkv._capi import ask, ask_text, call, encoded, ffi, int32, lib, struct
from etkv._raw_config import raw_config
from etkv.config import CacheConfig
from etkv.errors import EtkvError


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one attention layer's buffers."""

    k_allocated: int
    k_used: int
    v_allocated: int
    v_used: int


@dataclass(frozen=True)
class RecurrentLayerMemory:
    """Bytes of one recurrent layer's buffers."""

    rows_allocated: int
    """Bytes of the rows that the layer keeps for the last tokens of each sequence."""
    rows_used: int
    anchors_allocated: int
    """Bytes of the states of a recurrence; 0 for a convolution."""
    anchors_used: int


@dataclass(frozen=True)
class Memory:
    """Bytes of a cache's buffers."""

    allocated: int
    """Bytes of all buffers."""
    used: int
    """Bytes of the buffers that positions use, a part of ``allocated``."""
    at_capacity: int
    """Maximum bytes that the cache can hold."""
    layers: tuple[LayerMemory, ...]
    """The bytes of each attention layer."""
    shared: int = 0
    """Bytes of an attached prefix's rows. Other caches may share these rows. No other field includes these bytes."""
    recurrent_layers: tuple[RecurrentLayerMemory, ...] = ()
    """The bytes of each recurrent layer."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of the buffers of all caches in this process, and their limit."""

    limit: int | None
    """Maximum bytes of the buffers; None without a limit."""
    held: int
    """Present bytes of the buffers. While a step grows buffers or a conversion replaces them, old and new buffers
    count."""
    peak: int
    """The maximum of ``held`` so far, including bytes that a step reserved before it was rolled back."""
    n_caches: int
    """The number of caches, including empty ones."""


def set_memory_budget(limit: int | None) -> None:
    """Limit the bytes of the buffers of all caches in this process, of every backend. ``None`` removes the limit.

    Creating a cache that allocates upfront, a growing step, a conversion or a load raises :class:`EtkvError` with the
    status ``BACKEND`` if it would exceed the limit, and changes nothing. A limit below the present bytes is no error:
    caches keep their buffers, and cannot grow until enough is free. Weights, and memory that MLX keeps for reuse, do
    not count.

    Before a refusal, idle prefixes are freed, and then the callback of :func:`set_memory_callback` is called.
    """
    if limit is not None and not 0 < limit < 2**64:
        raise EtkvError(f"limit is {limit}, expected 1 to 2**64 - 1 bytes, or None")
    call("etkv_memory_budget_set", limit or 0)


def memory_budget() -> MemoryBudget:
    """Return the bytes of all caches in this process, and their limit."""
    budget = struct("etkv_memory_budget")
    call("etkv_memory_budget_read", budget)
    return MemoryBudget(budget.limit or None, budget.held, budget.peak, budget.n_caches)


_memory_callback: Any = None
"""The callback that is set in the library. It must live as long as the library may call it."""

_memory_callback_setting = threading.Lock()
_memory_callback_here = threading.local()
_logger = logging.getLogger("etkv.core")


def set_memory_callback(callback: Callable[[int], int | None] | None) -> None:
    """Set the callback that frees memory before the memory budget refuses an allocation, or remove the callback
    (``None``).

    A library call that needs memory calls the callback with the number of missing bytes. It may do so on any thread,
    and on several threads at once. The callback may close sessions, and clear other caches with ``release``. Its
    calls on a cache in use do not wait: they raise :class:`EtkvError` with the status ``STEP``. The cache that needs
    memory is always in use. The callback returns the bytes that it freed, or ``None``. The value is only logged. An
    exception of the callback is logged too, and does not fail the library call.

    The callback needs Python's lock. A thread that runs a program in ExecuTorch's own runtime holds this lock. So
    such a thread must not use a cache that another thread uses at the same time.
    """
    global _memory_callback

    def free(bytes_lacking: int, _user: Any) -> int:
        _memory_callback_here.inside = True
        try:
            freed = None if callback is None else callback(bytes_lacking)
            return 0 if freed is None else min(max(int(freed), 0), 2**64 - 1)
        except Exception:
            _logger.exception("the memory callback failed")
            return 0
        finally:
            _memory_callback_here.inside = False

    if getattr(_memory_callback_here, "inside", False):
        # The library refuses this call from a callback and raises. Taking the lock first could deadlock: its holder
        # may be setting a callback, and waits until this callback ends.
        call("etkv_memory_budget_set_callback", ffi.NULL, ffi.NULL)
        return
    with _memory_callback_setting:
        lib()
        handle = ffi.NULL if callback is None else ffi.callback("uint64_t(uint64_t, void*)", free, error=0)
        if _memory_callback is None:
            # No callback may run while Python exits.
            atexit.register(set_memory_callback, None)
        # Keep both callbacks alive during the call: if it is interrupted, the library may call either.
        _memory_callback = (_memory_callback, handle)
        call("etkv_memory_budget_set_callback", handle, ffi.NULL)
        _memory_callback = handle


def process_report() -> dict[str, Any]:
    """Return a report of this process: the memory budget and its caches. ``docs/reports.md`` lists the fields."""
    report: dict[str, Any] = json.loads(ask_text("etkv_process_report"))
    return report


def estimate(config: CacheConfig, length: int) -> Memory:
    """Return the bytes of a ``contiguous`` cache of ``config`` after it has grown to ``length`` positions.

    The result is exact. No cache is created. ``length`` is 0 to the capacity.
    """
    return _estimate("etkv_cache_config_estimate", config, length)


def estimate_shared(config: CacheConfig, length: int) -> Memory:
    """Return :func:`estimate` for the kinds ``seq`` and ``tree`` with one sequence.

    The field ``at_capacity`` is right for any number of sequences: if layers have windows, all sequences together may
    need a slot for every position.
    """
    return _estimate("etkv_cache_config_estimate_shared", config, length)


def row_bytes(format: str, head_dim: int) -> int:
    """Return the bytes of one row of ``head_dim`` elements in a format, including its scales."""
    return ask("etkv_format_row_bytes", "uint64_t", encoded(format, "format"), int32(head_dim, "head_dim"))


def _estimate(function: str, config: CacheConfig, length: int) -> Memory:
    raw, _keep = raw_config(config)
    counts = len(config.layers), len(config.recurrent_layers)
    return read_memory(*counts, lambda memory: call(function, raw, int32(length, "length"), memory))


def read_memory(n_layers: int, n_recurrent_layers: int, fill: Any) -> Memory:
    """Return the memory that ``fill`` writes to a C struct."""
    layers = ffi.new("etkv_layer_memory[]", max(1, n_layers))
    layers[0].struct_size = ffi.sizeof("etkv_layer_memory")
    recurrent_layers = ffi.new("etkv_recurrent_layer_memory[]", max(1, n_recurrent_layers))
    recurrent_layers[0].struct_size = ffi.sizeof("etkv_recurrent_layer_memory")
    memory = struct(
        "etkv_memory",
        layers=layers if n_layers else ffi.NULL,
        n_layers=n_layers,
        recurrent_layers=recurrent_layers if n_recurrent_layers else ffi.NULL,
        n_recurrent_layers=n_recurrent_layers,
    )
    fill(memory)
    each = tuple(
        LayerMemory(layer.k_allocated, layer.k_used, layer.v_allocated, layer.v_used) for layer in layers[0:n_layers]
    )
    each_recurrent = tuple(
        RecurrentLayerMemory(layer.rows_allocated, layer.rows_used, layer.anchors_allocated, layer.anchors_used)
        for layer in recurrent_layers[0:n_recurrent_layers]
    )
    return Memory(memory.allocated, memory.used, memory.at_capacity, each, memory.shared, each_recurrent)
