"""The command ``python -m tests.upstream_ops``.

Exits with 0 if the outcome of every configuration is that of ``expected.json``, otherwise with 1, and with 2 for a
wrong option.
"""

from __future__ import annotations

import argparse
import re
import sys
import time

from . import expected, export, outcomes, part, table


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream_ops",
        description="Runs ExecuTorch's own tests of MLX operations through the delegate, and compares the outcomes "
        "with tests/upstream_ops/expected.json. A run of all of them writes build/upstream_ops/report.json.",
    )
    parser.add_argument("--only", metavar="PATTERN", help="configurations whose folder matches this regular expression")
    parser.add_argument("--op", metavar="NAME", help="configurations with a node of this type, such as Softmax")
    parser.add_argument("--part", action="store_true", help="one configuration for each operation")
    parser.add_argument("--export-only", action="store_true", help="export missing or stale ones, and run nothing")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="number of processes (2)")
    parser.add_argument("--passes", choices=("default", "none", "gpu"), default="default", help="passes over programs")
    parser.add_argument(
        "--write-expected", action="store_true", help="write expected.json, part.json and docs/ops.md from this run"
    )
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    try:
        pattern = re.compile(options.only or "")
    except re.error as error:
        parser.error(f"--only needs a regular expression, got {options.only!r}: {error}")
    everything = not (options.only or options.op or options.part)
    if options.write_expected and not (everything and options.passes == "default"):
        parser.error("--write-expected needs a run of all configurations with the default passes")

    begin = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    chosen = set(part.read()) if options.part else None

    def wanted(folder: str) -> bool:
        return pattern.search(folder) is not None and (chosen is None or folder in chosen)

    found = export.export(options.jobs, wanted, note)
    if options.export_only:
        note(f"{len(found)} configurations are exported, {sum(case.error is not None for case in found)} cannot be")
        return 0
    if options.op:
        found = [case for case in found if options.op.removesuffix("Node") in case.ops]
    if not found:
        note("no configuration matches")
        return 2
    note(f"running {len(found)} configurations")
    ended = outcomes.run(found, options.passes, options.jobs)
    note("done")
    print(outcomes.text(ended))
    if everything:
        outcomes.write(ended, options.passes)
    if options.write_expected:
        expected.write(ended)
        part.write(ended)
        table.write(ended)
    different = expected.differences(ended, everything=everything)
    if different:
        print("\ndifferent from tests/upstream_ops/expected.json:", *different, sep="\n  ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
