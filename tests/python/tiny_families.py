"""Tiny configurations of every family of causal language models in transformers."""

from __future__ import annotations

from typing import Any

LAYERS = 2

_SIZES: dict[int | float, tuple[str, ...]] = {
    320: ("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"),
    64: (
        *("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim", "word_embed_proj_dim"),
        *(
            "input_embedding_size",
            "output_embedding_size",
            "backbone_hidden_size",
            "attention_hidden_size",
            "lru_width",
        ),
        *("shared_intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
        *("shared_experts_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        *("floor_scale", "pronunciation_vocab_size", "shape_vocab_size", "num_centroids"),
    ),
    128: (
        *("intermediate_size", "ffn_hidden_size", "dff", "dim_ff", "d_inner", "ffn_dim", "decoder_ffn_dim"),
        *("encoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size", "mamba_d_ssm"),
    ),
    LAYERS: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
        *("num_blocks", "encoder_layers", "num_encoder_layers", "num_layers_per_stack", "max_window_layers"),
        *("sliding_window_pattern", "_sliding_window_pattern", "num_query_groups", "num_kv_heads"),
        *("num_key_value_heads", "swa_num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk"),
        *("moe_k", "zero_expert_num", "o_groups", "index_n_heads", "linear_num_key_heads", "linear_num_value_heads"),
        *("type_vocab_size", "n_layers_per_attn_res_block", "split_ngram_parts", "heads_per_ngram"),
        "index_topk_blocks",
    ),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"),
        *("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"),
        *("swa_num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("prompt_length", "linear_num_heads", "centroid_intermediate_top_k"),
    ),
    16: (
        *("head_dim", "swa_head_dim", "dim_head", "d_head", "kv_channels", "attention_head_size", "global_head_dim"),
        *("attention_head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "index_topk", "state_size"),
        *("mamba_d_state", "mamba_d_head", "mamba_head_dim", "ssm_state_size", "linear_key_head_dim", "laurel_rank"),
        *("linear_value_head_dim", "hidden_size_per_layer_input", "query_pre_attn_scalar", "mamba_headdim"),
        *("patch_size", "pronunciation_embed_dim", "shape_embed_dim", "hc_lowrank", "ple_embed_dim", "linear_head_dim"),
        "prompt_mid_dim",
    ),
    8: (
        *("rotary_dim", "qk_rope_head_dim", "mamba_n_heads", "mamba_num_heads", "d_rel", "gated_norm_rank"),
        *("time_step_rank", "adapter_rank", "make_ngram_vocab_size_divisible_by", "index_block_size"),
    ),
    24: (
        *("sliding_window", "sliding_window_size", "window_size", "local_attention", "attention_window_size"),
        *("attention_chunk_size", "qk_head_dim", "rel_extent"),
    ),
    32: ("kv_lora_rank", "q_lora_rank", "o_lora_rank", "dim_model_base", "router_hidden_size", "image_size"),
    1: (
        *("topk_group", "n_group", "num_expert_group", "n_shared_experts", "num_shared_experts"),
        *("moe_num_shared_experts", "first_k_dense_replace", "num_dense_layers", "moe_layer_end_index", "cross_attn_k"),
    ),
    0: ("num_kv_shared_layers", "num_nextn_predict_layers"),
    256: (
        *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length"),
        *("max_target_positions", "bos_token_id", "cls_token_id"),
    ),
    257: ("eos_token_id", "pad_token_id", "sep_token_id"),
    100: ("encoder_hash_byte_group_vocab",),
    1000: ("ngram_vocab_size_base",),
    # With random weights of this size, logits of different tokens differ clearly.
    0.2: ("initializer_range", "init_std"),
}
"""A small size -> the entries of configurations that are set to it, if they are numbers."""

_TINY = {name: size for size, names in _SIZES.items() for name in names}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOW_FIRST = ["sliding_attention", "full_attention"]
_MIX = ["linear_attention", "full_attention"]

_OWN: dict[str, dict[str, Any]] = {
    **{name: {"pad_token_id": 1} for name in ("camembert", "data2vec-text", "prophetnet", "roberta", "roc_bert")},
    **{name: {"pad_token_id": 1} for name in ("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": _WINDOW_FIRST, "rope_parameters": dict.fromkeys(_WINDOW_FIRST, _ROPE)},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"intermediate_size": [128] * LAYERS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "granitemoehybrid": {"layer_types": _MIX},
    **{name: {"layer_types": ["conv", "full_attention"]} for name in ("lfm2", "lfm2_moe")},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16},
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"num_hidden_layers": 54, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further settings that some families need."""


_DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}
_IN_TURN = ["sliding_attention", "full_attention"] * 2

_SCALED = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16},
    **{"max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "llama_4_scaling_beta": 0.3,
}

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere, norms of heads": ("cohere", {"use_qk_norm": True}),
    "deepseek_v3, groups of experts": (
        "deepseek_v3",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    ),
    "falcon_h1, norms": ("falcon_h1", {"mamba_rms_norm": True}),
    "gemma3n_text, sparse": (
        "gemma3n_text",
        {
            **{
                "num_hidden_layers": 4,
                "intermediate_size": [128] * 4,
                "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            },
            **{"layer_types": _IN_TURN, "num_kv_shared_layers": 2},
        },
    ),
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    ),
    "gemma4_text, keys as values": ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_text, shared layers": (
        "gemma4_text",
        {
            **{"num_hidden_layers": 4, "layer_types": _IN_TURN, "num_kv_shared_layers": 2},
            "use_double_wide_mlp": True,
        },
    ),
    "granitemoehybrid, dense": ("granitemoehybrid", _DENSE),
    "granitemoehybrid, rotary": (
        "granitemoehybrid",
        {**_DENSE, "layer_types": ["full_attention"] * LAYERS, "position_embedding_type": "rope"},
    ),
    "minimax, windows": ("minimax", {"sliding_window": 24}),
    "llama4_text, scaled queries": (
        "llama4_text",
        {"no_rope_layers": [0, 1], "layer_types": ["full_attention", "chunked_attention"], "floor_scale": 8},
    ),
    "ministral3, scaled queries": ("ministral3", {"rope_parameters": _SCALED}),
    "mistral4, scaled queries": ("mistral4", {"rope_parameters": _SCALED}),
    "qwen3_next, dense": ("qwen3_next", {"mlp_only_layers": [0, 1]}),
}
"""Variants of families that published models use -> the family, and changes to its tiny configuration."""


def names() -> list[str]:
    """Return the families of causal language models of the installed transformers, and :data:`FORMS`.

    transformers lists Mistral 4 among models for images.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral4", *FORMS})


def config(name: str, **changes: Any) -> Any:
    """Return the tiny configuration of a family, or of one of :data:`FORMS`.

    Raises what transformers raises for the configuration.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family, own = FORMS.get(name, (name, {}))
    return _shrunk(CONFIG_MAPPING[family], **own, **changes)


def whole(family: str, **changes: Any) -> Any:
    """Return the tiny configuration of any ``family``, such as a family for text and images."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _shrunk(CONFIG_MAPPING[family], **changes)


def _shrunk(cls: Any, **changes: Any) -> Any:
    default = cls()
    entries = default.__dict__
    given: dict[str, Any] = {}
    for name, size in _TINY.items():
        had = entries.get(name)
        is_number = isinstance(had, int | float) and not isinstance(had, bool)
        if name not in default.attribute_map and (is_number or (isinstance(had, list) and name.endswith("_token_id"))):
            given[name] = size
    if "kv_lora_rank" in given:
        # Every head has its own keys, and rotates a part of each key.
        given |= {"num_key_value_heads": _TINY["num_attention_heads"], "head_dim": _TINY["qk_rope_head_dim"]}
        given = {name: value for name, value in given.items() if name in entries}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            given[name] = _shrunk(type(part)).to_dict()
    own = _OWN.get(default.model_type, {})
    return cls(**{**given, **_kinds(entries), **own, **changes})


def _kinds(entries: dict[str, Any]) -> dict[str, Any]:
    """Return settings with one layer of each kind that the layers of a default configuration have."""
    given: dict[str, Any] = {}
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(entries.get(name) or []))
        if len(kinds) > 1:
            given[name] = kinds
    lists = [len(kinds) for kinds in given.values()]
    layers = max([LAYERS, *lists])
    given = {name: kinds + kinds[-1:] * (layers - len(kinds)) for name, kinds in given.items()}
    return given | ({"num_hidden_layers": layers} if layers > LAYERS else {})
