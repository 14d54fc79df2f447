"""Compares etkv on the CPU with other engines. All run the same SmolLM2-135M, prompt and number of threads.

Every contestant reads a prompt in steps of 512 tokens and then answers greedily. Contestants run in turns: one round
of each, then the next round. Each round is a separate process that answers twice; the second answer counts. The
output has medians of the rounds and ratios of medians. For speed a ratio above 1 favours etkv, for memory a ratio
below 1.

Memory is the peak of the process, minus its memory before the model was loaded. Python and its imports take the
memory that is subtracted. etkv's process has no Python, so all of its memory counts.

A contestant that cannot run is left out; the end of the output has the reason. The first run exports ExecuTorch's
program, which takes minutes. The program stays in build/models/peers-executorch. llama.cpp needs llama-cpp-python in
the Python of ``--llama-python``; pip builds it for the processor. If SIGILL ends llama.cpp, as on a virtual machine
that reports AMX but lacks it, build it again with ``-mno-amx-tile -mno-amx-int8 -mno-amx-bf16`` in ``CFLAGS`` and
``CXXFLAGS``::

    python -m venv build/llama
    build/llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

``--work`` runs one round of a contestant in Python and prints JSON. The comparison starts its processes this way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "build" / "models"
FORWARD = ROOT / "build" / "bin" / "etkv_forward"
CHUNK = 512
"""The number of tokens of a prefill step."""
MAX_CONTEXT = 2304
"""The number of positions of every cache of SmolLM2."""


@dataclass(frozen=True)
class Contestant:
    """An engine, its model under build/models, and etkv's contestant with which it is compared."""

    name: str
    engine: str
    model: str
    rival: str = "etkv"
    kv: str = "f32"
    quantize: str | None = None
    positions: int = MAX_CONTEXT
    """The number of positions of the engine's cache."""
    script: str = __file__
    """The script that runs a round with ``--work``."""
    dtype: str = "f32"
    """The dtype of weights that are not quantized."""

    @property
    def file(self) -> Path:
        return MODELS / self.model


CONTESTANTS = [
    Contestant("etkv", "etkv", "smollm2-135m-cpu/model.pte"),
    Contestant("executorch", "executorch", "peers-executorch/float32/model.pte"),
    Contestant("llama.cpp", "llama", "peers-llama/f32.gguf"),
    Contestant("llama.cpp-kv-f16", "llama", "peers-llama/f32.gguf", kv="f16"),
    Contestant("mlx-lm", "mlx", "smollm2-135m/mlx"),
    Contestant("etkv-bf16", "etkv", "smollm2-135m-cpu-bf16/model.pte", "etkv-bf16", dtype="bf16"),
    Contestant("llama.cpp-bf16", "llama", "peers-llama/bf16.gguf", "etkv-bf16", kv="f16", dtype="bf16"),
    Contestant("etkv-8da4w", "etkv", "smollm2-135m-cpu-8da4w/model.pte", "etkv-8da4w", quantize="8da4w"),
    Contestant("executorch-8da4w", "executorch", "peers-executorch/4-bit/model.pte", "etkv-8da4w", quantize="8da4w"),
    Contestant("llama.cpp-q4_0", "llama", "peers-llama/q4_0.gguf", "etkv-8da4w", kv="f16", quantize="q4_0"),
]
ON_REQUEST = ("mlx-lm", "executorch-8da4w")
"""These run only if ``--only`` names them: mlx-lm is slow on a CPU, and executorch-8da4w takes minutes to export."""


