"""The report of a run: tables as Markdown, and all figures as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .measure import Figures, Ratio, Results

FORMAT = 1
"""The version of report.json. Increase it when the structure changes."""

NOT_RUN = "not run"

REFERENCE = "as many"
"""The prefix of the name of a reference series: a line for comparison, which no contestant ran."""


@dataclass
class Table:
    """Cells of text under headings. ``note`` describes what is compared, and the meaning of a ratio above 1."""

    title: str
    note: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Panel:
    """A part of a plot: for each x value one value of each series; None if the value was not measured."""

    title: str
    x: list[Any]
    x_label: str
    y_label: str
    series: dict[str, list[float | None]]


@dataclass
class Plot:
    """A plot of ``bars``, or of ``lines`` over numbers. Axes of ``lines`` may be logarithmic."""

    file: str
    title: str
    kind: str
    panels: list[Panel]
    log_x: bool = False
    log_y: bool = False


@dataclass
class Topic:
    """The report of one topic."""

    name: str
    title: str
    about: str
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def left_out(self, results: Results, case: str) -> None:
        """Records the contestants that did not run on a case, with reasons."""
        self.not_run += [f"{name}, {case}: {reason}" for name, reason in results.not_run.items()]


def cell(value: float | None, digits: int = 1, unit: float = 1.0) -> str:
    """Returns a number as a cell: divided by ``unit``, with thousands separators."""
    return NOT_RUN if value is None else f"{value / unit:,.{digits}f}"


def ratio_cell(ratio: Ratio | None) -> str:
    """Returns a ratio as a cell, with the range over the rounds if it is wide enough to show."""
    if ratio is None:
        return ""
    low, high = f"{ratio.least:.2f}", f"{ratio.most:.2f}"
    return f"{ratio.value:.2f}" if low == high else f"{ratio.value:.2f} ({low} to {high})"


def thousands(number: int) -> str:
    """Returns an integer with thousands separators."""
    return f"{number:,}"


def markdown_table(table: Table) -> str:
    """Returns a table as Markdown, after its title and note."""
    lines = [f"### {table.title}", "", table.note, ""] if table.title else [table.note, ""]
    lines += ["| " + " | ".join(table.head) + " |", "|" + " --- |" * len(table.head)]
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines)


def markdown(report: Figures) -> str:
    """Returns the complete report as Markdown, from the contents of report.json."""
    parts = ["# etkv side by side", "", *described(report), ""]
    for topic in report["topics"]:
        parts += [f"## {topic['title']}", "", topic["about"], ""]
        for table in topic["tables"]:
            parts += [markdown_table(Table(**table)), ""]
        for plot in topic["plots"]:
            parts += [f"![{plot['title']}]({plot['file']})", ""]
        if topic["not_run"]:
            parts += ["Not run:", "", *(f"- {reason}" for reason in topic["not_run"]), ""]
    return "\n".join(parts).rstrip() + "\n"


def described(report: Figures) -> list[str]:
    """Returns the machine, versions and options of a report as lines."""
    machine, versions, options = report["machine"], report["versions"], report["options"]
    names = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    rounds = options["rounds"]
    return [
        f"{machine['device_name']} ({machine['device']}); {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_gib']:.0f} GiB; {machine['system']}.",
        f"{names}.",
        f"{report['started']}, {report['seconds'] / 60:.1f} minutes; the load average was "
        f"{machine['load_average']:.1f} before.",
        "",
        f"Rounds of each contestant, in turns: {rounds}, unless a topic says otherwise. Each round is a separate "
        "process. Figures are medians of the rounds. A ratio is of two medians; brackets have the minimum and the "
        "maximum of the rounds.",
        *(["", "This is a short run (`--quick`): it checks that everything runs, not how fast."] * options["quick"]),
    ]


def joined(reports: list[Figures]) -> Figures:
    """Combines reports of different topics. Raises ValueError if their devices or their versions of etkv differ."""
    first = reports[0]
    made = {**first, "topics": [], "samples": [], "seconds": 0.0}
    for one in reports:
        if one["versions"] != first["versions"] or one["machine"]["device_name"] != first["machine"]["device_name"]:
            raise ValueError("the reports are of different devices or different versions of etkv")
        made["topics"] += one["topics"]
        made["samples"] += one["samples"]
        made["seconds"] += one["seconds"]
    return made


def write(report: Figures, folder: Path) -> None:
    """Writes report.json and report.md."""
    (folder / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    (folder / "report.md").write_text(markdown(report))


def topic_as_json(topic: Topic) -> Figures:
    """Returns a topic in the form of report.json, without plots that have no value."""
    made = asdict(topic)
    made["plots"] = [plot for plot in made["plots"] if any(measured(panel) for panel in plot["panels"])]
    return made


def measured(panel: Figures) -> bool:
    """Returns whether any contestant has a value. Reference lines do not count."""
    values = (one for name, one in panel["series"].items() if not name.startswith(REFERENCE))
    return any(value is not None for one in values for value in one)
