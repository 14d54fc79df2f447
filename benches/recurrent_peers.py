"""Compares etkv with llama.cpp on the CPU on a model with recurrent layers, and measures what only its cache can do.

The model has the shapes of Qwen3.5-0.8B (text part) and random weights, the same on both sides: 24 layers, of which 18
are recurrent and every fourth attends, 752 million weights with a vocabulary of 248,320.

``speed``: prompts and decoding, as ``benches/cpu_peers.py`` compares them: in turns, each round in a separate process
that answers twice; the second answer counts. Medians of the rounds, ratios of medians. For speed a ratio above 1
favours etkv, for memory a ratio below 1. etkv runs 8da4w. llama.cpp runs q4_0, in which its quantizer gives the
embedding and the head 6 bits, and q4_0 for every matrix (q4_0-pure).

``rewind``: a rewind by 1 to 64 tokens after a text, whose tokens then run again. The first call after a step finds
little in the processor's caches; a second call follows at once.

``fork``: one sequence becomes 8 branches without copies. Bytes before, after, and after each branch decoded tokens.

The first run takes minutes: it writes the model, exports it, and converts it with llama.cpp's own converter; 6 GB stay
in build/models/recurrent-peers. It needs ``make build``; llama-cpp-python in the Python of ``--llama-python``, which
``benches/cpu_peers.py --help`` says how to build; and llama.cpp's source in ``--llama-source``, which the sdist of
llama-cpp-python has in vendor/llama.cpp::

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cpu_peers
from cpu_peers import CHUNK, Contestant

VOCABULARY = 248320
POSITIONS = 4864
"""Positions of every cache."""
BRANCHES = 8
DECODED = (10, 70)
"""Tokens that each branch has decoded in each row of the table. In the last it has an anchor of its own."""
LONGEST = 64
"""The most tokens of a rewind."""

FOLDER = cpu_peers.MODELS / "recurrent-peers"
HF = FOLDER / "hf"
GGUF = FOLDER / "bf16.gguf"


def contestant(name: str, engine: str, model: str, kv: str, quantize: str) -> Contestant:
    """Returns a contestant of this model."""
    file = f"recurrent-peers/{model}"
    return Contestant(name, engine, file, "etkv-8da4w", kv, quantize, POSITIONS, __file__)


CONTESTANTS = [
    contestant("etkv-8da4w", "etkv", "8da4w/model.pte", "f32", "8da4w"),
    contestant("llama.cpp-q4_0", "llama", "q4_0.gguf", "f16", "q4_0"),
    contestant("llama.cpp-q4_0-pure", "llama", "q4_0-pure.gguf", "f16", "q4_0-pure"),
]
PROGRAM = CONTESTANTS[0]


def write_model() -> None:
    """Writes the model as a Hugging Face folder in bfloat16."""
    import repeating_model
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_num_value_heads=16,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        architectures=["Qwen3_5ForCausalLM"],
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(HF)
    # The exporter wants a tokenizer; prompts here are ids. Written last: a folder with it is complete.
    (HF / "tokenizer.json").write_text(json.dumps(repeating_model.tokenizer()))


def convert(source: Path) -> None:
    """Writes the model as GGUF by the converter in ``source``, without a vocabulary."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.qwen import Qwen3_5TextModel

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(VOCABULARY)

    Qwen3_5TextModel.set_vocab = set_vocab
    script, partial = str(source / "convert_hf_to_gguf.py"), GGUF.with_suffix(".partial")
    sys.argv = [script, str(HF), "--outfile", str(partial), "--outtype", "bf16", "--no-mtp"]
    runpy.run_path(script, run_name="__main__")
    partial.rename(GGUF)


