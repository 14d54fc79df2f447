"""Compares etkv with llama.cpp on the CPU on a mixture of experts.

The model has four of the 48 layers of Qwen3-30B-A3B, and random weights, the same on both sides. Each layer has 128
experts, eight per token; all experts have 2.4 billion weights. The vocabulary is small, so that the layers take most
of the time.

The comparison works as in ``benches/cpu_peers.py``: contestants run in turns, each round in a separate process that
answers twice; the second answer counts. The output has medians of the rounds and ratios of medians. For speed a ratio
above 1 favours etkv, for memory a ratio below 1. etkv runs 8da4w. llama.cpp runs q4_0 (its quantizer gives the
embedding and the head 6 bits), and q4_0 for every matrix (q4_0-pure).

The files take 13 GB in build/models/experts-peers. ``benches/random_peers.py`` describes the requirements of a first
run.
"""

from __future__ import annotations

from typing import Any

import random_peers

VOCABULARY = 8192
POSITIONS = 1024
"""The number of positions of every cache."""


def _config() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        architectures=["Qwen3MoeForCausalLM"],
    )


MODEL = random_peers.RandomModel(
    folder="experts-peers",
    script=__file__,
    config=_config,
    converter=("qwen", "Qwen3MoeModel"),
    vocabulary=VOCABULARY,
    positions=POSITIONS,
)


if __name__ == "__main__":
    MODEL.main(__doc__, [128, 512])
