"""Prints the progress of a long export: each step by name, with the seconds since the start."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

_HEARTBEAT_SECONDS = 10.0

_LINE_SECONDS = 1.0
"""Minimum time between two lines about the progress of a step."""


class Step:
    """A running step, which prints the layers that it reaches."""

    def __init__(self, note: Callable[[str], None], text: str) -> None:
        self._note, self._text = note, text
        self._layer, self._printed = "", time.monotonic()

    def at(self, module: str) -> None:
        """Print the layer of the module with this name, if the layer is new and a second has passed."""
        found = re.search(r"(?:^|\.)(layers|h|blocks)\.(\d+)\.", module)
        if found is None or found[2] == self._layer or time.monotonic() - self._printed < _LINE_SECONDS:
            return
        self._layer, self._printed = found[2], time.monotonic()
        self._note(f"... {self._text}: layer {found[2]}")


class Progress:
    """Prints steps to ``stream``; ``None`` prints nothing.

    A long step is printed repeatedly, so a process without output has hung.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._start = time.monotonic()

    def note(self, text: str) -> None:
        """Print ``text`` as one line, after the seconds since the start."""
        if self._stream is not None:
            seconds = time.monotonic() - self._start
            print(f"[{seconds:6.1f} s] {text}", file=self._stream, flush=True)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[Step]:
        """Print the name of a step, and print it again every ten seconds while the body runs."""
        self.note(text)
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(text, done), daemon=True)
        if self._stream is not None:
            ticker.start()
        try:
            yield Step(self.note, text)
        finally:
            done.set()
            if ticker.is_alive():
                ticker.join()

    def _tick(self, text: str, done: threading.Event) -> None:
        while not done.wait(_HEARTBEAT_SECONDS):
            self.note(f"... {text}")


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Hide warnings and the log lines of warnings of the whole process. Errors are still logged."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


@contextlib.contextmanager
def third_party_noise(allowed: bool) -> Iterator[None]:
    """Hide warnings, log lines, prints and progress bars of torch, transformers and ExecuTorch unless ``allowed``.

    It affects the whole process, so it is only for commands. Enter it before these packages are imported.
    """
    if allowed:
        yield
        return
    for switch in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(switch, "1")
    with without_warnings(), contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def native_noise(allowed: bool) -> Iterator[TextIO]:
    """Hide the output of libraries to the process's standard error unless ``allowed``. Yield a stream that still
    reaches standard error.

    For example, ExecuTorch writes there which files about the processor it reads. Like :func:`third_party_noise`,
    this is only for commands.
    """
    shown = sys.stderr
    if allowed or shown is not sys.__stderr__:
        yield shown
        return
    number = 2
    with os.fdopen(os.dup(number), "w", buffering=1) as stream, Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), number)
        # If a library aborts the process, its last message is hidden, but the traceback still reaches the user.
        faulthandler.enable(stream)
        try:
            yield stream
        finally:
            faulthandler.disable()
            os.dup2(stream.fileno(), number)
