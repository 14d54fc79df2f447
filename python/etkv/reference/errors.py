"""What a cache refuses, with the status that the native caches give."""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import Any

from etkv.errors import EtkvError


class Status(IntEnum):
    """What went wrong: the numbers of ``etkv_status`` in ``include/etkv/etkv.h`` that a reference can give."""

    INVALID_ARGUMENT = 1
    """An argument cannot be: negative, of the wrong type or size."""
    CAPACITY = 2
    """The step or the sequence does not fit in the cache's capacity."""
    POSITION = 3
    """A position is negative, leaves a gap, or breaks the run of its step."""
    NO_CACHE = 4
    """No cache is active where the op runs."""
    SHAPE = 6
    """A tensor's shape does not match the cache."""
    DTYPE = 7
    """A tensor's dtype is none that the caches take."""
    STEP = 11
    """A step is open on this cache, or none is."""


class CacheError(EtkvError):
    """A call that was refused: the cache is as it was. ``status`` says why in one word, the message in a sentence."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class NoActiveCacheError(CacheError, RuntimeError):
    """``kvcache::update_and_attend`` runs in plain PyTorch and no cache is active."""

    def __init__(self) -> None:
        super().__init__(
            Status.NO_CACHE,
            "kvcache::update_and_attend runs without a KV cache; make one (etkv.reference.ContiguousCache(config)) and "
            "run the model within `with etkv.op.active(cache):`",
        )


def invalid(message: str) -> CacheError:
    return CacheError(Status.INVALID_ARGUMENT, message)


def integer(name: str, value: Any) -> int:
    """``value`` as an int; numpy's and torch's integers are such, bools and floats are not."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise invalid(f"{name} is {value!r}, it is an integer")


def at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise invalid(f"{name} is {value}, the least is {least}")
