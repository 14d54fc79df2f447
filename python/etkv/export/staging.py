"""Temporary folders of an export beside its results.

A folder is removed at the end of the export, even after an interrupt. If the process is killed, the next export into
the same place removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO, TypeVar

_PREFIX = ".etkv-export-"

_LOCK = "lock"
"""The file that a living export keeps locked. The system releases the lock when the process ends, however it ends."""

_FILES = "files"

_PATIENCE = 30.0
"""Seconds to wait for another export that moves its files. It moves them in milliseconds."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_Self = TypeVar("_Self", bound="TemporaryFolder")


class TemporaryFolder:
    """A temporary folder ``path`` inside ``folder``, which is created if it does not exist.

    It is a context manager: leaving it removes the temporary folder, and the created folders if they are still empty.
    Raises :class:`OSError` if the folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with deferred_interrupts():
            self._made = _missing(folder)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._root, self._lock = _locked(folder)
            except BaseException:
                self._remove_made()
                raise
            self.path = (self._root / _FILES).resolve()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        with deferred_interrupts():
            with contextlib.suppress(OSError):
                _remove(self._root)
            self._lock.close()
            self._remove_made()

    def _remove_made(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _missing(folder: Path) -> list[Path]:
    """Return ``folder`` and its parents as far as they do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not os.path.lexists(path)]


def _locked(folder: Path) -> tuple[Path, TextIO]:
    """Create a temporary folder with a locked file. Return both."""
    while True:
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        try:
            lock = (root / _LOCK).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                # Without a file that they can lock, other exports leave the folder in place.
                (root / _LOCK).unlink()
            (root / _FILES).mkdir()
            return root, lock
        except FileNotFoundError:
            # Before the file was locked, another export took the folder for the folder of a dead export.
            continue
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove temporary folders in ``folder`` whose export is dead, and return their paths."""
    return [root for root in sorted(folder.glob(f"{_PREFIX}*")) if _remove_leftover(root)]


def _remove_leftover(root: Path) -> bool:
    """Remove ``root`` unless its export is alive. Return whether it was removed."""
    if root.is_symlink():
        return False
    with contextlib.suppress(OSError):
        try:
            lock = (root / _LOCK).open("r+")
        except FileNotFoundError:
            # The export was killed before it created the file. If it is about to create the file, it tries again.
            root.rmdir()
            return True
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _remove(root)
    return False


def _remove(root: Path) -> bool:
    """Remove a temporary folder. Return whether it is gone.

    The lock goes last: without it, a folder that is not empty would stay forever.
    """
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)
    if not (root / _FILES).exists():
        shutil.rmtree(root, ignore_errors=True)
    return not root.exists()


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other export is in such a block for ``folder``, so that files of two exports are not mixed. Do not
    wait longer than :data:`_PATIENCE`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems have no locks for folders.
        with contextlib.suppress(OSError):
            _lock_patiently(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock_patiently(descriptor: int) -> None:
    """Lock a file, or give up after :data:`_PATIENCE`: not only exports lock folders, and some never unlock them."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Within the block, hold back signals that would end the process. Deliver them after the block.

    Does nothing on threads other than the main thread: they get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[signal.Signals] = []

    def defer(number: int, frame: FrameType | None) -> None:
        arrived.append(signal.Signals(number))

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # None is a handler that Python did not install and could not restore.
    handlers = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)
