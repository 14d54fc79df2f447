"""What the native library tells of itself, as records of :mod:`logging`.

The library calls back in the middle of a step, with its caches and MLX taken. So the callback takes Python's own lock
and no other, and keeps what it is told; the call that caused it hands that to :mod:`logging` when it is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

NAMES = ("etkv.core", "etkv.program", "etkv.api")
"""The loggers: the library's targets, with dots."""

TRACE = 5
"""The level of what each layer of a step does, which :mod:`logging` has no name for."""

_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG, 5: TRACE}
"""The levels of ``log.h``."""

_FILTERS = (
    (TRACE, "trace"),
    (logging.DEBUG, "debug"),
    (logging.INFO, "info"),
    (logging.WARNING, "warn"),
    (logging.ERROR, "error"),
)
"""What the library is asked for -> by a logger that takes no less than this."""

KEPT = 10_000
"""Messages that wait to be handed over, at most; older ones go."""

waiting: deque[tuple[int, str, str, float, int]] = deque(maxlen=KEPT)
"""What was told and not handed over."""

_LOGGERS = {name.replace(".", "::"): logging.getLogger(name) for name in NAMES}
"""The library's target -> its logger."""

logging.getLogger("etkv").addHandler(logging.NullHandler())


def hear(level: int, target: str, message: str) -> None:
    """Keep a message. Takes no lock: another thread may have a logger's, and wait for the library."""
    waiting.append((level, target, message, time.time(), threading.get_ident()))


def deliver() -> None:
    """Hand what was told to the loggers, which take locks: nothing of the library is taken by this thread."""
    while waiting:
        try:
            level, target, message, created, thread = waiting.popleft()
        except IndexError:  # Another thread was faster.
            return
        logger = logging.getLogger(target.replace("::", "."))
        number = _LEVELS.get(level, logging.DEBUG)
        if logger.isEnabledFor(number):
            record = logger.makeRecord(logger.name, number, "(etkv)", 0, message, (), None)
            record.created, record.msecs, record.thread = created, created % 1 * 1000, thread
            logger.handle(record)


def wanted() -> str:
    """The filter, as ``log.h`` has it, of what the loggers take now; "" where no handler would have anything."""
    asked = ((target, _level(logger)) for target, logger in _LOGGERS.items())
    return ",".join(f"{target}={level}" for target, level in asked if level is not None)


def _level(logger: logging.Logger) -> str | None:
    if not _has_handler(logger):
        return None
    least = max(logger.getEffectiveLevel(), logger.manager.disable + 1)
    return next((name for level, name in _FILTERS if least <= level), None)


def _has_handler(logger: logging.Logger | None) -> bool:
    """Whether what the logger takes reaches anything."""
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
