"""Damage anywhere in a program, including the parts that ExecuTorch reads: the program runs or is refused, and does not
crash the process.

Each damaged copy runs in its own process. ``ETKV_DAMAGED_COPIES`` is the number of copies for each runner.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import damage
import reference
from reference import EVERYTHING, FORWARD, Program, Variant

COPIES = int(os.environ.get("ETKV_DAMAGED_COPIES", "120"))
SECONDS = 60
"""Seconds after which a process counts as hung."""
RAN, REFUSED, HANGS = 0, 1, "hangs"

EXECUTORCH = (
    r"In function get_value\(\), assert failed \(i < n_value_\)",
    r"std::bad_alloc",
    r"pybind11::error_already_set'\s+what\(\):  UnicodeDecodeError",
)
"""The known ways in which ExecuTorch itself crashes a process, see docs/programs.md: an assertion, an exception from
its functions, and a log line of its Python module that is not UTF-8."""

PROGRAMS = [Variant("tiny-llama"), Variant("tiny-llama", "f32", "4w")]
PROGRAMS += [Variant("tiny-qwen3", "bf16", "4w")] if EVERYTHING else []


@pytest.fixture(scope="module")
def programs() -> dict[Variant, Program]:
    return reference.programs(PROGRAMS)


@contextlib.contextmanager
def judged(image: bytes, what: str) -> Iterator[list[tuple[damage.Copy, int | str, str]]]:
    """Yield a list for the outcomes of copies. At the end, check that every crash is a known one."""
    found: list[tuple[damage.Copy, int | str, str]] = []
    yield found
    assert len(found) == COPIES
    ours = []
    for copy, status, said in found:
        own = any(re.search(pattern, said) for pattern in EXECUTORCH)
        if status not in (RAN, REFUSED) and not (own and status != HANGS):
            ours.append(f"{copy}: {status}\n{said[-1000:]}")
    assert not ours, f"{len(ours)} of {COPIES} copies\n" + "\n".join(ours[:20])
    # The test is only meaningful if some damage is refused and some is not.
    count = collections.Counter((copy.region, status) for copy, status, _ in found)
    assert all(count[region, REFUSED] for region in damage.REGIONS), count
    assert count["tables", RAN] and count["payload", RAN] and count["segments", RAN], count
    told = ", ".join(f"{region} {status}: {n}" for (region, status), n in sorted(count.items(), key=str))
    reference.note(f"{what}, {COPIES} damaged copies: {told}")


@pytest.mark.parametrize("variant", PROGRAMS, ids=str)
def test_in_the_runner(programs, tmp_path, variant):
    image = programs[variant].path.read_bytes()
    ids = tmp_path / "ids.txt"
    ids.write_text("60 61 62")
    # Show ExecuTorch's own messages too. The limit of memory makes an impossible allocation fail at once.
    limited = ["sh", "-c", 'ulimit -c 0; ulimit -v 8000000; exec "$@"', "sh"]

    def use(number: int) -> tuple[damage.Copy, int | str, str]:
        copy, file = damage.copy(image, number), tmp_path / f"{number}.pte"
        file.write_bytes(copy.of(image))
        words = [*limited, FORWARD, "--model", file, "--ids-file", ids, "--decode", 1]
        try:
            environment = {**os.environ, "ETKV_VERBOSE": "1"}
            done = reference.run(words, timeout=SECONDS, errors="replace", env=environment)
            return copy, done.returncode, done.stderr
        except subprocess.TimeoutExpired:
            return copy, HANGS, ""
        finally:
            file.unlink()

    with judged(image, f"etkv_forward on {variant}") as found, ThreadPoolExecutor(2) as pool:
        found += pool.map(use, range(COPIES))


def test_in_python(programs, tmp_path):
    image = programs[PROGRAMS[0]].path.read_bytes()

    def use(numbers: range) -> list[tuple[damage.Copy, int | str, str]]:
        file, log = tmp_path / f"{numbers[0]}.pte", tmp_path / f"{numbers[0]}.log"
        words = [sys.executable, Path(__file__).with_name("damaged_programs.py"), SECONDS]
        found = []
        with (
            log.open("ab") as errors,
            reference.started(words, stdin=-1, stdout=-1, stderr=errors, text=True) as process,
        ):
            for number in numbers:
                copy = damage.copy(image, number)
                file.write_bytes(copy.of(image))
                errors.truncate(0)
                print(file, file=process.stdin, flush=True)
                told, said = process.stdout.readline(), log.read_text(errors="replace")
                assert told, f"{copy} ended the process that makes the others: {said[-2000:]}"
                found.append((copy, HANGS if int(told) == -signal.SIGALRM else int(told), said))
        return found

    with judged(image, "Python") as found, ThreadPoolExecutor(2) as pool:
        for half in pool.map(use, (range(0, COPIES, 2), range(1, COPIES, 2))):
            found += half


def test_the_known_ways_are_listed():
    """The page quotes each message."""
    page = (reference.ROOT / "docs" / "programs.md").read_text()
    for words in ("get_value", "std::bad_alloc", "UnicodeDecodeError"):
        assert words in page
