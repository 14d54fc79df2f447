"""GGUF files of models with mixtures of experts, latent attention or recurrent layers, for ``CASES`` of
``test_gguf_architectures.py``.
"""

from __future__ import annotations

import gguf_gemma_cases
from tiny_gguf import Case

ROPE = {"rope_type": "default", "rope_theta": 5000.0}
PARTIAL = {**ROPE, "partial_rotary_factor": 0.5}
QUARTER = {**ROPE, "partial_rotary_factor": 0.25}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_KEYS = {
    ".rope.scaling.type": "yarn",
    ".rope.scaling.factor": 4.0,
    ".rope.scaling.original_context_length": 64,
}

SHORT, LONG = [1.0 + 0.1 * index for index in range(8)], [2.0 + 0.5 * index for index in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 64,
}
LONGROPE_TENSORS = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}

LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
ROUTED_KEYS = {
    ".expert_gating_func": 2,
    ".expert_shared_count": 1,
    ".expert_group_count": 2,
    ".expert_group_used_count": 1,
    ".leading_dense_block_count": 1,
    ".expert_weights_norm": True,
    ".expert_weights_scale": 1.5,
}
"""Experts in groups, as in DeepSeek's models."""

LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
LATENT_KEYS = {
    ".attention.q_lora_rank": 32,
    ".attention.kv_lora_rank": 32,
    ".attention.head_count_kv": 1,
    ".attention.key_length": 40,
    ".attention.value_length": 32,
    ".attention.key_length_mla": 24,
    ".attention.value_length_mla": 12,
    ".rope.dimension_count": 8,
}

SSM_KEYS = {
    ".ssm.conv_kernel": 4,
    ".ssm.state_size": 16,
    ".ssm.group_count": 2,
    ".ssm.inner_size": 128,
    ".ssm.time_step_rank": 8,
}
MAMBA = {
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
}
NEMOTRON_H = {
    "conv_kernel": 4,
    "ssm_state_size": 16,
    "n_groups": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "head_dim": 16,
    "num_hidden_layers": None,
    "rope_parameters": None,
}

DELTA = {
    "head_dim": 32,
    "rope_parameters": QUARTER,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DELTA_KEYS = {
    ".ssm.conv_kernel": 4,
    ".ssm.state_size": 16,
    ".ssm.group_count": 2,
    ".ssm.time_step_rank": 4,
    ".ssm.inner_size": 128,
    ".full_attention_interval": 2,
}
QWEN_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 96}

