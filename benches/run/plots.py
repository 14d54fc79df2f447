"""Draws the plots of a report as PNG, with matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from .measure import Figures, NotRunError
from .report import REFERENCE

COLORS = ["#1f77b4", "#ff7f0e", "#c9a227", "#7f7f7f", "#2ca02c", "#9467bd"]
MARKERS = ["o", "s", "D", "^", "v", "x"]
WIDTH = 8.5
"""Width in inches, at 150 dots per inch: text is readable on a page that shows plots with a width of 830 pixels."""


def draw(report: Figures, folder: Path) -> list[str]:
    """Writes every plot of a report; returns the names of the files.

    Raises :class:`NotRunError` without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise NotRunError("there is no matplotlib") from error
    matplotlib.use("Agg")
    made = []
    for topic in report["topics"]:
        for plot in topic["plots"]:
            draw_plot(plot, report["machine"]["device_name"], folder / plot["file"])
            made.append(plot["file"])
    return made


def draw_plot(plot: dict[str, Any], device: str, file: Path) -> None:
    """Draws one plot."""
    from matplotlib import pyplot

    panels = plot["panels"]
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    long = max(len(str(x)) for panel in panels for x in panel["x"]) > 6 and plot["kind"] == "bars"
    height = (3.4 if not long else 0.9 + 0.34 * max(len(panel["x"]) for panel in panels)) * rows + 0.7
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10.5}
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplots(
            rows, columns, figsize=(WIDTH, max(height, 2.8)), squeeze=False, layout="constrained"
        )
        axes = [axis for row in grid for axis in row]
        for axis, panel in zip(axes, panels, strict=False):
            if plot["kind"] == "lines":
                lines(axis, panel, plot)
            elif long:
                flat_bars(axis, panel)
            else:
                bars(axis, panel)
            axis.set_title(panel["title"])
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        handles, labels = axes[0].get_legend_handles_labels()
        if len(labels) > 1:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
        figure.suptitle(textwrap.fill(f"{plot['title']} ({device})", 78), fontsize=12)
        figure.savefig(file, dpi=150)
        pyplot.close(figure)


def lines(axis: Any, panel: dict[str, Any], plot: dict[str, Any]) -> None:
    """Draws the series as lines, with a marker at every value."""
    values_of_all = [y for values in panel["series"].values() for y in values if y]
    for i, (name, values) in enumerate(panel["series"].items()):
        points = [(x, y) for x, y in zip(panel["x"], values, strict=True) if y is not None]
        if points:
            axis.plot(*zip(*points, strict=True), label=name, markersize=5, **line_style(i, name))
    from matplotlib.ticker import FuncFormatter, NullFormatter

    whole = FuncFormatter(lambda value, _: f"{value:,.10g}")
    if plot["log_x"]:
        axis.set_xscale("log", base=2)
        axis.set_xticks(panel["x"])
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(whole)
    # A range of less than a power of ten is clearer on a linear axis from zero.
    if plot["log_y"] and values_of_all and max(values_of_all) > 10 * min(values_of_all):
        axis.set_yscale("log")
        narrow = max(values_of_all) < 100 * min(values_of_all)
        axis.yaxis.set_minor_formatter(FuncFormatter(only(2, 5)) if narrow else NullFormatter())
    else:
        axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(whole)
    axis.set_xlabel(panel["x_label"])
    axis.set_ylabel(panel["y_label"])
    axis.grid(alpha=0.3)


def line_style(number: int, name: str) -> dict[str, Any]:
    """Returns the style of a series: a second series of the same contestant is dashed, in the same colour."""
    if name.startswith(REFERENCE):
        return {"color": "#999999", "linestyle": ":", "marker": ""}
    if name.endswith(", again"):
        return {"color": COLORS[number // 2], "linestyle": "--", "marker": "s"}
    if name.endswith(", a new length"):
        return {"color": COLORS[number // 2], "linestyle": "-", "marker": "o"}
    return {"color": COLORS[number], "linestyle": "-", "marker": MARKERS[number]}


def only(*digits: int) -> Any:
    """Returns a formatter that labels only ticks whose first digit is one of ``digits``."""

    def text(value: float, _: Any) -> str:
        return f"{value:,.10g}" if int(f"{value:e}"[0]) in digits else ""

    return text


def bars(axis: Any, panel: dict[str, Any]) -> None:
    """Draws the series as adjacent bars, labelled with their values."""
    n = len(panel["series"])
    width = 0.8 / n
    for i, (name, values) in enumerate(panel["series"].items()):
        at = [place + (i - (n - 1) / 2) * width for place in range(len(values))]
        drawn = axis.bar(at, [value or 0.0 for value in values], width * 0.92, label=name, color=COLORS[i])
        axis.bar_label(drawn, [text_of(value) for value in values], fontsize=8, padding=2)
    axis.set_xticks(range(len(panel["x"])), [str(x) for x in panel["x"]])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.margins(y=0.12)
    axis.set_xlabel(panel["x_label"])
    axis.set_ylabel(panel["y_label"])


def flat_bars(axis: Any, panel: dict[str, Any]) -> None:
    """Draws the series as horizontal bars, for long names."""
    n = len(panel["series"])
    width = 0.8 / n
    for i, (name, values) in enumerate(panel["series"].items()):
        at = [place + (i - (n - 1) / 2) * width for place in range(len(values))]
        drawn = axis.barh(at, [value or 0.0 for value in values], width * 0.92, label=name, color=COLORS[i])
        axis.bar_label(drawn, [text_of(value) for value in values], fontsize=9, padding=3)
    axis.set_yticks(range(len(panel["x"])), [str(x) for x in panel["x"]])
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.margins(x=0.16)
    axis.set_xlabel(panel["y_label"])


def text_of(value: float | None) -> str:
    """Returns the label of a bar."""
    if value is None:
        return "not run"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
