"""Compares etkv with llama.cpp on the CPU on a model of a billion parameters.

The model has the shapes of Llama-3.2-1B and random weights, the same on both sides. Its head is tied to its
embedding, which has a fifth of all weights.

The comparison works as in ``benches/cpu_peers.py``: contestants run in turns, each round in a separate process that
answers twice; the second answer counts. The output has medians of the rounds and ratios of medians. For speed a ratio
above 1 favours etkv, for memory a ratio below 1. etkv runs 8da4w and bfloat16. llama.cpp runs q4_0 (its quantizer
gives the embedding and the head 6 bits), q4_0 for every matrix (q4_0-pure), and bfloat16.

The files take 9 GB in build/models/dense-peers. ``benches/random_peers.py`` describes the requirements of a first
run.
"""

from __future__ import annotations

from typing import Any

import random_peers

VOCABULARY = 128256
POSITIONS = 2304
"""The number of positions of every cache."""


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )


MODEL = random_peers.RandomModel(
    folder="dense-peers",
    script=__file__,
    config=_config,
    converter=("llama", "LlamaModel"),
    vocabulary=VOCABULARY,
    positions=POSITIONS,
    bf16=True,
)


if __name__ == "__main__":
    MODEL.main(__doc__, [128, 512, 2048])
