"""Exports what is missing or stale."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from typing import Any

from . import cases, workers
from .cases import Case

_SECONDS = 900.0
"""The most that one export may take."""


def export(jobs: int, wanted: Callable[[str], bool], note: Callable[[str], None]) -> list[Case]:
    """Return the cases whose folder is ``wanted``, in order. Export those that are missing or stale."""
    cases.FOLDER.mkdir(parents=True, exist_ok=True)
    with _alone():
        folders = [folder for folder in _folders() if wanted(folder)]
        stale = {_index(folder): folder for folder in folders if cases.read(folder) is None}
        if stale:
            note(f"exporting {len(stale)} of {len(folders)} configurations")
        finished = 0

        def done(index: int, answer: Any) -> None:
            nonlocal finished
            finished += 1
            if isinstance(answer, workers.Death):
                _give_up(stale[index], answer.reason)
            if finished % 50 == 0 or finished == len(stale):
                note(f"exported {finished} of {len(stale)}")

        workers.answer("export_worker", [(index, _SECONDS) for index in stale], done, jobs)
    found = [cases.read(folder) for folder in folders]
    return [case for case in found if case is not None]


def _folders() -> list[str]:
    folders = cases.listed()
    if folders is None:
        told: list[Any] = []
        workers.answer("export_worker", [(None, _SECONDS)], lambda _, answer: told.append(answer), 1)
        folders = told[0]
        if isinstance(folders, workers.Death):
            raise RuntimeError(f"the wheel's tests cannot be listed: {folders.reason}")
        cases.write_json(cases.FOLDER / cases.INDEX, {"stamp": cases.stamp(), "folders": folders})
    return folders


def _index(folder: str) -> int:
    return int(folder.partition("-")[0])


def _give_up(folder: str, reason: str) -> None:
    """Record an export that ended its process."""
    Case(
        folder=folder,
        test="",
        rtol=0,
        atol=0,
        timeout=0,
        comparable=True,
        kv_cache=None,
        expected_segments=0,
        expected_nodes=None,
        error=reason,
        stamp=cases.stamp(),
    ).write()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock on the exports: another process would write the same files."""
    with (cases.FOLDER / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
