"""Measures a process from its start to its first token, and its peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from .measure import Bench, Figures, Model, Results
from .report import Panel, Plot, Table, Topic, cell, ratio_cell

NAME = "startup"

ETKV, PEER = "etkv", "mlx-lm"

PROMPT = 40

MIB = 2**20


def measure(bench: Bench) -> Topic:
    """Compares etkv and mlx-lm on every model."""
    topic = Topic(
        NAME,
        "Load, first token and memory",
        f"Each round is a new process that loads the model and runs a prompt of {PROMPT} tokens until the first "
        "token. From the previous round, the files are in the system's page cache and MLX's compiled kernels in their "
        "folder.",
    )
    found = {model.name: compare(bench, topic, model) for model in bench.models}
    topic.tables = [table(name, results) for name, results in found.items()]
    names = list(found)
    topic.plots = [
        Plot(
            "startup.png",
            "From the start of a process to its first token",
            "bars",
            [
                Panel(title, names, "", unit, values(found, metric, scale))
                for title, metric, scale, unit in (
                    ("whole process", "process_seconds", 1.0, "seconds"),
                    ("peak memory of the process", "peak_memory_bytes", MIB, "MiB"),
                )
            ],
        )
    ]
    return topic


def values(found: dict[str, Results], metric: str, scale: float) -> dict[str, list[float | None]]:
    """Returns a figure of both contestants for each model."""
    made: dict[str, list[float | None]] = {}
    for name in (ETKV, PEER):
        medians = (results.median(name, metric) for results in found.values())
        made[name] = [None if median is None else median / scale for median in medians]
    return made


def compare(bench: Bench, topic: Topic, model: Model) -> Results:
    """Measures one model."""
    ids = model.prompt(PROMPT)
    file = bench.ids_file(ids)

    def etkv() -> Figures:
        options = ["--model", model.program, "--ids-file", file, "--capacity", 256, "--json"]
        (result,) = bench.tool("etkv_forward", *options)
        run = result["runs"][0]
        return {**run, "load_seconds": result["load_seconds"], "first_token_seconds": run["prefill_seconds"]}

    contestants = {ETKV: partial(timed, etkv), PEER: partial(timed, partial(bench.peer, "startup", model, ids=ids))}
    # A first round does not count, because it reads files from the disk and compiles kernels.
    for run in contestants.values():
        bench.in_turns({"model": model.name, "warm-up": True}, {"warm-up": run}, 1)
    results = bench.in_turns({"model": model.name}, contestants)
    topic.left_out(results, model.name)
    return results


def timed(run: Callable[[], Figures]) -> Figures:
    """Adds the seconds from the start to the end of the process."""
    start = time.perf_counter()
    figures = run()
    return {**figures, "process_seconds": time.perf_counter() - start}


def table(name: str, results: Results) -> Table:
    """Returns the table of one model."""
    made = Table(
        name,
        "A ratio above 1 means that etkv is that many times as fast as mlx-lm, or uses that many times less memory. "
        "mlx-lm's process includes Python.",
        ["", ETKV, PEER, "ratio"],
    )
    for label, metric, unit, digits in (
        ("imports of Python, s", "import_seconds", 1.0, 2),
        ("load, s", "load_seconds", 1.0, 3),
        ("first token after it, s", "first_token_seconds", 1.0, 3),
        ("whole process, s", "process_seconds", 1.0, 2),
        ("peak memory of the process, MiB", "peak_memory_bytes", MIB, 1),
        ("peak memory of MLX, MiB", "peak_mlx_bytes", MIB, 1),
    ):
        cells = [cell(results.median(one, metric), digits, unit) for one in (ETKV, PEER)]
        if metric == "import_seconds":
            cells[0] = ""
        ratio = results.ratio(ETKV, PEER, metric, more_is_better=False)
        made.rows.append([label, *cells, ratio_cell(ratio)])
    return made
