"""Ends exports with signals, for :mod:`test_export_staging`.

``export_signals.py MODEL FOLDER`` exports ``MODEL`` to folders in ``FOLDER``, and prints as JSON what is left in them.
Each export runs in a process that is forked from this one, and shares its imports.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import family_sweep
from etkv.export import __main__ as command
from etkv.export import companions
from etkv.export.progress import Progress, third_party_noise

KILLED = ("reading the weights", "writing the weights", "serializing", "comparing")
"""The steps at whose begin an export is killed."""

ENDED = {
    "reading the weights": signal.SIGINT,
    "serializing": signal.SIGTERM,
    "comparing": signal.SIGHUP,
}
"""The step at whose begin an export gets a signal -> the signal."""

PUBLISHING = "publishing"


class Signalled(Progress):
    """Sends a signal to its own process at the begin of a step."""

    def __init__(self, step: str | None, number: int) -> None:
        super().__init__()
        self._step, self._number = step, number

    def note(self, text: str) -> None:
        if self._step is not None and text.startswith(self._step):
            os.kill(os.getpid(), self._number)


def start(model: Path, folder: Path, step: str | None = None, number: int = 0) -> int:
    """Start an export that sends signal ``number`` to itself at the begin of ``step``. Return its process."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        publish = companions.publish

        def interrupted(*arguments):
            # Files of the new export and files of an earlier one must not be mixed.
            os.kill(os.getpid(), number)
            publish(*arguments)

        if step == PUBLISHING:
            companions.publish = interrupted
        arguments = ["--model", model, "--output", folder / "model.pte", "--keep-hf", folder / "hf", "--layers", "1"]
        with mock.patch.object(command, "Progress", lambda stream: Signalled(step, number)):
            code = command.main([*map(str, arguments), "--backend", "cpu"])
    finally:
        os._exit(code)


def end(child: int) -> int:
    """Wait for an export. Return its exit status, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def left(folder: Path) -> list[str]:
    """Return the files in ``folder``. A temporary folder of an export counts as one file with the name of its kind."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if parts[-1].startswith(".etkv"):
            found.append("/".join((*parts[:-1], ".temporary")))
        elif path.is_file() and not any(part.startswith(".etkv") for part in parts):
            found.append("/".join(parts))
    return sorted(found)


def main(model: Path, folder: Path) -> None:
    """Run the exports, and print their statuses and what they left."""
    # Under nohup this process would ignore the signal, and an export does not change that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with third_party_noise(allowed=False):
        family_sweep.prepare()
    found = {}
    killed = folder / "killed"
    for step in KILLED:
        status = end(start(model, killed, step, signal.SIGKILL))
        found[f"killed {step}"] = [status, *left(killed)]
    # The first living export removes what the dead exports left. The second export removes nothing of the first.
    living = start(model, killed, "serializing", signal.SIGSTOP)
    os.waitpid(living, os.WUNTRACED)
    found["alive"] = left(killed)
    found["beside"] = [end(start(model, killed)), *left(killed)]
    os.kill(living, signal.SIGCONT)
    found["continued"] = [end(living), *left(killed)]
    for step, number in ENDED.items():
        found[f"ended {step}"] = [
            end(start(model, folder / "ended" / "within", step, number)),
            (folder / "ended").exists(),
        ]
    before = (killed / "model.pte").stat().st_ino
    status = end(start(model, killed, PUBLISHING, signal.SIGTERM))
    found[PUBLISHING] = [status, (killed / "model.pte").stat().st_ino != before, *left(killed)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
