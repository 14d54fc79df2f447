"""Errors that a user can correct, and messages of other packages' errors."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """The class of an error. Numbers are those of ``etkv_status`` in ``etkv.h``, names those of
    ``etkv_status_name``.
    """

    INVALID_ARGUMENT = 1
    CAPACITY = 2
    POSITION = 3
    NO_CACHE = 4
    KIND = 5
    SHAPE = 6
    DTYPE = 7
    PROGRAM = 8
    UNSUPPORTED = 9
    BACKEND = 10
    STEP = 11
    INTERNAL = 12
    FILE = 13
    VERSION = 14


class EtkvError(ValueError):
    """An error that the caller can correct: the message names the value and its limit, in one line.

    ``status`` is the error's number in ``etkv.h``. The commands of this package print the message to stderr and end
    with exit status 2.
    """

    status: Status = Status.INVALID_ARGUMENT


class StatusError(EtkvError):
    """A call that a cache or a program refuses. Nothing has changed."""

    status = Status.INTERNAL

    def __init__(self, message: str, status: Status | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status


class CapacityError(StatusError):
    """The step or the sequence does not fit in the cache."""

    status = Status.CAPACITY


class PositionError(StatusError):
    """A position is negative, leaves a gap, is out of order in its step, or was dropped."""

    status = Status.POSITION


class NoCacheError(StatusError):
    """A program ran without a cache, or the registry has no cache under a key."""

    status = Status.NO_CACHE


class KindError(StatusError):
    """The kind of cache is unknown, or caches of this kind lack the operation."""

    status = Status.KIND


class ProgramError(StatusError):
    """The program is damaged, or is not a program for this backend."""

    status = Status.PROGRAM


class UnsupportedError(StatusError):
    """The program needs something that this build does not have."""

    status = Status.UNSUPPORTED


class StepError(StatusError):
    """A step is open on the cache, or the call needs a step and none is open."""

    status = Status.STEP


class CacheFileError(StatusError):
    """A file with a cache's contents cannot be read or written, is damaged, or has another version, model or config."""

    status = Status.FILE


class VersionError(StatusError):
    """The program is of a version that this build does not read."""

    status = Status.VERSION


_CLASSES = {cls.status: cls for cls in StatusError.__subclasses__()}


def status_error(status: int, message: str) -> StatusError:
    """Return the exception for a status."""
    known = Status(status) if status in Status._value2member_map_ else Status.INTERNAL
    return _CLASSES.get(known, StatusError)(message, known)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty.

    A line that ends in a colon announces the next one, which is then appended.
    """
    if isinstance(error, KeyError) and len(error.args) == 1:
        # The message of a KeyError is only the key.
        return f"{error.args[0]!r} is missing or unknown"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    made = lines[0] if lines else type(error).__name__
    for line in lines[1:]:
        if not made.endswith(":"):
            break
        made = f"{made} {line}"
    return made
