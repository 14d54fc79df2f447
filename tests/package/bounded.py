"""Runs a command and its child processes for a number of seconds at most: ``bounded.py SECONDS COMMAND…``.

Ctrl-C ends the command, also if this process ignores Ctrl-C, as a shell's background jobs do.
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
"""The exit status if the command was ended after its time, as for timeout(1)."""


def run(words: Sequence[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, and return what ``subprocess.run`` does.

    After ``seconds``, or on another error, ends the command and its child processes. Raises
    :class:`subprocess.TimeoutExpired` after ``seconds``.
    """
    take_interruptions()
    # In its own process group: a build has many processes, and any that is left keeps the output open.
    with subprocess.Popen(words, start_new_session=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            end_group(process)
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End the leader of a process group and the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def take_interruptions() -> None:
    """Make child processes start with the default handler of SIGINT: a child ignores the signals its parent ignores."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(seconds: str, *words: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        status = run(words, float(seconds)).returncode
    except subprocess.TimeoutExpired:
        print(f"{' '.join(words)}: ended, it took more than {seconds} s", file=sys.stderr)
        return TOO_LONG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
