"""Reads and writes ``expected.json``: the configurations that are expected not to pass, with reasons.

=========================  =====================================================================================
``missing operations``     operations that the delegate lacks: configurations with one are expected to be refused
``failed``, ``refused``,   reason -> folders of the configurations with this outcome; has precedence
``not exported``
=========================  =====================================================================================

Every other configuration is expected to pass, or just to run if its test compares nothing. ``python -m
tests.upstream_ops --write-expected`` updates the file from a run, and keeps its reasons.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import Case
from .outcomes import Outcome

FILE = Path(__file__).with_name("expected.json")

_MISSING = "missing operations"
_LISTED = ("failed", "refused", "not exported")


def differences(outcomes: Sequence[Outcome], *, everything: bool) -> list[str]:
    """Return a line for each configuration with an unexpected outcome.

    ``everything`` means that these are all configurations. If so, it is also a difference if an operation is listed
    as missing and no program is refused for it.
    """
    known = _read()
    listed = _listed(known)
    lines = []
    for outcome in outcomes:
        wanted = _expected(outcome.case, known, listed)
        if outcome.kind != wanted:
            because = f": {outcome.reason}" if outcome.reason else ""
            lines.append(f"{outcome.case.folder}: expected {wanted}, {outcome.kind}{because}")
    if everything:
        lacked = {name for outcome in outcomes for name in outcome.missing}
        stale = sorted(set(known[_MISSING]) - lacked)
        lines += [f"{name}: listed as missing, but no program is refused for it" for name in stale]
        folders = {outcome.case.folder for outcome in outcomes}
        lines += [f"{folder}: listed, but there is no such configuration" for folder in sorted(set(listed) - folders)]
    return lines


def write(outcomes: Sequence[Outcome]) -> None:
    """Write the list from a run of all configurations."""
    listed = _listed(_read())
    known: dict[str, Any] = {_MISSING: sorted({name for outcome in outcomes for name in outcome.missing})}
    for kind in _LISTED:
        groups: dict[str, list[str]] = {}
        for outcome in outcomes:
            if outcome.kind == kind and not outcome.missing:
                before, reason = listed.get(outcome.case.folder, ("", ""))
                groups.setdefault(reason if before == kind else outcome.reason, []).append(outcome.case.folder)
        known[kind] = groups
    FILE.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _expected(case: Case, known: dict[str, Any], listed: dict[str, tuple[str, str]]) -> str:
    if case.folder in listed:
        return listed[case.folder][0]
    if not set(known[_MISSING]).isdisjoint(case.ops):
        return "refused"
    return "passed" if case.comparable else "not comparable"


def _read() -> dict[str, Any]:
    if not FILE.is_file():
        return {_MISSING: [], **{kind: {} for kind in _LISTED}}
    known: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return known


def _listed(known: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the kind and the reason of each configuration in the file."""
    return {folder: (kind, reason) for kind in _LISTED for reason, folders in known[kind].items() for folder in folders}
