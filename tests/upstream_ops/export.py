"""Exports configurations that are missing or stale."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from typing import Any

from . import cases, workers
from .cases import Case

_WORKER = f"{__package__}.export_worker"

_SECONDS = 900.0
"""The limits of one export, in seconds and bytes."""


def export(jobs: int, wanted: Callable[[str], bool], note: Callable[[str], None]) -> list[Case]:
    """Return the cases whose folder is ``wanted``, in order. Export those that are missing or stale."""
    cases.FOLDER.mkdir(parents=True, exist_ok=True)
    with _alone():
        folders = [folder for folder in _folders() if wanted(folder)]
        stale = {_index(folder): folder for folder in folders if cases.read(folder) is None}
        if stale:
            note(f"exporting {len(stale)} of {len(folders)} configurations")
        finished = 0
        # Failed exports are not kept: the next run tries them again, because memory may have been short.
        ended: dict[str, Case] = {}

        def done(index: int, answer: Any) -> None:
            nonlocal finished
            finished += 1
            if isinstance(answer, workers.Death):
                ended[stale[index]] = Case(stale[index], error=answer.reason)
            if finished % 50 == 0 or finished == len(stale):
                note(f"exported {finished} of {len(stale)}")

        workers.answer(_WORKER, [(index, _SECONDS) for index in stale], done, jobs)
    found = [ended.get(folder) or cases.read(folder) for folder in folders]
    missing = [folder for folder, case in zip(folders, found, strict=True) if case is None]
    if missing:
        raise RuntimeError(f"{cases.FOLDER} lacks configurations that were just exported: {', '.join(missing)}")
    return [case for case in found if case is not None]


def _folders() -> list[str]:
    folders = cases.listed()
    if folders is None:
        told: list[Any] = []
        workers.answer(_WORKER, [(None, _SECONDS)], lambda _, answer: told.append(answer), 1)
        folders = told[0]
        if isinstance(folders, workers.Death):
            raise RuntimeError(f"the wheel's tests cannot be listed: {folders.reason}")
        cases.write_json(cases.FOLDER / cases.INDEX, {"stamp": cases.stamp(), "folders": folders})
    return folders


def _index(folder: str) -> int:
    return int(folder.partition("-")[0])


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock on the exports, because another process would write the same files."""
    with (cases.FOLDER / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
