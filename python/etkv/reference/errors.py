"""How the reference refuses: with the errors of the native caches."""

from __future__ import annotations

import operator
from typing import Any

from etkv.errors import NoCacheError, Status, StatusError, status_error


class NoActiveCacheError(NoCacheError, RuntimeError):
    """``kvcache::update_and_attend`` runs in plain PyTorch and no cache is active."""

    def __init__(self) -> None:
        super().__init__(
            "kvcache::update_and_attend runs without a KV cache; make one (etkv.reference.ContiguousCache(config)) and "
            "run the model within `with etkv.op.active(cache):`",
        )


def invalid(message: str) -> StatusError:
    return status_error(Status.INVALID_ARGUMENT, message)


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
