"""Compares etkv with llama.cpp on a CPU, for a model with recurrent layers, and measures etkv's rewinds and forks.

The model has the shapes of Qwen3.5-0.8B (text part) and random weights, the same on both sides: 752 million weights
with a vocabulary of 248,320. Of the 24 layers every fourth attends; the others are recurrent.

``speed``: prompts and decoding, compared as in ``benches/cpu_peers.py``: contestants run in turns, each round in a
separate process that answers twice; the second answer counts. The output has medians of the rounds and ratios of
medians. For speed a ratio above 1 favours etkv, for memory a ratio below 1. etkv runs 8da4w. llama.cpp runs q4_0 (its
quantizer gives the embedding and the head 6 bits), and q4_0 for every matrix (q4_0-pure).

``rewind``: rewinds by 1 to 64 tokens at the end of a text; the removed tokens then run again. The first call after a
step finds little in the processor's caches, so a second call is measured immediately after it.

``fork``: one sequence is forked into 8 branches without copies. The output has the bytes before the fork, after it,
and after each branch has decoded tokens.

The files take 6 GB in build/models/recurrent-peers. ``benches/random_peers.py`` describes the requirements of a first
run.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import random_peers
from cpu_peers import CHUNK

VOCABULARY = 248320
POSITIONS = 4864
"""The number of positions of every cache."""
BRANCHES = 8
DECODED = (10, 70)
"""The number of tokens that each branch has decoded, for each row of the table. After 70 tokens each branch has a
separate anchor."""
LONGEST = 64
"""The maximum tokens of a rewind."""


def _config() -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
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


MODEL = random_peers.RandomModel(
    folder="recurrent-peers",
    script=__file__,
    config=_config,
    converter=("qwen", "Qwen3_5TextModel"),
    vocabulary=VOCABULARY,
    positions=POSITIONS,
    options=("--no-mtp",),
)
PROGRAM = MODEL.contestants[0]


def read(program: Any, ids: list[int], first: int = 0) -> None:
    """Runs ``ids`` in steps of 512."""
    for begin in range(0, len(ids), CHUNK):
        tokens = ids[begin : begin + CHUNK]
        program.forward(tokens, range(first + begin, first + begin + len(tokens)))


def config() -> Any:
    """Returns the configuration of a cache for the program."""
    import etkv

    facts = etkv.read_kv_cache_metadata(PROGRAM.file)
    return etkv.CacheConfig(facts.layers, capacity=POSITIONS, recurrent_layers=facts.recurrent_layers)


def rewind(n_context: int, calls: int) -> None:
    """Prints the time of a rewind."""
    import etkv

    ids = MODEL.prompt_ids(n_context)
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

    ids = MODEL.prompt_ids(n_context)
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
    parser = random_peers.parser(__doc__, [128, 4096])
    parser.add_argument("--only", nargs="+", choices=topics, default=topics, help="what to measure (everything)")
    parser.add_argument("--calls", type=int, default=1000, metavar="N", help="number of rewinds (1000)")
    arguments = parser.parse_args()
    if MODEL.run_as_a_part(arguments):
        return
    if max(arguments.contexts) + max(arguments.decode, BRANCHES * DECODED[-1]) > POSITIONS:
        parser.error(f"--contexts plus --decode must not exceed {POSITIONS} positions")
    left_out = {}
    if "speed" in arguments.only:
        left_out = MODEL.speed(arguments)
    elif reason := MODEL.prepare(PROGRAM, arguments):
        left_out = {PROGRAM.name: reason}
    if PROGRAM.name not in left_out:
        if "rewind" in arguments.only:
            rewind(max(arguments.contexts), arguments.calls)
        if "fork" in arguments.only:
            fork(max(arguments.contexts))
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")


if __name__ == "__main__":
    main()
