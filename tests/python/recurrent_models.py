"""Tiny models with recurrent layers: configurations of families with small sizes, and the models in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_families
import tiny_models

_MIX = ["linear_attention", "linear_attention", "full_attention"]

_OF_DELTA_RULE = {
    "num_hidden_layers": 3,
    "layer_types": _MIX,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}

_DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", _OF_DELTA_RULE),
    "qwen3-next": ("qwen3_next", {**_OF_DELTA_RULE, "mlp_only_layers": [0, 1, 2]}),
    "olmo-hybrid": ("olmo_hybrid", _OF_DELTA_RULE),
    "olmo-hybrid-positive": ("olmo_hybrid", {**_OF_DELTA_RULE, "linear_allow_neg_eigval": False}),
    "granite-4": ("granitemoehybrid", {**_DENSE, "num_hidden_layers": 3, "layer_types": _MIX}),
    "nemotron-h": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
    ),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1-norm": ("falcon_h1", {"mamba_rms_norm": True}),
    "bamba": ("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [2]}),
    "mamba-2": ("mamba2", {}),
    "lfm2": ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm3": ("lfm3", {}),
    # Windows and convolutions. Windows are as long as the steps of tests.
    "lfm3-window": (
        "lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "sliding_window": 100,
        },
    ),
    "zamba2": ("zamba2", {}),
    # Windows and a recurrence.
    "minimax": (
        "minimax",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "sliding_window": 100},
    ),
    "kimi-linear": ("kimi_linear", {}),
    "bailing-hybrid": ("bailing_hybrid", {}),
    "qwen3.5-moe": ("qwen3_5_moe_text", _OF_DELTA_RULE),
    "qwen3-next-moe": ("qwen3_next", _OF_DELTA_RULE),
    "granite-4-moe": ("granitemoehybrid", {"num_hidden_layers": 3, "layer_types": _MIX}),
    "lfm2-moe": ("lfm2_moe", {}),
    # Models without attention.
    "qwen3.5-recurrent": ("qwen3_5_text", {**_OF_DELTA_RULE, "layer_types": ["linear_attention"] * 3}),
    "kimi-recurrent": ("kimi_linear", {"layer_types": ["linear_attention"] * 2}),
    "minimax-recurrent": ("minimax", {"layer_types": ["linear_attention"] * 2}),
    "lfm2-recurrent": ("lfm2", {"layer_types": ["conv", "conv"]}),
    "nemotron-h-recurrent": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "linear_attention"]},
    ),
}
"""Name -> family of transformers, and changes to the settings of its tiny model."""


def config(name: str) -> Any:
    """Return the configuration of ``name``, a key of :data:`FAMILIES`."""
    family, changes = FAMILIES[name]
    return tiny_families.config(family, **changes)


def model(name: str, seed: int = 0) -> Any:
    """Return the model ``name`` with random weights in float32, with transformers' own attention."""
    import tiny_programs
    from etkv.export import attention

    attention.register()
    family, changes = FAMILIES[name]
    return tiny_programs.model(family, seed, **changes)


def write(name: str, folder: Path) -> Path:
    """Write the model ``name`` with a tokenizer as a Hugging Face folder, and return the folder."""
    model(name).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder
