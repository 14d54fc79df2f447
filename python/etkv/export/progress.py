"""Progress of a long export: each step by name, with the seconds since the start."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from typing import TextIO

_HEARTBEAT_SECONDS = 10.0


class Progress:
    """Prints steps to ``stream``. A long step is repeated, so that silence means a hang.

    ``stream=None`` prints nothing.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._start = time.monotonic()

    def note(self, text: str) -> None:
        """Print one line."""
        if self._stream is not None:
            seconds = time.monotonic() - self._start
            print(f"[{seconds:6.1f} s] {text}", file=self._stream, flush=True)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Announce a step, and repeat it every ten seconds while the body runs."""
        self.note(text)
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(text, done), daemon=True)
        if self._stream is not None:
            ticker.start()
        try:
            yield
        finally:
            done.set()
            if ticker.is_alive():
                ticker.join()

    def _tick(self, text: str, done: threading.Event) -> None:
        while not done.wait(_HEARTBEAT_SECONDS):
            self.note(f"... {text}")


@contextlib.contextmanager
def third_party_noise(allowed: bool) -> Iterator[None]:
    """Keep warnings, log lines, prints and progress bars of torch, transformers and ExecuTorch off the terminal.

    Process-wide while it is open, hence for the command only; to be opened before those packages are imported. Errors
    are still logged.
    """
    if allowed:
        yield
        return
    for switch in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(switch, "1")
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
