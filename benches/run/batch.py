"""Compares steps of 1 to 64 sequences with mlx-lm."""

from __future__ import annotations

from functools import partial

from .decode import SAME_ON_CPU
from .measure import Bench, Figures, Model, Results
from .report import Panel, Plot, Table, Topic, cell, ratio_cell, thousands

NAME = "batch"

ETKV, PIPELINED, WAITING = "etkv", "mlx-lm", "mlx-lm, waiting"


def measure(bench: Bench) -> Topic:
    """Compares etkv and mlx-lm on the first model for every number of sequences."""
    topic = Topic(
        NAME,
        "Several sequences a step",
        "Each sequence has a different prompt; all prompts have the same length, so that mlx-lm needs no padding. "
        "Tokens a second are those of all sequences together. Like mlx-lm's own loop, etkv starts a step before the "
        "host has read the last tokens.",
    )
    model = bench.models[0]
    sizes = bench.choose(quick=[1, 4], cpu=[1, 4, 16, 64], gpu=[1, 2, 4, 8, 16, 32, 64])
    context = bench.choose(quick=16, cpu=32, gpu=128)
    steps = bench.choose(quick=4, cpu=12, gpu=64)
    found = {size: compare(bench, topic, model, size, context, steps) for size in sizes}
    topic.tables = [table(model, found, context)]
    panel = Panel(
        f"{model.name}, prompts of {context} tokens",
        list(found),
        "sequences",
        "tokens/s of all",
        {name: [rate(one, name, size) for size, one in found.items()] for name in (ETKV, PIPELINED, WAITING)},
    )
    topic.plots = [
        Plot("batch.png", "Several sequences a step: tokens a second", "lines", [panel], log_x=True, log_y=True)
    ]
    return topic


def compare(bench: Bench, topic: Topic, model: Model, size: int, context: int, steps: int) -> Results:
    """Measures steps of one number of sequences."""

    def etkv() -> Figures:
        options = ["--model", model.program, "--sequences", size, "--context", context, "--steps", steps]
        return bench.tool("etkv_sequences", *options, "--ids", model.n_ids, "--loop", "device")[-1]

    prompts = [[1 + (7919 * i + 31 * number) % (model.n_ids - 1) for i in range(context)] for number in range(size)]
    contestants = {ETKV: etkv}
    for name, loop in ((PIPELINED, "pipelined"), (WAITING, "waiting")):
        contestants[name] = partial(bench.peer, "batch", model, ids=prompts, steps=steps, loop=loop)
    skipped: dict[str, str] = bench.choose(quick={}, cpu={WAITING: SAME_ON_CPU}, gpu={})
    results = bench.in_turns({"model": model.name, "sequences": size}, contestants, skipped=skipped)
    topic.left_out(results, f"{size} sequence{'s' * (size > 1)}")
    return results


def rate(results: Results, contestant: str, size: int) -> float | None:
    """Returns tokens a second of all sequences."""
    seconds = results.median(contestant, "step_seconds")
    return size / seconds if seconds else None


def table(model: Model, found: dict[int, Results], context: int) -> Table:
    """Returns the table: a row for each number of sequences."""
    made = Table(
        model.name,
        f"Tokens a second of all sequences, after prompts of {thousands(context)} tokens; medians of steps. A ratio "
        "above 1 means that etkv is that many times as fast as mlx-lm's loop in the previous column.",
        ["sequences", ETKV, PIPELINED, "ratio", WAITING, "ratio"],
    )
    for size, one in found.items():
        row = [str(size), cell(rate(one, ETKV, size))]
        for name in (PIPELINED, WAITING):
            row.append(cell(rate(one, name, size)))
            row.append(ratio_cell(one.ratio(ETKV, name, "step_seconds", more_is_better=False)))
        made.rows.append(row)
    return made
