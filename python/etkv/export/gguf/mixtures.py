"""Architectures with mixtures of experts."""

from __future__ import annotations

from etkv.export.gguf.decoder import NO_WINDOW, Decoder, Family, Reader, expert_counts, reader

_WIDTH, _SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
"""The keys with the width of experts, and of the experts for all tokens."""


def _qwen2moe(decoder: Decoder) -> Family:
    keys = decoder.keys
    settings = decoder.llama_like() | decoder.experts(normalized=False, fixed=False) | NO_WINDOW
    settings["moe_intermediate_size"] = keys.positive(_WIDTH)
    settings["shared_expert_intermediate_size"] = keys.positive(_SHARED_WIDTH)
    return "qwen2_moe", settings | decoder.query_bias("qkv_bias")


def _qwen3moe(decoder: Decoder) -> Family:
    settings = decoder.llama_like() | decoder.experts(normalized=True, fixed=False) | NO_WINDOW
    settings["moe_intermediate_size"] = decoder.keys.positive(_WIDTH)
    return "qwen3_moe", settings | decoder.attention_bias()


def _granitemoe(decoder: Decoder) -> Family:
    experts = decoder.experts("num_local_experts", normalized=True)
    settings = decoder.llama_like() | decoder.multipliers() | decoder.attention_bias() | experts
    if decoder.keys.has(_SHARED_WIDTH):
        return "granitemoeshared", settings | {"shared_intermediate_size": decoder.keys.positive(_SHARED_WIDTH)}
    return "granitemoe", settings


def _olmoe(decoder: Decoder) -> Family:
    settings = decoder.llama_like() | decoder.experts(normalized=False, fixed=False)
    decoder.keys.only(_WIDTH, settings["intermediate_size"], reason="but experts differ in width")
    return "olmoe", settings


def _width(decoder: Decoder) -> int:
    """Return the width of experts, for families with one setting for experts and feed-forward blocks."""
    keys = decoder.keys
    width = keys.positive(_WIDTH, keys.integer("feed_forward_length", 0) or None)
    keys.only("feed_forward_length", width, reason=f"but experts, the only blocks here, have a width of {width}")
    return width


def _gpt_oss(decoder: Decoder) -> Family:
    keys, settings = decoder.keys, decoder.llama_like() | decoder.window(2) | decoder.query_bias()
    settings["intermediate_size"] = _width(decoder)
    # The softmax is over the logits of the chosen experts only.
    keys.only("expert_gating_func", 0, 3, reason="but this architecture's router is a softmax of chosen experts (3)")
    settings["num_local_experts"], settings["num_experts_per_tok"] = expert_counts(keys)
    keys.only("rope.freq_base_swa", settings["rope_parameters"]["rope_theta"], reason="but all layers have one base")
    if settings["rope_parameters"]["rope_type"] == "yarn":
        # The value of the published models. There is no key for it.
        settings["rope_parameters"]["truncate"] = False
    return "gpt_oss", settings


def _glm4moe(decoder: Decoder) -> Family:
    settings = decoder.llama_like(partial=True) | decoder.routed_experts() | decoder.query_bias()
    decoder.keys.skip("rope.dimension_sections")
    return "glm4_moe", settings | {"use_qk_norm": decoder.keys.has_tensor("blk.0.attn_q_norm.weight")}


def _dots1(decoder: Decoder) -> Family:
    settings = decoder.llama_like() | decoder.routed_experts() | decoder.query_bias()
    return "dots1", settings | {"sliding_window": None, "layer_types": ["full_attention"] * decoder.layers}


def _exaone_moe(decoder: Decoder) -> Family:
    settings = decoder.llama_like() | decoder.routed_experts()
    settings["num_experts"] = settings.pop("n_routed_experts")
    settings["num_shared_experts"] = settings.pop("n_shared_experts")
    return "exaone_moe", settings | decoder.window(4)


def _ernie4_5_moe(decoder: Decoder) -> Family:
    keys, experts = decoder.keys, decoder.experts("moe_num_experts", "moe_k", normalized=True)
    shared, width = keys.integer("expert_shared_count", 0), keys.positive(_WIDTH)
    reason = f"but there are {shared} experts of width {width}"
    keys.only(_SHARED_WIDTH, shared * width, width, reason=reason)
    settings = {
        "moe_num_shared_experts": shared,
        "moe_intermediate_size": width,
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0),
        "moe_layer_interval": keys.positive("interleave_moe_layer_step", 1),
        "moe_layer_end_index": decoder.layers - 1,
    }
    return "ernie4_5_moe", decoder.llama_like() | experts | settings | decoder.query_bias("use_bias")


def _hunyuan_moe(decoder: Decoder) -> Family:
    keys, experts = decoder.keys, decoder.experts(used_name="moe_topk", normalized=True)
    settings = decoder.llama_like() | experts | decoder.query_bias()
    settings["intermediate_size"] = _width(decoder)
    keys.only(_SHARED_WIDTH, settings["intermediate_size"], reason="but experts differ in width")
    keys.only("expert_shared_count", 1, reason="but this architecture has one expert for all tokens")
    return "hunyuan_v1_moe", settings