def prepare(contestant: Contestant, llama_python: str) -> str | None:
    """Creates the model's file if it is missing. Returns the reason if the file cannot be created, otherwise None."""
    # The import is here because the Python that runs llama.cpp may lack etkv.
    from etkv.models import path

    source, file, folder = str(path("smollm2-135m")), str(contestant.file), contestant.file.parent
    made = contestant.file.exists()
    if contestant.engine == "etkv":
        if not FORWARD.exists():
            return "there is no build/bin/etkv_forward: `make build` builds it"
        # The exporter checks whether the program is current. `make model` uses the same options, so both share one
        # file.
        command = [sys.executable, "-m", "etkv.export", "--if-changed", "--backend", "cpu", "--model", source]
        command += ["--output", file, "--dtype", contestant.dtype]
        if contestant.quantize:
            command += ["--quantize", contestant.quantize]
        elif contestant.dtype == "f32":
            command += ["--keep-hf", str(folder / "hf")]
        made = False
    elif contestant.engine == "executorch":
        command = [sys.executable, str(ROOT / "benches" / "executorch_sdpa.py"), source, file]
        command += ["--max-context", str(MAX_CONTEXT), *(["--quantize", "8da4w"] if contestant.quantize else [])]
    elif contestant.engine == "llama":
        if subprocess.run([llama_python, "-c", "import llama_cpp"], capture_output=True).returncode != 0:
            return f"{llama_python} cannot import llama_cpp: --help describes how to install it"
        command = [llama_python, __file__, "--requantize", source, "--work", contestant.name]
    else:
        return None if made else f"there is no build/models/{contestant.model}: `python -m benches.run` creates it"
    if made:
        return None
    print(f"preparing build/models/{contestant.model}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(command, capture_output=True, text=True)
    return failure(ended) if ended.returncode != 0 else None


def requantize(contestant: Contestant, source: Path) -> None:
    """Writes the GGUF file ``source`` with the weights of ``contestant``, quantized by llama.cpp."""
    import ctypes

    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.allow_requantize = True
    parameters.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    if contestant.dtype == "bf16":
        parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16
    if contestant.quantize:
        parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        # Otherwise llama.cpp uses more bits for some tensors, such as the head's.
        parameters.pure = contestant.quantize == "q4_0-pure"
    # The file is renamed when it is complete, because an existing file is used without a check.
    target = contestant.file.with_suffix(".partial")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)) != 0:
        raise SystemExit(f"llama.cpp cannot write {contestant.file}")
    target.rename(contestant.file)


def failure(ended: subprocess.CompletedProcess) -> str:
    """Returns the reason of a failure: the last line that the process wrote, or the signal that ended it."""
    if ended.returncode < 0:
        return f"{signal.Signals(-ended.returncode).name} ended {shlex.join(ended.args)}"
    return f"{(ended.stderr.strip() or 'no output').splitlines()[-1]} ({shlex.join(ended.args)})"


def memory(line: str) -> int:
    """Returns memory of this process in bytes: ``VmRSS`` is the current value, ``VmHWM`` the peak."""
    status = Path("/proc/self/status")
    if not status.exists():
        # macOS reports only the peak, in bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(text.split()[1]) * 1024 for text in status.read_text().splitlines() if text.startswith(line))


def answer(step: Callable[[list[int], int], int], ids: list[int], n_decode: int) -> dict:
    """Reads ``ids``, then decodes ``n_decode`` tokens; ``step`` maps tokens and a position to the greedy id."""
    start = time.perf_counter()
    for position in range(0, len(ids), CHUNK):
        token = step(ids[position : position + CHUNK], position)
    read = time.perf_counter()
    produced = [token]
    for position in range(len(ids), len(ids) + n_decode):
        produced.append(step(produced[-1:], position))
    return {"prefill_seconds": read - start, "decode_seconds": time.perf_counter() - read, "ids": produced}


def load_llama(contestant: Contestant, n_threads: int) -> Callable[[list[int], int], int]:
    """Loads a GGUF file into llama.cpp, with flash attention; a step at position 0 clears the cache."""
    import llama_cpp
    import numpy as np

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, None)
    model = llama_cpp.llama_model_load_from_file(str(contestant.file).encode(), llama_cpp.llama_model_default_params())
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = contestant.positions
    parameters.n_batch = parameters.n_ubatch = CHUNK
    parameters.n_threads = parameters.n_threads_batch = n_threads
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    parameters.type_k = parameters.type_v = getattr(llama_cpp, f"GGML_TYPE_{contestant.kv.upper()}")
    context = llama_cpp.llama_init_from_model(model, parameters)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def step(tokens: list[int], position: int) -> int:
        if position == 0:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        # The batch refers to the memory of these arrays.
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) != 0:
            raise SystemExit("llama.cpp cannot decode")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

    # Keep a reference to the callback: the library calls it whenever it logs.
    step.silent = silent
    return step


def answer_by_mlx_lm(model, ids: list[int], n_decode: int) -> dict:
    """Reads and decodes with mlx-lm's own loop, like ``benches/run/peer_mlx_lm.py``."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    start = time.perf_counter()
    produced, times = [], []
    for token, _ in generate_step(mx.array(ids), model, max_tokens=n_decode + 1):
        produced.append(int(token))
        times.append(time.perf_counter())
    return {"prefill_seconds": times[0] - start, "decode_seconds": times[-1] - times[0], "ids": produced}


def work(contestant: Contestant, ids: list[int], n_decode: int, n_threads: int) -> dict:
    """Runs one round of a contestant in this process. Returns seconds, ids and bytes."""
    # Import before the memory is measured for the first time.
    if contestant.engine == "executorch":
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
        from executorch_sdpa import load

        before = memory("VmRSS:")
        respond = partial(answer, load(contestant.file, n_threads))
    elif contestant.engine == "llama":
        import llama_cpp  # noqa: F401

        before = memory("VmRSS:")
        respond = partial(answer, load_llama(contestant, n_threads))
    else:
        from mlx_lm.utils import load_model

        before = memory("VmRSS:")
        respond = partial(answer_by_mlx_lm, load_model(contestant.file)[0])
    respond(ids, n_decode)
    return {**respond(ids, n_decode), "before_bytes": before, "peak_bytes": memory("VmHWM:")}


def run(contestant: Contestant, ids_file: Path, arguments: argparse.Namespace) -> dict | str:
    """Runs one round in a separate process. Returns its result, or the reason of its failure."""
    if contestant.engine == "etkv":
        command = [str(FORWARD), "--model", str(contestant.file), "--kv-format", contestant.kv]
        command += ["--capacity", str(contestant.positions), "--repeat", "2", "--json"]
    else:
        python = arguments.llama_python if contestant.engine == "llama" else sys.executable
        command = [python, contestant.script, "--work", contestant.name, "--threads", str(arguments.threads)]
    command += ["--ids-file", str(ids_file), "--decode", str(arguments.decode)]
    threads = {name: str(arguments.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **threads})
    if ended.returncode != 0:
        return failure(ended)
    result = json.loads(ended.stdout.splitlines()[-1])
    if contestant.engine != "etkv":
        return result
    second = result["runs"][1]
    second["decode_seconds"] = sum(second["decode_seconds"])
    return {**second, "before_bytes": 0, "peak_bytes": second["peak_memory_bytes"]}


def compare(contestants: list[Contestant], prompt: list[int], left_out: dict, arguments: argparse.Namespace) -> None:
    """Runs all contestants in turns and prints a table. Adds contestants that fail to ``left_out``."""
    ids_file = ROOT / "build" / "bench-cpu-ids.txt"
    ids_file.write_text(" ".join(map(str, prompt)))
    results: dict[Contestant, list[dict]] = {contestant: [] for contestant in contestants}
    for number in range(arguments.rounds):
        for contestant in list(results):
            label = f"  round {number + 1} of {arguments.rounds}: {contestant.name}"
            print(f"{label:60}", file=sys.stderr, end="\r", flush=True)
            result = run(contestant, ids_file, arguments)
            if isinstance(result, str):
                left_out[contestant.name] = result
                del results[contestant]
            else:
                results[contestant].append(result)

    print(f"{len(prompt)} tokens of context, {arguments.decode} decoded, {arguments.rounds} rounds in turns")
    headings = f"{'prefill/s':>11}{'ratio':>7}{'decode/s':>11}{'ratio':>7}{'MiB':>10}{'ratio':>7}{'before':>9}"
    by_name = {contestant.name: rounds for contestant, rounds in results.items()}
    print(f"  {'':19}{headings}{'same ids' if 'etkv' in by_name else '':>13}".rstrip())
    notes = []
    for contestant, rounds in results.items():
        theirs = figures(rounds, len(prompt), arguments.decode)
        rival = contestant.rival if contestant.rival in by_name else "etkv"
        ours = figures(by_name[rival], len(prompt), arguments.decode) if rival in by_name else [math.nan] * 3
        row = f"  {contestant.name:19}"
        for our, value, width in zip(ours, theirs, (11, 11, 10), strict=True):
            row += f"{value:{width}.1f}{our / value:7.2f}"
        row += f"{statistics.median(result['before_bytes'] for result in rounds) / 2**20:9.1f}"
        if "etkv" not in by_name:
            print(row)
            continue
        ids, expected = rounds[0]["ids"], by_name["etkv"][0]["ids"]
        same = next((i for i, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1]), len(ids))
        print(f"{row}{same:7} of {len(ids)}")
        if same < len(ids) and contestant.quantize is None and contestant.dtype == "f32":
            notes.append(f"  {contestant.name} differs: id {same} is {ids[same]}, and etkv's is {expected[same]}")
        if rival != contestant.rival:
            notes.append(
                f"  {contestant.name}: the ratios are to etkv in float32, because {contestant.rival} did not run"
            )
    print(*notes, sep="\n", end="\n\n" if notes else "\n", flush=True)


def figures(rounds: list[dict], n_prompt: int, n_decode: int) -> list[float]:
    """Returns prefill tokens/s, decoded tokens/s, and MiB of the model and its computation."""

    def median(value: Callable[[dict], float]) -> float:
        return statistics.median(value(result) for result in rounds)

    return [
        n_prompt / median(lambda result: result["prefill_seconds"]),
        n_decode / median(lambda result: result["decode_seconds"]),
        median(lambda result: result["peak_bytes"] - result["before_bytes"]) / 2**20,
    ]


def prompt_ids(n: int) -> list[int]:
    """Returns the first ``n`` ids of the license, because that text does not change."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CONTESTANTS[0].file.parent / "tokenizer.json"))
    ids = tokenizer.encode((ROOT / "LICENSE").read_text()).ids
    if len(ids) < n:
        raise SystemExit(f"the license has {len(ids)} tokens, not {n}")
    return ids[:n]


