"""Compares branches of one context with mlx-lm: the time of a fork, and the time to decode the branches together."""

from __future__ import annotations

from functools import partial

from .measure import Bench, Figures, Model, Results
from .report import Table, Topic, cell, ratio_cell, thousands

NAME = "fork"

ETKV, PEER = "etkv", "mlx-lm"


def measure(bench: Bench) -> Topic:
    """Compares etkv and mlx-lm on the first model for some numbers of branches."""
    topic = Topic(
        NAME,
        "Forks",
        "One context is read once and continued by several branches, which decode together. etkv's branches share its "
        "cells; mlx-lm copies its cache for each branch, and merges the copies into a batch. The time of a fork ends "
        "when the branches can decode together.",
    )
    model = bench.models[0]
    context = bench.choose(quick=32, cpu=512, gpu=2048)
    steps = bench.choose(quick=4, cpu=12, gpu=64)
    sizes = bench.choose(quick=[2], cpu=[2, 8], gpu=[2, 8, 32])
    found = {size: compare(bench, topic, model, size, context, steps) for size in sizes}
    topic.tables = [table(model, found, context)]
    return topic


def compare(bench: Bench, topic: Topic, model: Model, size: int, context: int, steps: int) -> Results:
    """Measures one number of branches."""

    def etkv() -> Figures:
        options = ["--model", model.program, "--sequences", size, "--context", context, "--steps", steps, "--fork"]
        return bench.tool("etkv_sequences", *options, "--ids", model.n_ids)[-1]

    peer = partial(bench.peer, "fork", model, ids=model.prompt(context), sequences=size, steps=steps)
    results = bench.in_turns({"model": model.name, "branches": size}, {ETKV: etkv, PEER: peer})
    topic.left_out(results, f"{size} branches")
    return results


def table(model: Model, found: dict[int, Results], context: int) -> Table:
    """Returns the table: times of forks and of steps, for each number of branches."""
    made = Table(
        model.name,
        f"A context of {thousands(context)} tokens. A ratio above 1 means that etkv is that many times as fast as "
        "mlx-lm, or uses that many times less memory.",
        ["branches", "", ETKV, PEER, "ratio"],
    )
    for size, one in found.items():
        for label, metric, unit, digits in (
            ("making the branches, ms", "fork_seconds", 1e-3, 3),
            ("bytes copied, MiB", "fork_bytes", 2**20, 1),
            ("a step of all branches, ms", "step_seconds", 1e-3, 1),
            ("peak memory of MLX, MiB", "peak_mlx_bytes", 2**20, 1),
        ):
            row = [str(size), label, *(cell(one.median(name, metric), digits, unit) for name in (ETKV, PEER))]
            made.rows.append([*row, ratio_cell(one.ratio(ETKV, PEER, metric, more_is_better=False))])
    return made
