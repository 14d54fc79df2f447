"""Runs configurations, counts their outcomes, and writes the report."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import cases, workers
from .cases import Case

KINDS = ("passed", "failed", "refused", "not comparable", "not exported")
REPORT = "report.json"

_NEAR = 0.5
"""A share of the tolerances: the report lists each configuration with a larger error."""

_MISSING = re.compile(r"needs operations that this build lacks: (.*)")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one configuration."""

    case: Case
    kind: str
    """One of :data:`KINDS`. If a program ran but its test compares nothing, it is not comparable."""
    reason: str
    """The reason why it did not pass, in one line."""
    error: float | None = None
    """The largest error as a share of the test's tolerances; None if nothing was compared."""

    @property
    def missing(self) -> list[str]:
        """Return the operations because of which the delegate refused the program."""
        found = _MISSING.search(self.reason)
        return re.findall(r"(?:operation )?(\w+) \(\d+ times\)", found[1]) if found else []


def run(found: Sequence[Case], passes: str, jobs: int) -> list[Outcome]:
    """Run the cases through the delegate, and return their outcomes in the same order."""
    outcomes: dict[str, Outcome] = {}
    of_folder = {case.folder: case for case in found}

    def done(task: Any, answer: Any) -> None:
        case = of_folder[task["case"]["folder"]]
        if isinstance(answer, workers.Death):
            answer = {"kind": "failed", "reason": answer.reason}
        outcomes[case.folder] = Outcome(case, **answer)

    tasks = [
        ({"case": dataclasses.asdict(case), "passes": passes}, case.timeout) for case in found if case.error is None
    ]
    workers.answer(f"{__package__}.run_worker", tasks, done, jobs)
    return [outcomes.get(case.folder) or Outcome(case, "not exported", case.error or "") for case in found]


def write(outcomes: Sequence[Outcome], passes: str) -> None:
    """Write the report of all configurations as JSON."""
    cases.write_json(
        cases.FOLDER / REPORT,
        {
            "stamp": cases.stamp(),
            "passes": passes,
            "totals": totals(outcomes),
            "operations": by_operation(outcomes),
            "configurations": [
                {
                    "folder": outcome.case.folder,
                    "test": outcome.case.test,
                    "outcome": outcome.kind,
                    "reason": outcome.reason,
                    "error": outcome.error,
                    "rtol": outcome.case.rtol,
                    "atol": outcome.case.atol,
                    "operations": outcome.case.ops,
                    "missing": outcome.missing,
                }
                for outcome in outcomes
            ],
        },
    )


def totals(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return the number of configurations of each kind."""
    counts = collections.Counter(outcome.kind for outcome in outcomes)
    return {kind: counts[kind] for kind in KINDS}


def by_operation(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Return, for each type of node, counts of the outcomes of the configurations that contain it.

    A configuration with several types counts for each. A refused configuration counts only for operations that the
    delegate lacks.
    """
    found: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        for name in outcome.missing or outcome.case.ops:
            found[name].append(outcome)
    return {name: totals(found[name]) for name in sorted(found)}


def text(outcomes: Sequence[Outcome]) -> str:
    """Return the report for a terminal."""
    lines = []
    table = by_operation(outcomes)
    good = [name for name, counts in table.items() if not counts["failed"] and not counts["refused"]]
    rest = {name: counts for name, counts in table.items() if name not in good}
    if good:
        lines += ["operations without a failure: " + ", ".join(good), ""]
    if rest:
        width = max(map(len, rest))
        lines.append(f"{'operation':{width}}  passed  failed  refused")
        lines += [
            f"{name:{width}}  {counts['passed']:6}  {counts['failed']:6}  {counts['refused']:7}"
            for name, counts in rest.items()
        ]
        lines.append("")
    near = [outcome for outcome in outcomes if outcome.kind == "passed" and (outcome.error or 0) > _NEAR]
    if near:
        lines.append("passed, with the largest error as a share of the test's tolerances:")
        lines += [f"  {outcome.case.folder}: {outcome.error:.2f}" for outcome in near]
        lines.append("")
    shown: list[tuple[str, Callable[[Outcome], bool]]] = [
        ("failed", lambda outcome: outcome.kind == "failed"),
        ("refused, with every operation", lambda outcome: outcome.kind == "refused" and not outcome.missing),
        ("not exported", lambda outcome: outcome.kind == "not exported"),
    ]
    for title, belongs in shown:
        chosen = [outcome for outcome in outcomes if belongs(outcome)]
        if chosen:
            lines += [f"{title}:", *(f"  {outcome.case.folder}: {outcome.reason}" for outcome in chosen), ""]
    counted = ", ".join(f"{count} {kind}" for kind, count in totals(outcomes).items())
    return "\n".join([*lines, f"{len(outcomes)} configurations: {counted}"])