_NOT_IN_MINIMAX = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
}
"""Settings of experts that the architecture lacks -> the values without effect."""


def _minimax_m2(decoder: Decoder) -> Family:
    keys, settings = decoder.keys, decoder.llama_like(partial=True) | decoder.routed_experts()
    settings["num_local_experts"] = settings.pop("n_routed_experts")
    settings["intermediate_size"] = _width(decoder)
    settings.pop("moe_intermediate_size")
    # transformers has no such settings in this family.
    keys.only("expert_weights_norm", True, reason="but this architecture's weights of experts add up to 1")
    for name, neutral in _NOT_IN_MINIMAX.items():
        if settings.pop(name) != neutral:
            raise keys.refuse("expert_count", f"and {name}, which this architecture's experts do not have")
    settings.pop("norm_topk_prob")
    return "minimax_m2", settings


def _afmoe(decoder: Decoder) -> Family:
    keys, settings = decoder.keys, decoder.llama_like() | decoder.routed_experts()
    # transformers always normalizes the weights of a token's experts.
    keys.only("expert_weights_norm", True, reason="but this architecture's weights of experts add up to 1")
    for name in ("norm_topk_prob", "n_group", "topk_group"):
        settings.pop(name)
    for name in ("expert_group_count", "expert_group_used_count"):
        keys.only(name, 0, 1, reason="but this architecture has no groups of experts")
    renamed = {
        "num_experts": settings.pop("n_routed_experts"),
        "num_shared_experts": settings.pop("n_shared_experts"),
        "route_scale": settings.pop("routed_scaling_factor"),
        "num_dense_layers": settings.pop("first_k_dense_replace"),
    }
    # llama.cpp scales embeddings by the root of their width.
    return "afmoe", settings | renamed | decoder.window(4) | {"mup_enabled": True}


_CHUNK, _WITHOUT_ROPE = 8192, 4
"""Number of positions in a chunk of Llama 4, and the interval of layers without rotary embeddings. There are no keys
for these numbers.
"""


def _llama4(decoder: Decoder) -> Family:
    keys, settings = decoder.keys, decoder.llama_like() | decoder.attention_bias()
    settings["intermediate_size_mlp"] = settings.pop("intermediate_size")
    settings["intermediate_size"] = keys.positive(_WIDTH)
    # A sigmoid of the chosen experts' logits scales the inputs of these experts.
    keys.only("expert_gating_func", 0, 2, reason="but this architecture's router is a sigmoid (2)")
    settings["num_local_experts"], settings["num_experts_per_tok"] = expert_counts(keys)
    settings["interleave_moe_layer_step"] = keys.positive("interleave_moe_layer_step")
    # llama.cpp leaves out the norms of queries and keys in the model with 128 experts.
    settings["use_qk_norm"] = settings["num_local_experts"] != 128
    if keys.has("attention.sliding_window") and not keys.integer("attention.sliding_window"):
        # All layers have full attention and rotary embeddings.
        settings |= {"no_rope_layers": [1] * decoder.layers, "layer_types": ["full_attention"] * decoder.layers}
        return "llama4_text", settings
    keys.only("attention.sliding_window", _CHUNK, reason=f"but chunks of this architecture have {_CHUNK} positions")
    settings |= {"attention_chunk_size": _CHUNK, "no_rope_layer_interval": _WITHOUT_ROPE, "floor_scale": _CHUNK}
    return "llama4_text", settings | {"attn_scale": 0.1, "attn_temperature_tuning": True}


def _phimoe(decoder: Decoder) -> Family:
    settings = decoder.llama_like() | decoder.experts("num_local_experts", normalized=True)
    rotary = settings["rope_parameters"]
    decoder.only_long_rope(rotary, "Phi-MoE")
    if rotary["rope_type"] == "longrope":
        # One factor of cosines and sines, for short and long texts.
        rotary |= {"short_mscale": rotary["attention_factor"], "long_mscale": rotary["attention_factor"]}
    settings |= decoder.one_window() | decoder.attention_bias()
    return "phimoe", settings | {"lm_head_bias": decoder.keys.has_tensor("output.bias")}


READERS: dict[str, Reader] = {
    "afmoe": reader(_afmoe),
    "dots1": reader(_dots1),
    "ernie4_5-moe": reader(_ernie4_5_moe),
    "exaone-moe": reader(_exaone_moe),
    "glm4moe": reader(_glm4moe),
    "gpt-oss": reader(_gpt_oss),
    "hunyuan-moe": reader(_hunyuan_moe),
    "llama4": reader(_llama4),
    "minimax-m2": reader(_minimax_m2),
    "granitemoe": reader(_granitemoe, usual_head_dim=True, usual_scale=False),
    "olmoe": reader(_olmoe),
    "phimoe": reader(_phimoe, usual_head_dim=True),
    "qwen2moe": reader(_qwen2moe),
    "qwen3moe": reader(_qwen3moe),
}
