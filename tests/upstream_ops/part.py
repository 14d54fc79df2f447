"""Reads and writes ``part.json``: the configurations of the option ``--part``, which run in a minute or two.

They contain every operation with each of its outcomes. ``python -m tests.upstream_ops --write-expected`` writes the
file from a run of all configurations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .outcomes import Outcome

FILE = Path(__file__).with_name("part.json")


def choose(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the folder of the first configuration with each operation and outcome."""
    seen: set[tuple[str, str]] = set()
    chosen = []
    for outcome in outcomes:
        # A configuration that cannot be exported has no operations.
        has = {(outcome.kind, operation) for operation in outcome.case.ops or [""]}
        if not has <= seen:
            seen |= has
            chosen.append(outcome.case.folder)
    return chosen


def read() -> list[str]:
    folders: list[str] = json.loads(FILE.read_text(encoding="utf-8"))
    return folders


def write(outcomes: Sequence[Outcome]) -> None:
    """Write the list from a run of all configurations."""
    FILE.write_text(json.dumps(choose(outcomes), indent=1) + "\n", encoding="utf-8")
