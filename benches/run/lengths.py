"""Measures prompts and steps of lengths that the process has not run before, and then the same lengths again."""

from __future__ import annotations

import statistics

from .measure import Bench, Figures, Model, Results
from .report import Panel, Plot, Table, Topic, cell, ratio_cell, thousands

NAME = "lengths"

ETKV, PEER = "etkv", "mlx-lm"


def lengths(longest: int, prompts: int) -> list[int]:
    """Returns the lengths of the prompts in the order of ``etkv_lengths``. The order is not monotonic."""
    return [100 + (longest - 100) * (i * 7 % prompts) // prompts + i for i in range(prompts)]


def measure(bench: Bench) -> Topic:
    """Compares etkv and mlx-lm on the first model."""
    topic = Topic(
        NAME,
        "Lengths never run before",
        "Milliseconds until the first token of a prompt, for lengths that the process has not run before and for the "
        "same lengths again; then steps of several tokens, as in a verification of draft tokens, after a context that "
        "grows by a token a step. On both sides the host reads a token after each step.",
    )
    longest = bench.choose(quick=128, cpu=256, gpu=4000)
    prompts = bench.choose(quick=2, cpu=4, gpu=20)
    steps = bench.choose(quick=3, cpu=16, gpu=64)
    model = bench.models[0]
    # On a CPU the times hardly depend on the context.
    contexts = bench.choose(quick=[64], cpu=[128], gpu=[128, longest // 2])
    sizes = bench.choose(quick=[1, 4], cpu=[1, 2, 4, 8, 16], gpu=[1, 2, 4, 8, 16])
    cases = [(context, n) for context in contexts for n in sizes]

    def etkv() -> Figures:
        # Other tools use the format of the program's dtype by default. The arguments of this tool are positional, so
        # the format must be given.
        kv_format = native_format(bench, model)
        (result,) = bench.tool("etkv_lengths", model.program, kv_format, longest, prompts, steps, "--json")
        return with_steps(result)

    def peer() -> Figures:
        ids = [10 + i * 31 % 200 for i in range(longest + 64)]
        jobs = [
            {"context": context, "tokens": n, "repeat": steps if n == 1 else max(steps * 3 // 8, 1)}
            for context, n in cases
        ]
        return with_steps(bench.peer("lengths", model, ids=ids, lengths=lengths(longest, prompts), steps=jobs))

    results = bench.in_turns({"model": model.name, "longest": longest}, {ETKV: etkv, PEER: peer})
    topic.left_out(results, model.name)
    topic.tables = [table(model, results, longest, prompts, cases)]
    topic.plots = [plot(model, results, longest, prompts)]
    return topic


def native_format(bench: Bench, model: Model) -> str:
    """Returns the KV format of the model's dtype, which ``etkv_forward`` prints."""
    (result,) = bench.tool("etkv_forward", "--model", model.program, "--ids-file", bench.ids_file([1]), "--json")
    return str(result["kv_format"])


def with_steps(result: Figures) -> Figures:
    """Returns the figures, with a separate name for the times of each kind of step. Adds the ratio of the round."""
    for one in result["steps"]:
        result[step_metric(one["context"], one["tokens"])] = one["ms"]
    pairs = zip(result["fresh_ms"], result["again_ms"], strict=True)
    result["fresh_over_again"] = [fresh / again for fresh, again in pairs]
    return result


def step_metric(context: int, tokens: int) -> str:
    return f"step_{tokens}_behind_{context}_ms"


def table(model: Model, results: Results, longest: int, prompts: int, cases: list[tuple[int, int]]) -> Table:
    """Returns the table: a row for each kind of prompt and step."""
    made = Table(
        model.name,
        f"Milliseconds; {prompts} prompts of 100 to {thousands(max(lengths(longest, prompts)))} tokens, their median. "
        "A ratio above 1 means that etkv is that many times as fast as mlx-lm.",
        ["", ETKV, PEER, "ratio"],
    )
    named = {
        "first prompt of the process, 40 tokens": "first_ms",
        "second, 41 tokens": "second_ms",
        "prompts, lengths not run before": "fresh_ms",
        "prompts, the same lengths again": "again_ms",
    }
    named |= {f"{n} token{'s' * (n > 1)} after {thousands(context)}": step_metric(context, n) for context, n in cases}
    for label, metric in named.items():
        row = [label, *(cell(results.median(name, metric), 2) for name in (ETKV, PEER))]
        made.rows.append([*row, ratio_cell(results.ratio(ETKV, PEER, metric, more_is_better=False))])
    row = ["a new length over the same again (times)"]
    row += [cell(results.median(name, "fresh_over_again"), 2) for name in (ETKV, PEER)]
    made.rows.append([*row, ""])
    return made


def plot(model: Model, results: Results, longest: int, prompts: int) -> Plot:
    """Returns the plot: the time of a prompt over its length."""
    by_length = sorted((n, i) for i, n in enumerate(lengths(longest, prompts)))
    series = {}
    for name in (ETKV, PEER):
        for metric, label in (("fresh_ms", "a new length"), ("again_ms", "again")):
            rounds = [figures[metric] for figures in results.rounds.get(name, [])]
            series[f"{name}, {label}"] = [
                statistics.median(times[i] for times in rounds) if rounds else None for _, i in by_length
            ]
    panel = Panel(model.name, [n for n, _ in by_length], "tokens of the prompt", "milliseconds", series)
    return Plot("lengths.png", "Prompts of lengths never run before, and again", "lines", [panel], log_y=True)