def add_arguments(parser: argparse.ArgumentParser, contexts: list[int]) -> None:
    """Adds the options that all comparisons on the CPU have; ``contexts`` is a default."""
    usual = " ".join(map(str, contexts))
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=contexts, metavar="N", help=f"tokens of prompts ({usual})"
    )
    parser.add_argument("--decode", type=int, default=32, metavar="N", help="tokens decoded after the first (32)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each contestant (3)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of each contestant (2)")
    parser.add_argument("--llama-python", default=sys.executable, metavar="PATH", help="the Python that has llama_cpp")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--requantize", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ids-file", type=Path, help=argparse.SUPPRESS)


def main() -> None:
    """Parses the command line."""
    by_name = {contestant.name: contestant for contestant in CONTESTANTS}
    usual = [name for name in by_name if name not in ON_REQUEST]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=usual, metavar="NAME", help=f"contestants: {', '.join(by_name)}")
    add_arguments(parser, [128, 2048])
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    if arguments.requantize:
        requantize(by_name[arguments.work], arguments.requantize)
        return
    if arguments.work:
        ids = [int(text) for text in arguments.ids_file.read_text().split()]
        print(json.dumps(work(by_name[arguments.work], ids, arguments.decode, arguments.threads)))
        return
    for name in arguments.only:
        if name not in by_name:
            parser.error(f"unknown contestant {name}: there are {', '.join(by_name)}")
    if max(arguments.contexts) + arguments.decode > MAX_CONTEXT:
        parser.error(f"--contexts plus --decode must not exceed {MAX_CONTEXT} positions")
    reasons = {name: prepare(by_name[name], arguments.llama_python) for name in arguments.only}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    if arguments.threads != os.cpu_count():
        print(f"etkv uses ExecuTorch's threads, one per core, instead of {arguments.threads}")
    for n_prompt in arguments.contexts:
        running = [by_name[name] for name in arguments.only if name not in left_out]
        compare(running, prompt_ids(n_prompt), left_out, arguments)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")


if __name__ == "__main__":
    main()
