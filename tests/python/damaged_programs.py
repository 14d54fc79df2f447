"""Opens and runs programs from Python, each in a process of its own: ``damaged_programs.py SECONDS``.

Reads the path of a program from each line of stdin, and writes for each what became of its process: 0 where it ran, 1
where it was refused, the number of a signal, less than 0, that ended it. Errors are told on stderr. Imports are made
once, and every process is forked from there.
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
MEMORY = 24 << 30
"""Bytes of address space, at most: an allocation that cannot be is to fail, not to be waited for."""

LAYERS = (etkv.LayerConfig(2, 16), etkv.LayerConfig(2, 16))


def use(path: Path, index: int) -> int:
    """What a host does with a program: loads it with a session, runs a prompt and a step, asks it for its facts.

    The facts, which take longest, are those of one in four.
    """
    status = RAN
    for attempt in (run, etkv.read_kv_cache_metadata)[: 2 if index % 4 == 0 else 1]:
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
    config = etkv.CacheConfig(LAYERS, 16, "f32", "f32")
    with etkv.DecodeSession(config) as session, etkv.load(path, session, logits="last") as program:
        program.forward([60, 61, 62], [0, 1, 2])
        program.forward([63], [3])


def main(seconds: str) -> None:
    # Tools that are started below write to stdout what is an error here.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _mlx_serialization.ensure_available()
    etkv.register_backend()
    etkv.DecodeSession(etkv.CacheConfig(LAYERS, 16)).close()
    for index, line in enumerate(sys.stdin):
        child = os.fork()
        if child == 0:
            status = RAISED
            try:
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                # Ends the process also where Python has no say.
                signal.alarm(int(seconds))
                status = use(Path(line.rstrip("\n")), index)
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), file=reports, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