def prepare(wanted: Contestant, arguments: argparse.Namespace) -> str | None:
    """Makes the model's file if it is missing. Returns why the contestant is left out, if it is."""
    itself = [sys.executable, __file__]
    llama = [arguments.llama_python, __file__]
    steps: list[tuple[Path, list[str]]] = [(HF / "tokenizer.json", [*itself, "--write-model"])]
    if wanted.engine == "etkv":
        if not cpu_peers.FORWARD.exists():
            return "there is no build/bin/etkv_forward: make build makes it"
        export = [sys.executable, "-m", "etkv.export", "--backend", "cpu", "--quantize", "8da4w"]
        steps.append((wanted.file, [*export, "--model", str(HF), "--output", str(wanted.file)]))
    else:
        if subprocess.run([llama[0], "-c", "import llama_cpp"], capture_output=True).returncode != 0:
            return f"{llama[0]} cannot import llama_cpp: benches/cpu_peers.py --help says how to get it"
        if not GGUF.exists() and arguments.llama_source is None:
            return "no --llama-source: --help says how to get it"
        steps.append((GGUF, [*itself, "--convert", str(arguments.llama_source)]))
        steps.append((wanted.file, [*llama, "--requantize", str(GGUF), "--work", wanted.name]))
    for file, command in steps:
        if file.exists():
            continue
        print(f"preparing {file.relative_to(cpu_peers.ROOT)}", file=sys.stderr, flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode != 0:
            return cpu_peers.failure(ended)
    return None


def prompt_ids(n: int) -> list[int]:
    """Returns ``n`` ids. The model is random, so they need no meaning."""
    return random.Random(1).choices(range(VOCABULARY), k=n)


def read(program: Any, ids: list[int], first: int = 0) -> None:
    """Runs ``ids`` in steps of 512."""
    for begin in range(0, len(ids), CHUNK):
        tokens = ids[begin : begin + CHUNK]
        program.forward(tokens, range(first + begin, first + begin + len(tokens)))


def config() -> Any:
    """Returns the configuration of a cache of the program."""
    import etkv

    facts = etkv.read_kv_cache_metadata(PROGRAM.file)
    return etkv.CacheConfig(facts.layers, capacity=POSITIONS, recurrent_layers=facts.recurrent_layers)


def rewind(n_context: int, calls: int) -> None:
    """Prints how long a rewind takes."""
    import etkv

    ids = prompt_ids(n_context)
    after_step, after_rewind = [], []
    with etkv.DecodeSession(config()) as session, etkv.load(PROGRAM.file, session, logits="last") as program:
        read(program, ids)
        for call in range(calls):
            length = n_context - 1 - call % (LONGEST - 1)
            for seconds in (after_step, after_rewind):
                start = time.perf_counter()
                session.rewind(length)
                seconds.append(time.perf_counter() - start)
                length -= 1
            read(program, ids[length + 1 :], length + 1)
    print(f"{calls} rewinds by 1 to {LONGEST} tokens after {n_context}, from Python, microseconds")
    for label, seconds in (("after a step", after_step), ("again, by one token more", after_rewind)):
        seconds.sort()
        row = f"  {label:26}median {statistics.median(seconds) * 1e6:6.1f}"
        row += f"   99% {seconds[-len(seconds) // 100] * 1e6:6.1f}   maximum {seconds[-1] * 1e6:6.1f}"
        print(row, flush=True)
    print()


def fork(n_context: int) -> None:
    """Prints the memory of branches."""
    import etkv

    ids = prompt_ids(n_context)
    with etkv.SeqSession(config()) as session, etkv.load(PROGRAM.file, session, logits="last") as program:
        read(program, ids)
        one = session.memory()
        print(f"one sequence of {n_context} tokens, forked into {BRANCHES}, MiB")
        print(f"  {'':36}{'allocated':>15}{'used':>15}{'keys, values':>14}{'rows':>8}{'anchors':>9}")

        def row(label: str) -> None:
            now = session.memory()
            figures = f"{now.allocated / 2**20:8.1f} {now.allocated / one.allocated:5.2f}x"
            figures += f"{now.used / 2**20:8.1f} {now.used / one.used:5.2f}x"
            attention = sum(layer.k_used + layer.v_used for layer in now.layers)
            rows = sum(layer.rows_used for layer in now.recurrent_layers)
            anchors = sum(layer.anchors_used for layer in now.recurrent_layers)
            print(
                f"  {label:36}{figures}{attention / 2**20:14.1f}{rows / 2**20:8.1f}{anchors / 2**20:9.1f}", flush=True
            )

        row("before")
        start = time.perf_counter()
        for branch in range(1, BRANCHES):
            session.seq_cp(0, branch)
        seconds = time.perf_counter() - start
        row(f"forked in {seconds / (BRANCHES - 1) * 1e6:.0f} microseconds each")
        for step in range(max(DECODED)):
            session.begin_step(range(BRANCHES))
            tokens = [1 + BRANCHES * step + branch for branch in range(BRANCHES)]
            program.forward(tokens, [n_context + step] * BRANCHES)
            if step + 1 in DECODED:
                row(f"after {step + 1} tokens of each")
    print()


def main() -> None:
    """Parses the command line."""
    topics = ["speed", "rewind", "fork"]
    by_name = {contestant.name: contestant for contestant in CONTESTANTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=topics, default=topics, help="what to measure (everything)")
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 4096], metavar="N", help="tokens (128 4096)")
    parser.add_argument("--decode", type=int, default=32, metavar="N", help="tokens decoded after the first (32)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each (3)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of each (2)")
    parser.add_argument("--calls", type=int, default=1000, metavar="N", help="rewinds (1000)")
    parser.add_argument("--llama-python", default=sys.executable, metavar="PATH", help="the Python that has llama_cpp")
    parser.add_argument("--llama-source", type=Path, metavar="FOLDER", help="llama.cpp's source, for its converter")
    parser.add_argument("--write-model", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--requantize", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ids-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    if arguments.write_model:
        write_model()
        return
    if arguments.convert:
        convert(arguments.convert.resolve())
        return
    if arguments.requantize:
        cpu_peers.requantize(by_name[arguments.work], arguments.requantize)
        return
    if arguments.work:
        ids = [int(text) for text in arguments.ids_file.read_text().split()]
        print(json.dumps(cpu_peers.work(by_name[arguments.work], ids, arguments.decode, arguments.threads)))
        return
    if max(arguments.contexts) + max(arguments.decode, BRANCHES * DECODED[-1]) > POSITIONS:
        parser.error(f"a context and what is decoded take at most {POSITIONS} positions together")
    wanted = CONTESTANTS if "speed" in arguments.only else [PROGRAM]
    reasons = {contestant.name: prepare(contestant, arguments) for contestant in wanted}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    if "speed" in arguments.only:
        for n_prompt in arguments.contexts:
            running = [contestant for contestant in CONTESTANTS if contestant.name not in left_out]
            cpu_peers.compare(running, prompt_ids(n_prompt), left_out, arguments)
    if PROGRAM.name not in left_out:
        if "rewind" in arguments.only:
            rewind(max(arguments.contexts), arguments.calls)
        if "fork" in arguments.only:
            fork(max(arguments.contexts))
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")


if __name__ == "__main__":
    main()
