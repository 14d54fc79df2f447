"""The log of the native library, as records of :mod:`logging`.

The library logs in the middle of a step, while it holds the locks of its caches and of MLX. ExecuTorch's Python module
waits for MLX while it holds Python's lock, so a callback in Python could wait forever. The library keeps messages
instead, and the call that caused them passes them to :mod:`logging` at its end.
"""

from __future__ import annotations

import json
import logging

NAMES = ("etkv.core", "etkv.program", "etkv.file", "etkv.api")
"""The loggers: the library's targets, with ``.`` for ``::``."""

TRACE = 5
"""The level of messages of each layer of a step. :mod:`logging` has no name for it."""

_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG, 5: TRACE}
"""The level in ``log.h`` -> the level of :mod:`logging`."""

_FILTERS = (
    (TRACE, "trace"),
    (logging.DEBUG, "debug"),
    (logging.INFO, "info"),
    (logging.WARNING, "warn"),
    (logging.ERROR, "error"),
)
"""Levels of :mod:`logging` from the lowest, and the library's filters for loggers that accept them."""

KEPT = 10_000
"""The most messages that the library keeps; older ones are dropped."""

_LOGGERS = {name.replace(".", "::"): logging.getLogger(name) for name in NAMES}
"""The library's target -> its logger."""

logging.getLogger("etkv").addHandler(logging.NullHandler())


def deliver(messages: str) -> None:
    """Pass the messages of ``etkv_log_take`` to the loggers. Their handlers may take locks and call etkv."""
    for told in json.loads(messages):
        logger = logging.getLogger(told["target"].replace("::", "."))
        level = _LEVELS.get(told["level"], logging.DEBUG)
        if logger.isEnabledFor(level):
            record = logger.makeRecord(logger.name, level, "(etkv)", 0, told["message"], (), None)
            record.created, record.msecs = told["time"], told["time"] % 1 * 1000
            logger.handle(record)


def wanted() -> str:
    """Return the filter, as in ``log.h``, for the levels of the loggers; "" if no handler accepts a record."""
    asked = ((target, _level(logger)) for target, logger in _LOGGERS.items())
    return ",".join(f"{target}={level}" for target, level in asked if level is not None)


def _level(logger: logging.Logger) -> str | None:
    if not _has_handler(logger):
        return None
    least = max(logger.getEffectiveLevel(), logger.manager.disable + 1)
    return next((name for level, name in _FILTERS if least <= level), None)


def _has_handler(logger: logging.Logger | None) -> bool:
    """Return whether a handler receives the records of the logger."""
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
