"""Architectures with recurrent layers."""

from __future__ import annotations

from typing import Any

from etkv.export.gguf.decoder import Decoder, Family, Reader, Settings, embedding, expert_counts, reader, routing
from etkv.export.gguf.keys import Keys


def _mamba_sizes(keys: Keys) -> dict[str, int]:
    """Return the sizes of Mamba-2 layers: of the convolution, the state, the groups and the heads."""
    inner, heads = keys.positive("ssm.inner_size"), keys.positive("ssm.time_step_rank")
    if inner % heads:
        raise keys.refuse("ssm.time_step_rank", f"which does not divide {inner}, the size of its states")
    return {
        "conv": keys.positive("ssm.conv_kernel"),
        "state": keys.positive("ssm.state_size"),
        "groups": keys.positive("ssm.group_count"),
        "heads": heads,
        "head": inner // heads,
        "inner": inner,
    }


def _expand(keys: Keys, sizes: dict[str, int], hidden: int) -> int:
    """Return the width of states divided by the width of layers. Raises :class:`EtkvError` unless it is an integer."""
    if sizes["inner"] % hidden:
        raise keys.refuse("ssm.inner_size", f"which is not a multiple of the width, {hidden}")
    return sizes["inner"] // hidden


def _mamba2(keys: Keys) -> Family:
    sizes, (vocab_size, hidden) = _mamba_sizes(keys), embedding(keys)
    for name in ("attention.head_count", "feed_forward_length"):
        keys.only(name, 0, reason="but this architecture has only recurrent layers")
    keys.skip("context_length")
    return "mamba2", {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": keys.positive("block_count"),
        "num_heads": sizes["heads"],
        "head_dim": sizes["head"],
        "state_size": sizes["state"],
        "n_groups": sizes["groups"],
        "conv_kernel": sizes["conv"],
        "expand": _expand(keys, sizes, hidden),
        "layer_norm_epsilon": keys.epsilon("attention.layer_norm_rms_epsilon"),
        "use_bias": keys.has_tensor("blk.0.ssm_in.bias"),
        "use_conv_bias": keys.has_tensor("blk.0.ssm_conv1d.bias"),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
    }


