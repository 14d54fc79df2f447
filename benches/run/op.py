"""Compares the op alone with the same work in MLX without a cache. The op writes rows and attends."""

from __future__ import annotations

from .measure import Bench, Figures, Results
from .report import Panel, Plot, Table, Topic, cell, ratio_cell, thousands

NAME = "op"

ETKV, BARE = "etkv", "MLX alone"

LAYERS = 8


def measure(bench: Bench) -> Topic:
    """Compares etkv and MLX for every length, and for steps of one and of several tokens."""
    model = bench.models[0]
    config = model.config
    heads = int(config.get("num_attention_heads", 32))
    kv_heads = int(config.get("num_key_value_heads", heads))
    dtype = bench.choose(quick="f32", cpu="f32", gpu="bf16")
    topic = Topic(
        NAME,
        "The op against bare MLX",
        f"`update_and_attend` with a contiguous cache, against MLX's `slice_update` into buffers of the final length "
        f"and `fast::scaled_dot_product_attention` on a slice; {heads} query and {kv_heads} KV heads of "
        f"{model.head_dim}, {dtype}, {LAYERS} layers a step, in turns in one process. The host waits after a step.",
    )
    lengths = bench.choose(quick=[256], cpu=[256, 1024, 4096], gpu=[256, 1024, 4096, 16384])
    sizes = bench.choose(quick=[1], cpu=[1, 8], gpu=[1, 8])
    found: dict[int, dict[int, Results]] = {}
    for size in sizes:
        found[size] = {}
        for length in lengths:
            found[size][length] = compare(bench, topic, [heads, kv_heads, model.head_dim, LAYERS, dtype, size], length)
    topic.tables = [table(size, results) for size, results in found.items()]
    panels = [
        Panel(
            f"{size} token{'s' * (size > 1)} a step",
            list(results),
            "positions in the cache",
            "µs a layer",
            {name: [one.median(name, "layer_us") for one in results.values()] for name in (ETKV, BARE)},
        )
        for size, results in found.items()
    ]
    topic.plots = [Plot("op.png", "Attention on a cache, a layer", "lines", panels, log_x=True, log_y=True)]
    return topic


def compare(bench: Bench, topic: Topic, shape: list[object], length: int) -> Results:
    """Measures one length. The executable runs the rounds of both contestants in turns."""
    results = Results()
    case = {"tokens": shape[-1], "length": length}

    def both() -> Figures:
        return bench.tool("etkv_op", *shape, bench.rounds, length)[-1]

    ran = bench.in_turns(case, {"etkv_op": both}, 1)
    for figures in ran.rounds.get("etkv_op", []):
        for name, metric in ((ETKV, "etkv_us"), (BARE, "mlx_us")):
            rounds = [[time / LAYERS for time in times] for times in figures[metric]]
            results.rounds[name] = [{"layer_us": times} for times in rounds]
    topic.left_out(ran, f"{shape[-1]} tokens after {thousands(length)}")
    return results


def table(size: int, found: dict[int, Results]) -> Table:
    """Returns the table of steps of one size."""
    made = Table(
        f"{size} token{'s' * (size > 1)} a step",
        "Microseconds a layer. A ratio above 1 means that etkv is that many times as fast as MLX alone.",
        ["positions", ETKV, BARE, "ratio"],
    )
    for length, one in found.items():
        row = [thousands(length), *(cell(one.median(name, "layer_us")) for name in (ETKV, BARE))]
        made.rows.append([*row, ratio_cell(one.ratio(ETKV, BARE, "layer_us", more_is_better=False))])
    return made
