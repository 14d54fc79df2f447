"""The command ``python -m tests.upstream_ops.damage``: runs damaged programs of every operation in separate
processes.

Exports missing programs. Exits with 0 if every damaged program ran or was refused. If one crashed, hung or used
unbounded memory, prints its seed and damaged payload and exits with 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

from . import cases, payloads

PROGRAMS = cases.FOLDER.parent / "damage" / "programs.bin"

ENOUGH = 1000
"""A campaign of at least this number of programs must run some of them and refuse others."""


def run(count: int, *, first: int, seed: int | None, jobs: int) -> str | None:
    """Run the campaign: ``count`` seeds from ``first`` on, or only ``seed``. Print its output.

    Return what is wrong, or None. A campaign proves little if it refuses nearly all programs, or none.
    """
    payloads.gather(PROGRAMS)
    environment = {
        **os.environ,
        "ETKV_DAMAGE_PROGRAMS": str(PROGRAMS),
        "ETKV_RUNS": str(count),
        "ETKV_FIRST_SEED": str(first),
        "ETKV_JOBS": str(jobs),
    }
    environment.pop("ETKV_SEED", None)
    if seed is not None:
        environment["ETKV_SEED"] = str(seed)
    # The same packages as in `make test-rust`: with others Cargo would build dependencies again.
    packages = ["--workspace", "--exclude", "etkv-benches"]
    words = ["cargo", "test", "--quiet", "--release", "--locked", *packages, "--test", "damaged_programs"]
    ended = subprocess.run(words, cwd=cases.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(ended.stdout, end="")
    if ended.returncode:
        return "the campaign failed"
    told = re.search(rf"{count} damaged programs, .*", ended.stdout)
    if seed is not None or count < ENOUGH:
        return None
    for outcome in (r"(\d+) ran", r"(\d+) were refused when loaded", r"(\d+) when run"):
        found = re.search(outcome, told[0]) if told else None
        if found is None or int(found[1]) <= count // 20:
            return f"expected {outcome!r} with a number above {count // 20}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream_ops.damage", description=__doc__)
    parser.add_argument("--programs", type=int, default=100_000, metavar="N", help="number of programs (100000)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first seed (1)")
    parser.add_argument("--seed", type=int, metavar="SEED", help="run this seed alone, and print what was damaged")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="worker processes (2)")
    options = parser.parse_args()
    if min(options.programs, options.jobs) < 1:
        parser.error("--programs and --jobs take whole numbers of at least 1")
    problem = run(options.programs, first=options.first, seed=options.seed, jobs=options.jobs)
    if problem is not None:
        print(problem, file=sys.stderr)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
