"""Opens and runs programs from Python: ``damaged_programs.py SECONDS``.

Each line of stdin is the path of a program. The outcome is written before the next line is read: 0 if the program ran,
1 if it was refused, 2 for an error that is not etkv's, or the negative number of the signal that ended the process.
Errors go to stderr. A child process runs many programs. When it ends, the next child continues. All children are forked
from this process, which has imported all packages.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from pathlib import Path

import etkv
import etkv.metadata
from etkv import _mlx_serialization

RAN, REFUSED, RAISED = 0, 1, 2
OVER, MORE, ERROR = 0, 1, 2
MEMORY = 12 << 30
"""The limit of the address space, in bytes, so that an impossible allocation fails at once."""

PROGRAMS = 100
"""Maximum number of programs in one process, so that outcomes depend little on earlier programs."""

LAYERS = (etkv.LayerConfig(2, 16), etkv.LayerConfig(2, 16))


def use(path: Path, index: int) -> int:
    """Use a program as a host does: load it with a session, run a prompt and a step, and read its metadata.

    Reading metadata takes longest, so it is done for one in ten programs.
    """
    status = RAN
    for attempt in (run, etkv.read_kv_cache_metadata)[: 2 if index % 10 == 0 else 1]:
        try:
            attempt(path)
        except etkv.EtkvError as error:
            print(f"{attempt.__name__}: {error}", file=sys.stderr)
            status = REFUSED
        except BaseException:
            traceback.print_exc()
            return RAISED
    return status


def run(path: Path) -> None:
    config = etkv.CacheConfig(LAYERS, 16, k_format="f32", v_format="f32")
    with etkv.DecodeSession(config) as session, etkv.load(path, session, logits="last") as program:
        program.forward([60, 61, 62], [0, 1, 2])
        program.forward([63], [3])


def take(seconds: int) -> bool:
    """Run programs to the end of stdin, or to the limit. Return whether stdin has ended."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for index in range(PROGRAMS):
        # A read returns one line, because the next line is only written after the answer to this one.
        path = os.read(0, 4096).decode().rstrip("\n")
        if not path:
            return True
        # The alarm ends the process even within native code.
        signal.alarm(seconds)
        status = use(Path(path), index)
        signal.alarm(0)
        sys.stderr.flush()
        report(status)
    return False


def report(status: int) -> None:
    os.write(REPORTS, f"{status}\n".encode())


def main(seconds: str) -> None:
    _mlx_serialization.ensure_available()
    etkv.register_backend()
    etkv.DecodeSession(etkv.CacheConfig(LAYERS, 16)).close()
    over = False
    while not over:
        child = os.fork()
        if child == 0:
            status = ERROR
            try:
                status = OVER if take(int(seconds)) else MORE
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended < 0:
            report(ended)
        over = ended in (OVER, ERROR)


if __name__ == "__main__":
    # File descriptor 1 is for outcomes only. Everything else, such as the output of tools, goes to stderr.
    REPORTS = os.dup(1)
    os.dup2(2, 1)
    main(*sys.argv[1:])
