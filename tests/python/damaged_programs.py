"""Opens and runs programs from Python: ``damaged_programs.py SECONDS``.

Reads the path of a program from each line of stdin, and writes for each what became of it before it reads the next: 0
where it ran, 1 where it was refused, 2 where an error was not etkv's, the number of a signal, less than 0, that ended
the process. Errors are told on stderr. A process takes many programs, and another takes over where one ends; all are
forked from this one, which has made the imports.
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
"""Bytes of address space, at most: an allocation that cannot be is to fail, not to be waited for."""

PROGRAMS = 100
"""The most that one process takes, so that little depends on what came before."""

LAYERS = (etkv.LayerConfig(2, 16), etkv.LayerConfig(2, 16))


def use(path: Path, index: int) -> int:
    """What a host does with a program: loads it with a session, runs a prompt and a step, asks it for its facts.

    The facts, which take longest, are those of one in ten.
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
    """Take programs until there are no more, or many are done; whether there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for index in range(PROGRAMS):
        # Of a line each: there is none before the one before is answered.
        path = os.read(0, 4096).decode().rstrip("\n")
        if not path:
            return True
        # Ends the process also where Python has no say.
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
    # Tools that are started write to stdout what is an error here.
    REPORTS = os.dup(1)
    os.dup2(2, 1)
    main(*sys.argv[1:])
