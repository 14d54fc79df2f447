"""The log of the native library, as records of :mod:`logging`.

The library logs in the middle of a step, while it holds the locks of its caches and of MLX. ExecuTorch's Python module
waits for MLX while it holds Python's lock, so a callback in Python could deadlock. Instead the library stores the
messages, and the Python call that caused them passes them to :mod:`logging` before it returns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

NAMES = ("etkv.core", "etkv.program", "etkv.file", "etkv.api")
"""Names of the loggers: the library's targets, with ``.`` for ``::``."""

TRACE = 5
"""The level of messages about single layers of a step. :mod:`logging` has no name for this level."""

_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG, 5: TRACE}
"""The level in ``watch.h`` -> the level of :mod:`logging`."""

_FILTERS = (
    (TRACE, "trace"),
    (logging.DEBUG, "debug"),
    (logging.INFO, "info"),
    (logging.WARNING, "warn"),
    (logging.ERROR, "error"),
)
"""Each level of :mod:`logging`, from the lowest, and the library's filter for a logger that accepts the level."""

KEPT = 10_000
"""Maximum number of messages that the library keeps. It drops older messages."""

_LOGGERS = {name.replace(".", "::"): logging.getLogger(name) for name in NAMES}
"""The library's target -> its logger."""

_EXECUTORCH = logging.getLogger("etkv.executorch")
"""The logger of lines that ExecuTorch writes while a program is loaded."""

_LINE = re.compile(r"\[\w+\.(cpp|h|hpp):\d+\] ")
"""The beginning of a log line of ExecuTorch."""

_WORDS = {word: level for level, word in _FILTERS} | {"off": logging.CRITICAL + 1}
"""A level in the variable ``ETKV_LOG`` -> the level of :mod:`logging`."""


def follow_environment(setting: str) -> None:
    """Log to standard error. ``setting`` is the value of ``ETKV_LOG``: a level, or targets with a level each.

    Other values cause a warning.
    """
    if not setting:
        return
    lines = logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)5s %(name)s: %(message)s"))
    logging.getLogger("etkv").addHandler(lines)
    for part in setting.split(","):
        target, _, word = part.strip().rpartition("=")
        level, logger = _WORDS.get(word.lower()), logging.getLogger(target.replace("::", ".") or "etkv")
        if level is None or logger.name.split(".")[0] != "etkv":
            logging.getLogger("etkv").warning(
                "ETKV_LOG has %r; expected error, warn, info, debug, trace or off, or a target with a level, as in "
                "etkv::core=debug",
                part,
            )
        else:
            logger.setLevel(level)


logging.getLogger("etkv").addHandler(logging.NullHandler())
follow_environment(os.environ.get("ETKV_LOG", ""))
# When torchao is imported, torch warns about code of torchao. A user of etkv cannot change that code.
logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: "register_constant() on Enum subclasses" not in record.getMessage()
)


def deliver(messages: str) -> None:
    """Pass the messages of ``etkv_log_take`` to the loggers. The loggers' handlers may take locks and call etkv."""
    for message in json.loads(messages):
        logger = logging.getLogger(message["target"].replace("::", "."))
        level = _LEVELS.get(message["level"], logging.DEBUG)
        if logger.isEnabledFor(level):
            record = logger.makeRecord(logger.name, level, "(etkv)", 0, message["message"], (), None)
            record.created, record.msecs = message["time"], message["time"] % 1 * 1000
            logger.handle(record)


@contextlib.contextmanager
def executorchs_lines() -> Iterator[None]:
    """Send the lines that ExecuTorch writes to ``sys.stderr`` within the block to the logger ``etkv.executorch``.

    ExecuTorch's lines begin with a source file and a line number. Other lines are written unchanged.
    """
    before = sys.stderr
    stream = _ExecuTorchLines(before)
    sys.stderr = stream
    try:
        yield
    finally:
        if sys.stderr is stream:
            sys.stderr = before
        stream.flush_last()


class _ExecuTorchLines:
    """A stream that logs ExecuTorch's lines and writes other lines to ``shown``. It has the attributes of ``shown``."""

    def __init__(self, shown: TextIO | None) -> None:
        self._shown = shown
        self._last = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)

    def write(self, text: str) -> int:
        *lines, self._last = (self._last + text).split("\n")
        for line in lines:
            if _LINE.match(line):
                _EXECUTORCH.debug("%s", line)
            elif self._shown is not None:
                self._shown.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        if self._shown is not None:
            self._shown.flush()

    def flush_last(self) -> None:
        """Write the last line, which has no newline."""
        if self._last:
            self.write("\n") if _LINE.match(self._last) else self._show_last()

    def _show_last(self) -> None:
        text, self._last = self._last, ""
        if self._shown is not None:
            self._shown.write(text)


def wanted() -> str:
    """Return the filter, as in ``watch.h``, for the levels of the loggers; "" if no handler accepts records."""
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
