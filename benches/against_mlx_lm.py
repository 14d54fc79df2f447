"""Compares etkv with mlx-lm: the same weights, dtype and MLX, side by side.

For each kind of weights, both answer the same prompt of ids greedily, in turns: one round of etkv, one of mlx-lm, and
so on, each in its own process. It prints medians of the rounds and ratios of medians. For speed a ratio above 1 favours
etkv, for memory a ratio below 1.

``--workload`` runs mlx-lm's side of one round and prints JSON; it is how the comparison starts its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "build" / "models"
FORWARD = ROOT / "build" / "bin" / "etkv_forward"


@dataclass(frozen=True)
class Variant:
    """One kind of weights: the options of the exporter, and the folder that mlx-lm loads."""

    name: str
    folder: Path
    dtype: str
    quantize: str | None = None


VARIANTS = [
    Variant("float32", MODELS / "smollm2-135m", "float32"),
    Variant("bfloat16", MODELS / "smollm2-135m-bf16", "bfloat16"),
    Variant("4-bit", MODELS / "smollm2-135m-4w", "float32", "4w"),
]


def export(variant: Variant) -> None:
    """Exports the program of ``variant``, if it is missing, and mlx-lm's folder with the same weights."""
    from etkv.models import path

    command = [sys.executable, "-m", "etkv.export", "--if-changed", "--model", str(path("smollm2-135m"))]
    command += ["--output", str(variant.folder / "model.pte"), "--dtype", variant.dtype]
    # As the tests ask for it, so that one export serves both.
    command += ["--keep-hf", str(variant.folder / "hf")]
    if variant.quantize:
        command += ["--quantize", variant.quantize]
    subprocess.run(command, check=True)
    reference = variant.folder / "mlx"
    if not (reference / "config.json").exists():
        subprocess.run([sys.executable, __file__, "--convert", variant.name], check=True)


def convert(variant: Variant) -> None:
    """Writes ``variant`` as mlx-lm loads it.

    Quantized weights are those of the program, bit by bit: mlx-lm's own quantization would choose other scales.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.utils import load_model, save_config, save_model

    source = MODELS / "smollm2-135m" / "hf"
    model, config = load_model(source, lazy=True)
    dtype = getattr(mx, variant.dtype)
    model.update(tree_map(lambda leaf: leaf.astype(dtype), model.parameters()))
    if variant.quantize:
        group_size, bits = 32, 4 if variant.quantize == "4w" else 8
        nn.quantize(model, group_size=group_size, bits=bits)
        config["quantization"] = {"group_size": group_size, "bits": bits}
        weights = quantized_weights(variant.folder / "model.pte", bits)
        names = {name for name, _ in tree_flatten(model.parameters())}
        unknown = sorted(set(weights) - names)
        if unknown:
            raise SystemExit(f"{variant.name}: mlx-lm's model has no {unknown[0]}")
        model.load_weights(list(weights.items()), strict=False)
    reference = variant.folder / "mlx"
    reference.mkdir(parents=True, exist_ok=True)
    save_model(reference, model)
    save_config(config, reference / "config.json")


def quantized_weights(program: Path, bits: int) -> dict:
    """Returns the packed weights, scales and biases in ``program``, under mlx-lm's names.

    The program ships no biases: they are the scales times the value of a code in the middle.
    """
    import mlx.core as mx

    from etkv.constants import read_constants

    weights = {}
    for name, array in read_constants(program).items():
        name = name.removeprefix("model.")
        if name.endswith(".parametrizations.weight.original0_to_packed"):
            weights[name.replace(".parametrizations.weight.original0_to_packed", ".weight")] = mx.array(array.numpy())
        elif name.endswith(".parametrizations.weight.original1"):
            scales = mx.array(array.numpy())
            base = name.removesuffix(".parametrizations.weight.original1")
            weights[f"{base}.scales"] = scales
            weights[f"{base}.biases"] = scales * -(2 ** (bits - 1))
    return weights


def workload(folder: Path, ids: list[int], n_decode: int) -> dict:
    """Runs mlx-lm on ``ids`` and then for ``n_decode`` greedy tokens; returns seconds, ids and peak bytes."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    mx.reset_peak_memory()
    start = time.perf_counter()
    produced, times = [], []
    for token, _ in generate_step(mx.array(ids), model, max_tokens=n_decode + 1):
        produced.append(int(token))
        times.append(time.perf_counter())
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "prefill_seconds": times[0] - start,
        "decode_seconds": times[-1] - times[0],
        "ids": produced,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "peak_mlx_bytes": mx.get_peak_memory(),
    }


