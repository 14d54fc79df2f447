"""GGUF files of Gemma 3n and 4, for ``CASES`` of ``test_gguf_architectures.py``."""

from __future__ import annotations

import math

from tiny_gguf import Case

GEMMA4 = {
    **{"head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "hidden_size_per_layer_input": 16},
    **{"layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 320},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
GEMMA4_KEYS = {
    **{".attention.key_length": 32, ".attention.value_length": 32, ".attention.sliding_window": 24},
    **{".attention.key_length_swa": 16, ".attention.value_length_swa": 16, ".rope.freq_base_swa": 5000.0},
    **{".attention.sliding_window_pattern": [True, False], ".embedding_length_per_layer_input": 16},
    **{".rope.dimension_count": 32, ".rope.dimension_count_swa": 16, ".attention.layer_norm_rms_epsilon": 1e-6},
}

CASES = {
    "gemma3n": Case(
        "gemma3n_text",
        {
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 8},
            **{"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "num_kv_shared_layers": 2, "head_dim": 16},
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320, "sliding_window": 24},
            **{"intermediate_size": [96] * 4, "altup_active_idx": 1},
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        {
            **{".attention.sliding_window": 24, ".attention.sliding_window_pattern": [True, False] * 2},
            **{".attention.shared_kv_layers": 2, ".rope.freq_base_swa": 5000.0, ".altup.active_idx": 1},
            **{".altup.num_inputs": 4, ".embedding_length_per_layer_input": 16, ".final_logit_softcapping": 30.0},
            ".activation_sparsity_scale": [1.6448534727096558, -math.inf, -math.inf, -math.inf],
            ".attention.layer_norm_rms_epsilon": 1e-6,
        },
        {"blk.2.attn_v.weight": [[0.0] * 64] * 32},
    ),
    "gemma4": Case("gemma4_text", GEMMA4, GEMMA4_KEYS, {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12}),
    "gemma4, shared layers": Case(
        "gemma4_text",
        GEMMA4
        | {
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
        },
        GEMMA4_KEYS
        | {
            **{".attention.shared_kv_layers": 2, ".feed_forward_length": [128, 128, 256, 256]},
            **{".attention.sliding_window_pattern": [True, False] * 2, ".final_logit_softcapping": 30.0},
        },
        # Files have these tensors, which no layer reads.
        {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12, "blk.2.attn_k.weight": [[0.0] * 64] * 32},
    ),
    "gemma4, experts": Case(
        "gemma4_text",
        GEMMA4
        | {
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
            **{"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        },
        GEMMA4_KEYS
        | {
            **{".expert_used_count": 2, ".attention.head_count_kv": [2, 1], ".embedding_length_per_layer_input": 0},
        },
        {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12},
    ),
}