def _granite_hybrid(decoder: Decoder) -> Family:
    keys, sizes = decoder.keys, _mamba_sizes(decoder.keys)
    # In this architecture the key determines whether layers rotate queries and keys.
    rotates = keys.flag("rope.scaling.finetuned", True)
    recurrent = next(layer for layer, heads in enumerate([*decoder.kv_heads_of_layers, 0]) if not heads)
    settings = decoder.llama_like() | decoder.multipliers() | decoder.attention_bias()
    settings |= {
        "layer_types": ["attention" if heads else "mamba" for heads in decoder.kv_heads_of_layers],
        "position_embedding_type": "rope" if rotates else None,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_d_conv": sizes["conv"],
        "mamba_d_state": sizes["state"],
        "mamba_n_groups": sizes["groups"],
        "mamba_n_heads": sizes["heads"],
        "mamba_d_head": sizes["head"],
        "mamba_expand": _expand(keys, sizes, decoder.hidden),
        "mamba_conv_bias": keys.has_tensor(f"blk.{recurrent}.ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has_tensor(f"blk.{recurrent}.ssm_in.bias"),
    }
    if not keys.integer("expert_count", 0):
        keys.skip("expert_used_count")
        width = settings["intermediate_size"]
        keys.only("expert_shared_feed_forward_length", 0, width, reason=f"but feed-forward blocks have width {width}")
        return "granitemoehybrid", settings | {"shared_intermediate_size": width}
    settings |= decoder.experts("num_local_experts", normalized=True)
    width = keys.positive("expert_shared_feed_forward_length")
    return "granitemoehybrid", settings | {"shared_intermediate_size": width}


def _nemotron_h(decoder: Decoder) -> Family:
    keys, sizes, kinds = decoder.keys, _mamba_sizes(decoder.keys), _nemotron_kinds(decoder)
    # Attention layers do not rotate queries and keys. The key is then false, as in Granite's files.
    unrotated = {"scaling.finetuned": False, "dimension_count": decoder.head_dim, "freq_base": 10000.0}
    for name, value in unrotated.items():
        keys.only(f"rope.{name}", value, reason="but this architecture has no rotary embedding")

    def in_any_layer(tensor: str) -> bool:
        return any(keys.has_tensor(f"blk.{layer}.{tensor}") for layer in range(decoder.layers))

    settings: dict[str, Any] = {
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden,
        "layers_block_type": kinds,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "max_position_embeddings": decoder.context,
        "layer_norm_epsilon": decoder.layer_norm(),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
        "conv_kernel": sizes["conv"],
        "ssm_state_size": sizes["state"],
        "n_groups": sizes["groups"],
        "mamba_num_heads": sizes["heads"],
        "mamba_head_dim": sizes["head"],
        "use_conv_bias": in_any_layer("ssm_conv1d.bias"),
        "use_bias": in_any_layer("ssm_in.bias"),
        "mlp_bias": in_any_layer("ffn_up.bias"),
        "attention_bias": in_any_layer("attn_q.bias"),
    }
    widths = keys.of_layers("feed_forward_length", decoder.layers)
    dense = {width for width, kind in zip(widths, kinds, strict=True) if kind == "mlp"}
    if len(dense) > 1:
        raise keys.refuse("feed_forward_length", "but the exporter supports one width for all blocks")
    if dense:
        settings["intermediate_size"] = dense.pop()
    return "nemotron_h", settings | (_nemotron_experts(keys) if "moe" in kinds else {})


def _nemotron_kinds(decoder: Decoder) -> list[str]:
    """Return the kind of each layer: experts, a feed-forward block, attention, or recurrent."""
    keys = decoder.keys
    kinds = []
    for layer in range(decoder.layers):
        block = "moe" if keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") else "mlp"
        is_block = keys.has_tensor(f"blk.{layer}.ffn_up.weight") or block == "moe"
        kinds.append(block if is_block else "mamba" if keys.has_tensor(f"blk.{layer}.ssm_in.weight") else "attention")
    reason = f"but by their tensors the layers are {', '.join(kinds[:8])}"
    widths = keys.of_layers("feed_forward_length", decoder.layers)
    if [bool(width) for width in widths] != [kind in ("moe", "mlp") for kind in kinds]:
        raise keys.refuse("feed_forward_length", reason)
    if [bool(heads) for heads in decoder.kv_heads_of_layers] != [kind == "attention" for kind in kinds]:
        raise keys.refuse("attention.head_count_kv", reason)
    return kinds


def _nemotron_experts(keys: Keys) -> Settings:
    settings = routing(keys, n_shared=1)
    keys.only("expert_gating_func", 0, 2, reason="but this architecture's router is a sigmoid (2)")
    keys.only("moe_latent_size", 0, reason="but the exporter reads experts without latents")
    return settings | {"moe_shared_expert_intermediate_size": keys.positive("expert_shared_feed_forward_length")}


def _falcon_h1(decoder: Decoder) -> Family:
    keys, sizes = decoder.keys, _mamba_sizes(decoder.keys)
    settings = decoder.llama_like() | decoder.biases()
    # In GGUF files the multipliers of the family are already applied to the weights.
    ones = ["lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_out_multiplier"]
    ones += ["attention_in_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"]
    return "falcon_h1", settings | dict.fromkeys(ones, 1.0) | {
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
        "mamba_d_ssm": sizes["inner"],
        "mamba_n_heads": sizes["heads"],
        "mamba_d_head": sizes["head"],
        "mamba_n_groups": sizes["groups"],
        "mamba_d_state": sizes["state"],
        "mamba_d_conv": sizes["conv"],
        "mamba_conv_bias": keys.has_tensor("blk.0.ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has_tensor("blk.0.ssm_in.bias"),
        "mamba_rms_norm": keys.has_tensor("blk.0.ssm_norm.weight"),
        # Models of the family, and llama.cpp, normalize after the gate.
        "mamba_norm_before_gate": False,
    }


def _short_convolutions(decoder: Decoder) -> Settings:
    """Return the settings that both families of LFM2 share."""
    keys = decoder.keys
    settings = decoder.llama_like()
    keys.only("attention.sliding_window", 0, reason="but transformers' LFM2 has no windows")
    return settings | {
        "layer_types": ["full_attention" if heads else "conv" for heads in decoder.kv_heads_of_layers],
        "conv_L_cache": keys.positive("shortconv.l_cache"),
        "norm_eps": settings.pop("rms_norm_eps"),
    }


def _lfm2(decoder: Decoder) -> Family:
    return "lfm2", _short_convolutions(decoder) | {"block_auto_adjust_ff_dim": False}


def _lfm2moe(decoder: Decoder) -> Family:
    keys, settings = decoder.keys, _short_convolutions(decoder)
    keys.only("expert_gating_func", 2, reason="but this architecture's router is a sigmoid (2)")
    count, used = expert_counts(keys)
    return "lfm2_moe", settings | {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "num_dense_layers": keys.integer("leading_dense_block_count", 0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in keys.file.tensors),
    }


def _delta(decoder: Decoder) -> Settings:
    """Return the settings of layers with the gated delta rule, and of layers with gated attention."""
    keys, settings = decoder.keys, decoder.llama_like(partial=True)
    recurrent = keys.flags_or_integer("attention.recurrent_layers", 0)
    # A file has a list of the recurrent layers, or the interval between attention layers.
    interval = keys.positive("full_attention_interval", 4)
    if not isinstance(recurrent, list):
        recurrent = [(layer + 1) % interval != 0 for layer in range(decoder.layers)]
    if len(recurrent) < decoder.layers:
        raise keys.refuse("attention.recurrent_layers", f"but the model has {decoder.layers} layers")
    heads, inner = keys.positive("ssm.time_step_rank"), keys.positive("ssm.inner_size")
    if inner % heads:
        raise keys.refuse("ssm.time_step_rank", f"which does not divide {inner}, the size of its states")
    return settings | {
        "layer_types": ["linear_attention" if kind else "full_attention" for kind in recurrent[: decoder.layers]],
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
        "linear_key_head_dim": keys.positive("ssm.state_size"),
        "linear_num_key_heads": keys.positive("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def _qwen_experts(decoder: Decoder) -> Settings:
    return decoder.experts(normalized=True) | {
        "moe_intermediate_size": decoder.keys.positive("expert_feed_forward_length"),
        "shared_expert_intermediate_size": decoder.keys.positive("expert_shared_feed_forward_length"),
    }


def _qwen3next(decoder: Decoder) -> Family:
    return "qwen3_next", _delta(decoder) | _qwen_experts(decoder) | {"norm_topk_prob": True}


def _qwen35(decoder: Decoder) -> Family:
    # In a text, all sections of frequencies have the same position.
    decoder.keys.skip("rope.dimension_sections")
    return "qwen3_5_text", _delta(decoder)


def _qwen35moe(decoder: Decoder) -> Family:
    return "qwen3_5_moe_text", _qwen35(decoder)[1] | _qwen_experts(decoder)


READERS: dict[str, Reader] = {
    "falcon-h1": reader(_falcon_h1),
    "granitehybrid": reader(_granite_hybrid, usual_head_dim=True, usual_scale=False, is_hybrid=True),
    "lfm2": reader(_lfm2, usual_head_dim=True, is_hybrid=True),
    "lfm2moe": reader(_lfm2moe, usual_head_dim=True, is_hybrid=True),
    "mamba2": _mamba2,
    "nemotron_h": reader(_nemotron_h, is_hybrid=True),
    "nemotron_h_moe": reader(_nemotron_h, is_hybrid=True),
    "qwen35": reader(_qwen35, is_hybrid=True),
    "qwen35moe": reader(_qwen35moe, is_hybrid=True),
    "qwen3next": reader(_qwen3next, is_hybrid=True),
}