def run_mlx_lm(variant: Variant, ids_file: Path, n_decode: int) -> dict:
    """Runs one round of mlx-lm in its own process."""
    command = [sys.executable, __file__, "--workload", str(variant.folder / "mlx")]
    command += ["--ids-file", str(ids_file), "--decode", str(n_decode)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def run_etkv(variant: Variant, ids_file: Path, n_decode: int) -> dict:
    """Runs one round of etkv in its own process, with keys and values in the model's dtype."""
    kv_format = {"float32": "f32", "bfloat16": "bf16"}[variant.dtype]
    command = [str(FORWARD), "--model", str(variant.folder / "model.pte"), "--ids-file", str(ids_file)]
    command += ["--decode", str(n_decode), "--kv-format", kv_format, "--json"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    run = result["runs"][0]
    return {
        "prefill_seconds": run["prefill_seconds"],
        "decode_seconds": sum(run["decode_seconds"]),
        "ids": run["ids"],
        "peak_rss_bytes": run["peak_memory_bytes"],
        "peak_mlx_bytes": run["peak_mlx_bytes"],
    }


def compare(variant: Variant, n_prompt: int, n_decode: int, rounds: int) -> None:
    """Runs both in turns and prints a table."""
    ids_file = ROOT / "build" / "bench-ids.txt"
    ids_file.write_text(" ".join(str(1 + 7919 * i % 40000) for i in range(n_prompt)))
    results: dict[str, list[dict]] = {"etkv": [], "mlx-lm": []}
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", file=sys.stderr, end="\r", flush=True)
        results["etkv"].append(run_etkv(variant, ids_file, n_decode))
        results["mlx-lm"].append(run_mlx_lm(variant, ids_file, n_decode))

    def median(side: str, key: str) -> float:
        return statistics.median(run[key] for run in results[side])

    agree = sum(a == b for a, b in zip(results["etkv"][0]["ids"], results["mlx-lm"][0]["ids"], strict=True))
    print(f"{variant.name}: {n_prompt} prompt tokens, {n_decode} decoded, {rounds} rounds in turns;", end=" ")
    print(f"{agree} of {n_decode + 1} ids agree")
    rows = [
        ("prefill tokens/s", lambda side: n_prompt / median(side, "prefill_seconds")),
        ("decode tokens/s", lambda side: n_decode / median(side, "decode_seconds")),
        ("peak memory, process, MiB", lambda side: median(side, "peak_rss_bytes") / 2**20),
        ("peak memory, MLX, MiB", lambda side: median(side, "peak_mlx_bytes") / 2**20),
    ]
    print(f"  {'':28}{'etkv':>10}{'mlx-lm':>10}{'ratio':>8}")
    for label, value in rows:
        ours, theirs = value("etkv"), value("mlx-lm")
        print(f"  {label:28}{ours:10.1f}{theirs:10.1f}{ours / theirs:8.2f}")
    print(flush=True)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=[v.name for v in VARIANTS], help="float32, bfloat16, 4-bit")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="prompt tokens (128)")
    parser.add_argument("--decode", type=int, default=48, metavar="N", help="tokens decoded after it (48)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each (3)")
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--convert", help=argparse.SUPPRESS)
    parser.add_argument("--ids-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    by_name = {variant.name: variant for variant in VARIANTS}

    if arguments.workload:
        ids = [int(text) for text in arguments.ids_file.read_text().split()]
        print(json.dumps(workload(arguments.workload, ids, arguments.decode)))
    elif arguments.convert:
        convert(by_name[arguments.convert])
    else:
        for name in arguments.variants:
            if name not in by_name:
                parser.error(f"unknown variant {name}: there are {', '.join(by_name)}")
            export(by_name[name])
        for name in arguments.variants:
            compare(by_name[name], arguments.prompt, arguments.decode, arguments.rounds)


if __name__ == "__main__":
    main()
