"""Compares formats of keys and values with float16."""

from __future__ import annotations

from functools import partial

from .measure import Bench, Figures, Model, Results
from .report import Panel, Plot, Table, Topic, cell, ratio_cell, thousands

NAME = "formats"

BASE = "f16"


def measure(bench: Bench) -> Topic:
    """Decodes through a cache of each format, on the first model."""
    topic = Topic(
        NAME,
        "Formats of keys and values",
        "Decoding after the same context with a cache of each format. The model's weights and activations do not "
        "change. Bytes are those of the keys and values of the context.",
    )
    model = bench.models[0]
    context = bench.choose(quick=64, cpu=2048, gpu=4096)
    n_decode = bench.choose(quick=4, cpu=16, gpu=64)
    group = 64 if model.head_dim % 64 == 0 else 32
    packed = [f"affine{bits}g{group}" for bits in (8, 4)]
    formats = bench.choose(
        quick=[BASE, "f32", packed[1]],
        cpu=[BASE, "f32", "bf16", *packed, "mxfp8", "mxfp4", "nvfp4", "row-int4"],
        gpu=[BASE, "f32", "bf16", *packed, "mxfp8", "mxfp4", "nvfp4", "row-int4"],
    )
    file = bench.ids_file(model.prompt(context))

    def run(kv_format: str) -> Figures:
        options = ["--model", model.program, "--ids-file", file, "--decode", n_decode, "--kv-format", kv_format]
        options += ["--capacity", context + n_decode, "--json"]
        options += ["--repeat", bench.choose(quick=1, cpu=1, gpu=2)]
        (result,) = bench.tool("etkv_forward", *options)
        one = result["runs"][-1]
        return {**one, "tokens_per_second": n_decode / sum(one["decode_seconds"])}

    contestants = {kv_format: partial(run, kv_format) for kv_format in formats}
    results = bench.in_turns({"model": model.name, "context": context}, contestants)
    topic.left_out(results, model.name)
    topic.tables = [table(model, results, formats, context, n_decode)]
    topic.plots = [
        Plot(
            "formats.png",
            f"Formats of keys and values, {model.name}, {thousands(context)} tokens of context",
            "bars",
            [
                Panel("", formats, "", label, {label: [scaled(results.median(one, metric), unit) for one in formats]})
                for metric, unit, label in (
                    ("tokens_per_second", 1.0, "decoding, tokens/s"),
                    ("cache_used_bytes", 2**20, "cache, MiB"),
                )
            ],
        )
    ]
    return topic


def scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def table(model: Model, results: Results, formats: list[str], context: int, n_decode: int) -> Table:
    """Returns the table: a row for each format."""
    made = Table(
        model.name,
        f"{thousands(context)} tokens of context, {n_decode} decoded. A ratio above 1 means that the format is that "
        f"many times as fast as {BASE}, or uses that many times less memory.",
        ["format", "decoding, tokens/s", f"ratio to {BASE}", "cache, MiB", f"ratio to {BASE}"],
    )
    for one in formats:
        row = [f"`{one}`", cell(results.median(one, "tokens_per_second"))]
        row.append(ratio_cell(results.ratio(one, BASE, "tokens_per_second", more_is_better=True)))
        row.append(cell(results.median(one, "cache_used_bytes"), unit=2**20))
        row.append(ratio_cell(results.ratio(one, BASE, "cache_used_bytes", more_is_better=False)))
        made.rows.append(row)
    return made