CASES: dict[str, Case] = {
    **gguf_gemma_cases.CASES,
    "gpt-oss": Case(
        "gpt_oss",
        {**LOCAL_EXPERTS, "head_dim": 16, "sliding_window": 24, "rope_parameters": {**YARN, "truncate": False}},
        YARN_KEYS | {".expert_feed_forward_length": 128, ".attention.sliding_window": 24},
    ),
    "glm4": Case("glm4", {"head_dim": 16, "rope_parameters": PARTIAL}),
    "chatglm": Case("glm", {"head_dim": 16, "rope_parameters": PARTIAL}),
    "hunyuan-dense": Case("hunyuan_v1_dense", {"head_dim": 16}),
    "jais2": Case("jais2", {"head_dim": 16}),
    "starcoder": Case(
        "gpt_bigcode",
        {"num_key_value_heads": None, "intermediate_size": None, "n_inner": 96, "rope_parameters": None},
        {".attention.head_count_kv": 1},
    ),
    "glm4moe": Case(
        "glm4_moe", {**ROUTED, "rope_parameters": PARTIAL, "use_qk_norm": True, "attention_bias": True}, ROUTED_KEYS
    ),
    "dots1": Case("dots1", {**ROUTED, "layer_types": ["full_attention"] * 2}, ROUTED_KEYS),
    "exaone-moe": Case(
        "exaone_moe",
        {
            **{name: value for name, value in ROUTED.items() if not name.startswith("n_")},
            **{"num_experts": 4, "num_shared_experts": 1, "sliding_window": 24, "n_group": 2},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        ROUTED_KEYS | {".attention.sliding_window": 24, ".attention.sliding_window_pattern": [True, False]},
    ),
    "ernie4_5-moe": Case(
        "ernie4_5_moe",
        {
            **{"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 32},
            **{"moe_layer_start_index": 1, "moe_layer_end_index": 1},
        },
        {
            **{".expert_count": 4, ".expert_used_count": 2, ".expert_shared_count": 2},
            **{".expert_feed_forward_length": 32, ".expert_shared_feed_forward_length": 64},
            **{".leading_dense_block_count": 1, ".interleave_moe_layer_step": 1},
        },
    ),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
        {".expert_used_count": 2, ".expert_feed_forward_length": 128, ".expert_shared_feed_forward_length": 128},
    ),
    "minimax-m2": Case(
        "minimax_m2",
        {**LOCAL_EXPERTS, "head_dim": 16, "rope_parameters": PARTIAL},
        {".expert_feed_forward_length": 128, ".expert_gating_func": 2},
    ),
    "afmoe": Case(
        "afmoe",
        {
            **EXPERTS,
            **{
                "num_shared_experts": 1,
                "num_dense_layers": 1,
                "route_scale": 1.5,
                "head_dim": 16,
                "sliding_window": 24,
                "mup_enabled": True,
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {
            **{".expert_shared_count": 1, ".leading_dense_block_count": 1, ".expert_weights_scale": 1.5},
            **{".attention.sliding_window": 24, ".attention.sliding_window_pattern": [True, False]},
        },
    ),
    "deepseek2": Case(
        "deepseek_v3",
        {**ROUTED, **LATENT, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8}},
        ROUTED_KEYS | LATENT_KEYS | YARN_KEYS | {".rope.scaling.yarn_log_multiplier": 0.08},
    ),
    "deepseek2, softmax": Case(
        "deepseek_v2",
        {**ROUTED, **LATENT, "q_lora_rank": None, "norm_topk_prob": False, "topk_method": "group_limited_greedy"},
        ROUTED_KEYS
        | LATENT_KEYS
        | {".attention.q_lora_rank": None, ".expert_gating_func": None, ".expert_weights_norm": None},
    ),
    "minicpm3": Case(
        "minicpm3",
        {**LATENT, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        {
            **{".attention.q_lora_rank": 32, ".attention.kv_lora_rank": 32, ".rope.dimension_count": 8},
            **{".attention.key_length": 24, ".attention.value_length": None},
        },
    ),
    "granitehybrid": Case(
        "granitemoehybrid",
        {
            **MAMBA,
            **LOCAL_EXPERTS,
            **{
                "layer_types": ["mamba", "attention"],
                "shared_intermediate_size": 48,
                "attention_multiplier": 0.3,
                "embedding_multiplier": 3.0,
            },
            **{"residual_multiplier": 0.5, "logits_scaling": 2.0, "position_embedding_type": None},
        },
        SSM_KEYS
        | {
            **{".attention.head_count_kv": [0, 2], ".rope.scaling.finetuned": False, ".attention.scale": 0.3},
            **{".embedding_scale": 3.0, ".residual_scale": 0.5, ".logit_scale": 2.0},
        },
    ),
    "granitehybrid, dense": Case(
        "granitemoehybrid",
        {
            **MAMBA,
            **{"layer_types": ["mamba", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0},
            **{"shared_intermediate_size": 48, "attention_multiplier": 0.25, "position_embedding_type": "rope"},
        },
        SSM_KEYS
        | {
            **{".attention.head_count_kv": [0, 2], ".rope.scaling.finetuned": True},
            **{".feed_forward_length": 48, ".expert_shared_feed_forward_length": 48},
        },
    ),
    "nemotron_h": Case(
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["mamba", "mlp", "attention"]},
        SSM_KEYS
        | {
            **{".block_count": 3, ".attention.head_count_kv": [0, 0, 2], ".feed_forward_length": [0, 128, 0]},
            **{".rope.scaling.finetuned": False, ".attention.layer_norm_epsilon": 1e-5},
            **dict.fromkeys((".expert_count", ".expert_used_count", ".expert_feed_forward_length")),
        },
    ),
    "nemotron_h_moe": Case(
        "nemotron_h",
        {
            **NEMOTRON_H,
            **{"layers_block_type": ["mamba", "moe", "attention", "mlp"], "n_routed_experts": 4, "n_group": 2},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48},
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.5, "topk_group": 1},
        },
        SSM_KEYS
        | {
            **{".block_count": 4, ".attention.head_count_kv": [0, 0, 2, 0], ".feed_forward_length": [0, 32, 0, 128]},
            **{".rope.scaling.finetuned": False, ".attention.layer_norm_epsilon": 1e-5, ".expert_shared_count": 1},
            **{".expert_shared_feed_forward_length": 48, ".expert_weights_norm": True, ".expert_weights_scale": 1.5},
            **{".expert_group_count": 2, ".expert_group_used_count": 1},
        },
    ),
    "falcon-h1": Case(
        "falcon_h1",
        {
            **MAMBA,
            **{"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 16},
        },
        SSM_KEYS,
    ),
    "mamba2": Case(
        "mamba2",
        {
            **{"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "conv_kernel": 4, "expand": 2},
            **{"rope_parameters": None, "intermediate_size": None, "num_attention_heads": None},
            "num_key_value_heads": None,
        },
        SSM_KEYS
        | {
            **{".attention.head_count": 0, ".feed_forward_length": 0, ".attention.layer_norm_rms_epsilon": 1e-5},
            **{".attention.key_length": None, ".attention.value_length": None, ".attention.layer_norm_epsilon": None},
        },
    ),
    "llama4": Case(
        "llama4_text",
        {
            **{"intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1},
            **{"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "head_dim": 16},
        },
        {
            **{".feed_forward_length": 96, ".expert_feed_forward_length": 32, ".interleave_moe_layer_step": 2},
            ".attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "llama4, all layers alike": Case(
        "llama4_text",
        {
            **{"intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"head_dim": 16, "no_rope_layers": [1, 1], "layer_types": ["full_attention"] * 2},
        },
        {
            **{".feed_forward_length": 96, ".expert_feed_forward_length": 32, ".interleave_moe_layer_step": 1},
            **{".attention.layer_norm_rms_epsilon": 1e-5, ".attention.sliding_window": 0},
        },
    ),
    "phimoe": Case(
        "phimoe",
        {**LOCAL_EXPERTS, "attention_bias": True, "lm_head_bias": True},
        {".attention.sliding_window": 0},
    ),
    "phimoe, long": Case(
        "phimoe",
        {
            **LOCAL_EXPERTS,
            **{"attention_bias": True, "lm_head_bias": True},
            "rope_parameters": {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.2},
        },
        {
            **{".rope.scaling.original_context_length": 64, ".rope.scaling.attn_factor": 1.2},
            ".attention.sliding_window": 0,
        },
        LONGROPE_TENSORS,
    ),
    "lfm2": Case(
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {
            **{".attention.head_count_kv": [0, 2], ".shortconv.l_cache": 3},
            ".attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "lfm2moe": Case(
        "lfm2_moe",
        {
            **EXPERTS,
            **{"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        },
        {
            **{".attention.head_count_kv": [0, 2], ".shortconv.l_cache": 3, ".leading_dense_block_count": 1},
            **{".expert_gating_func": 2, ".attention.layer_norm_rms_epsilon": 1e-5},
        },
    ),
    "qwen3next": Case("qwen3_next", {**DELTA, **QWEN_EXPERTS, "norm_topk_prob": True}, DELTA_KEYS),
    "qwen35": Case("qwen3_5_text", DELTA, DELTA_KEYS | {".rope.dimension_sections": [2, 1, 1, 0]}),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        {**DELTA, **QWEN_EXPERTS},
        DELTA_KEYS | {".attention.recurrent_layers": [True, False], ".full_attention_interval": None},
    ),
}
