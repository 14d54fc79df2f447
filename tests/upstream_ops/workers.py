"""Distributes tasks to worker processes. If a process crashes, hangs or grows too large, it is replaced; only its
task is lost."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .cases import ROOT

LARGE = 3 << 30
"""Resident bytes at which a worker is replaced, since leftovers of earlier tasks fill the memory."""

_START_SECONDS = 300.0


@dataclass(frozen=True)
class Death:
    """The reason why a worker ended in the middle of a task."""

    reason: str


class _Worker:
    """A process that runs a module, which calls :func:`.worker.serve`."""

    def __init__(self, module: str) -> None:
        # One thread per worker, because workers share the cores.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # Tests compare float32 with float32. Without this setting, newer GPUs round the factors of products to TF32.
        environment = {**os.environ, **threads, "MLX_ENABLE_TF32": "0"}
        # Some virtual machines report AMX but cannot run it: there PyTorch's bfloat16 products end the process.
        environment.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=ROOT,
            env=environment,
        )
        self.bytes = 0
        told = self._receive(_START_SECONDS, errors=0)
        if isinstance(told, Death):
            self.end()
            raise RuntimeError(f"a process of {module} does not start: {told.reason}")

    def ask(self, task: Any, seconds: float) -> Any | Death:
        assert self.process.stdin is not None
        # The process writes to the same open file, so the file position changes as soon as the task is sent.
        errors = self.errors.seek(0, os.SEEK_END)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()
        return self._receive(seconds, errors)

    def _receive(self, seconds: float, errors: int) -> Any | Death:
        """Return the next answer, or a death with the last line that the process wrote after ``errors`` bytes."""
        assert self.process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            told = json.loads(line)
            self.bytes = told["bytes"]
            return told["answer"]
        status = self.process.wait()
        if late.is_set():
            return Death(f"no answer within {seconds:g} s")
        self.errors.seek(errors)
        last = [text.strip() for text in self.errors.read().decode(errors="replace").splitlines() if text.strip()][-1:]
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return Death(": ".join([f"the process ended with {name}", *last]))

    @property
    def usable(self) -> bool:
        return self.process.poll() is None and self.bytes < LARGE

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def answer(
    module: str, tasks: Iterable[tuple[Any, float]], done: Callable[[Any, Any | Death], None], processes: int
) -> None:
    """Distribute tasks, each with a time limit in seconds, to ``processes`` workers of ``module``.

    ``done`` is called with a task and its answer or the worker's death, by one thread at a time.
    """
    waiting: queue.SimpleQueue[tuple[Any, float]] = queue.SimpleQueue()
    count = 0
    for task in tasks:
        waiting.put(task)
        count += 1
    told = threading.Lock()
    failures: list[BaseException] = []
    stopped = threading.Event()

    def work() -> None:
        worker = None
        try:
            while not stopped.is_set():
                try:
                    task, seconds = waiting.get_nowait()
                except queue.Empty:
                    return
                if worker is not None and not worker.usable:
                    worker.end()
                    worker = None
                if worker is None:
                    worker = _Worker(module)
                result = worker.ask(task, seconds)
                with told:
                    done(task, result)
        except BaseException as error:
            failures.append(error)
        finally:
            if worker is not None:
                worker.end()

    threads = [threading.Thread(target=work) for _ in range(min(processes, count))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
    if failures:
        raise failures[0]
