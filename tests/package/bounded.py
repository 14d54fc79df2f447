"""Runs a command, and whatever it starts, for so many seconds at most: ``bounded.py SECONDS COMMAND…``.

The command begins with Ctrl-C as a program has it that a person starts, also where this one is to ignore it, as a
shell's background jobs are.
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
"""The exit status of a command that was ended, as timeout(1) has it."""


def run(words: Sequence[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` returns; after ``seconds`` its TimeoutExpired, and nothing of the command runs on."""
    take_interruptions()
    # In a group of its own, since a build is many processes, and the last of them would hold the output open.
    with subprocess.Popen(words, start_new_session=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            end_group(process)
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads a group, and the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def take_interruptions() -> None:
    """Give what is started from here the default handler of SIGINT: a child ignores what its parent ignores."""
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
