"""Runs a command with a time limit: ``bounded.py SECONDS COMMAND…``. At the limit, ends it with its child processes.

Ctrl-C ends the command even if this process ignores Ctrl-C, as background jobs of a shell do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

TOO_LONG = 124
"""The exit status at the time limit, the same as that of timeout(1)."""


def run(words: Sequence[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, and return the same as ``subprocess.run``.

    After ``seconds``, or on another error, ends the command and its child processes. Raises
    :class:`subprocess.TimeoutExpired` after ``seconds``.
    """
    take_interruptions()
    # The command runs in a new process group: a build has many processes, and any that remains keeps the output open.
    with subprocess.Popen(words, start_new_session=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            end_group(process)
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process group and its leader."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def take_interruptions() -> None:
    """Ensure that child processes handle SIGINT by default: a child ignores the signals that its parent ignores."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(seconds: str, *words: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        status = run(words, float(seconds)).returncode
    except subprocess.TimeoutExpired:
        print(f"{' '.join(words)}: ended after {seconds} s", file=sys.stderr)
        return TOO_LONG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
