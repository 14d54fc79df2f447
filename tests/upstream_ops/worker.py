"""The loop of a worker process: reads tasks from stdin, one JSON line each, and answers each with a JSON line.

Answers go to the original stdout. Anything that libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

MEMORY = 8 << 30
"""The maximum bytes of data of a worker: a test that needs more fails without harm to the machine."""


def serve(prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """Answer tasks with the function that ``prepare`` returns, until stdin ends.

    An answer is ``{"answer": ..., "bytes": resident}``. The first answer is for no task: it says that the worker is
    ready.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    answer = prepare()

    def send(value: Any) -> None:
        print(json.dumps({"answer": value, "bytes": _resident()}), file=answers, flush=True)

    send(None)
    for line in sys.stdin:
        send(answer(json.loads(line)))


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
