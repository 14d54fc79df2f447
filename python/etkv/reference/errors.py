"""The errors of the reference caches, with the statuses of the native caches."""

from __future__ import annotations

import operator
from typing import Any

from etkv.errors import NoCacheError, Status, StatusError


class NoActiveCacheError(NoCacheError, RuntimeError):
    """``kvcache::update_and_attend`` ran in plain PyTorch, and no cache was active."""

    def __init__(self) -> None:
        super().__init__(
            "kvcache::update_and_attend runs without a KV cache; make one (etkv.reference.ContiguousCache(config)) and "
            "run the model within `with etkv.op.active(cache):`",
        )


def invalid(message: str) -> StatusError:
    return StatusError(message, Status.INVALID_ARGUMENT)


def integer(name: str, value: Any) -> int:
    """Returns ``value``, an integer of Python, numpy or torch, as an int. Refuses other values, bools and floats
    too.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise invalid(f"expected {name} as an integer, got {value!r}")


def check_range(name: str, value: int, least: int, most: int = 2**31 - 1) -> None:
    if not least <= value <= most:
        limit = f"minimum is {least}" if value < least else f"maximum is {most}"
        raise invalid(f"{name} is {value}, the {limit}")
