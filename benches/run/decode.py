"""Compares reading a prompt and decoding with mlx-lm. Both sides have the same weights, dtype and MLX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .measure import Bench, Figures, Model, Results
from .report import Panel, Plot, Table, Topic, cell, ratio_cell, thousands

NAME = "decode"

ETKV, STEPS, PIPELINED, WAITING = "etkv", "etkv, waiting", "mlx-lm", "mlx-lm, waiting"
"""The contestants."""

LOOPS: dict[str, list[str]] = {ETKV: ["--loop", "device"], STEPS: ["--loop", "steps"]}
"""etkv's loops -> options of ``etkv_forward``. The first leaves tokens on the device; the second reads every token
before the next step begins."""

RIVALS = {PIPELINED: ETKV, WAITING: STEPS}
"""mlx-lm's loops -> the loop of etkv with which each is compared."""

SAME_ON_CPU = "on a CPU it takes as long as mlx-lm's own loop, and its prompt takes minutes"

MIB = 2**20


def measure(bench: Bench) -> Topic:
    """Compares etkv and mlx-lm for every model and every number of tokens."""
    topic = Topic(
        NAME,
        "Decoding, against mlx-lm",
        "Greedy decoding with the same weights, dtype, ids and MLX. Both have two loops: one starts the next step "
        "before it reads a token, and the waiting loop reads each token first. Equal loops are compared.",
    )
    contexts = bench.contexts or bench.choose(quick=[48], cpu=[128, 2048, 8192], gpu=[128, 2048, 8192])
    n_decode = bench.choose(quick=8, cpu=32, gpu=128)
    panels = []
    for model in bench.models:
        # On a CPU mlx-lm prefills only 15 tokens per second.
        shortest = bench.device == "cpu" and model is not bench.models[0] and not bench.contexts
        results: dict[int, Results] = {}
        for context in contexts[:1] if shortest else contexts:
            positions = model.config.get("max_position_embeddings")
            fitting = min(context, int(positions) - n_decode - 1) if positions else context
            results[fitting] = compare(bench, topic, model, fitting, n_decode)
        topic.tables += tables(model, results, n_decode)
        panels.append(
            Panel(
                model.name,
                [thousands(context) for context in results],
                "tokens of context",
                "tokens/s",
                {
                    name: [rate(one, name, "decode_seconds", n_decode) for one in results.values()]
                    for name in (*LOOPS, *RIVALS)
                },
            )
        )
    topic.plots = [Plot("decode.png", "Decoding: tokens a second", "bars", panels)]
    return topic


def compare(bench: Bench, topic: Topic, model: Model, context: int, n_decode: int) -> Results:
    """Measures a model after one number of tokens."""
    ids = model.prompt(context)
    file = bench.ids_file(ids)
    # A first run does not count: it compiles kernels and plans lengths.
    repeat = bench.choose(quick=1, cpu=2 if context <= 512 else 1, gpu=2)

    def etkv(loop: list[str]) -> Figures:
        options: list[object] = [*loop, "--model", model.program, "--ids-file", file, "--decode", n_decode]
        options += ["--capacity", context + n_decode, "--repeat", repeat, "--json"]
        (result,) = bench.tool("etkv_forward", *options)
        run = result["runs"][-1]
        return {**run, "load_seconds": result["load_seconds"], "decode_seconds": sum(run["decode_seconds"])}

    contestants: dict[str, Callable[[], Figures]] = {name: partial(etkv, loop) for name, loop in LOOPS.items()}
    for name, loop in ((PIPELINED, "pipelined"), (WAITING, "waiting")):
        job = {"ids": ids, "decode": n_decode, "repeat": repeat, "loop": loop}
        contestants[name] = partial(bench.peer, "decode", model, **job)
    # On a CPU, a round of mlx-lm takes ten minutes.
    rounds = 1 if bench.device == "cpu" and context > 4096 else None
    skipped = {}
    if bench.device == "cpu" and context > 512:
        skipped[WAITING] = SAME_ON_CPU
    results = bench.in_turns({"model": model.name, "context": context}, contestants, rounds, skipped)
    topic.left_out(results, f"{model.name}, {thousands(context)} tokens of context")
    return results


def rate(results: Results, contestant: str, metric: str, tokens: int) -> float | None:
    """Returns tokens a second."""
    seconds = results.median(contestant, metric)
    return tokens / seconds if seconds else None


def same_ids(results: Results) -> str:
    """Returns the number of leading ids that are the same on both sides."""
    if not results.rounds.get(ETKV) or not results.rounds.get(PIPELINED):
        return ""
    ours, theirs = (results.rounds[name][0]["ids"] for name in (ETKV, PIPELINED))
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
    return f"{same} of {len(ours)}"


def tables(model: Model, results: dict[int, Results], n_decode: int) -> list[Table]:
    """Returns the tables of one model."""
    better = "A ratio above 1 means that etkv is that many times as fast"
    decode = Table(
        f"{model.name}: decoding",
        f"Tokens a second over {n_decode} tokens, a token a step. {better} as mlx-lm's loop in the previous column.",
        ["context", *LOOPS, *(word for name in RIVALS for word in (name, "ratio")), "equal first ids"],
    )
    prefill = Table(
        f"{model.name}: the prompt, and memory",
        f"Tokens of the prompt a second, until the first token. Peak memory of MLX and of the process, in MiB; "
        f"mlx-lm's process includes Python. {better} as mlx-lm's own loop, or uses that many times less memory.",
        [
            *("context", "etkv, tokens/s", "mlx-lm", "ratio"),
            *("etkv, MLX's MiB", "mlx-lm", "ratio", "etkv, process, MiB", "mlx-lm", "ratio"),
        ],
    )
    for context, one in results.items():
        row = [thousands(context), *(cell(rate(one, name, "decode_seconds", n_decode)) for name in LOOPS)]
        for name, rival in RIVALS.items():
            row.append(cell(rate(one, name, "decode_seconds", n_decode)))
            row.append(ratio_cell(one.ratio(rival, name, "decode_seconds", more_is_better=False)))
        decode.rows.append([*row, same_ids(one)])
        row = [thousands(context)]
        row += [cell(rate(one, name, "prefill_seconds", context)) for name in (ETKV, PIPELINED)]
        row.append(ratio_cell(one.ratio(ETKV, PIPELINED, "prefill_seconds", more_is_better=False)))
        for metric in ("peak_mlx_bytes", "peak_memory_bytes"):
            row += [cell(one.median(name, metric), unit=MIB) for name in (ETKV, PIPELINED)]
            row.append(ratio_cell(one.ratio(ETKV, PIPELINED, metric, more_is_better=False)))
        prefill.rows.append(row)
    return [decode, prefill]
