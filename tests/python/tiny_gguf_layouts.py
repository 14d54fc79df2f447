"""Weights that llama.cpp's converter stores under other names or in another layout than transformers, by architecture.

Each function converts a weight of a layer to tensors of the layer's block, as the converter does.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def stored(architecture: str, config: Any, name: str, weight: np.ndarray) -> Tensors | None:
    """Return the tensors for transformers' weight ``name``; None if the ``gguf`` package maps the name and the layout
    is unchanged.
    """
    layer = re.search(r"layers\.(\d+)\.(.*)", name)
    if layer is None:
        return {"output_norm.weight": weight + 1} if architecture in _DELTA and name == "model.norm.weight" else None
    made = None
    if architecture in _MAMBA:
        made = _mamba(config, layer[2], weight)
    renamed = _RENAMED.get(architecture, {}).get(layer[2].removeprefix("mixer."))
    if made is None and renamed:
        made = {renamed: weight}
    if made is None and architecture in _OF_LAYERS:
        made = _OF_LAYERS[architecture](config, layer[2], weight)
    if made is None and layer[2].endswith(("e_score_correction_bias", "expert_bias")):
        made = {"exp_probs_b.bias": weight}
    return None if made is None else {f"blk.{layer[1]}.{part}": values for part, values in made.items()}


def _mamba(config: Any, name: str, weight: np.ndarray) -> Tensors | None:
    match name.split(".", 1)[-1] if name.startswith(("mamba.", "mixer.")) else None:
        case "A_log":
            return {"ssm_a": -np.exp(weight)[:, None]}
        case "D":
            return {"ssm_d": weight[:, None]}
        case "dt_bias":
            return {"ssm_dt.bias": weight}
        case "conv1d.weight":
            return {"ssm_conv1d.weight": weight.squeeze(1)}
        case "norm.weight":
            return {"ssm_norm.weight": weight.reshape(getattr(config, "n_groups", 1), -1)}
        case "conv1d.bias":
            return {"ssm_conv1d.bias": weight}
        case "in_proj.weight" | "out_proj.weight" as part:
            return {f"ssm_{part.replace('_proj', '')}": weight}
    return None


def _granite_hybrid(config: Any, name: str, weight: np.ndarray) -> Tensors | None:
    kind = "_shexp" if config.num_local_experts else ""
    if name == "shared_mlp.input_linear.weight":
        gate, up = np.split(weight, 2)
        return {f"ffn_gate{kind}.weight": gate, f"ffn_up{kind}.weight": up}
    return {f"ffn_down{kind}.weight": weight} if name == "shared_mlp.output_linear.weight" else None


def _gpt_oss(config: Any, name: str, weight: np.ndarray) -> Tensors | None:
    match name:
        case "mlp.experts.gate_up_proj":
            rows = weight.swapaxes(1, 2)
            return {"ffn_gate_exps.weight": rows[:, ::2], "ffn_up_exps.weight": rows[:, 1::2]}
        case "mlp.experts.gate_up_proj_bias":
            return {"ffn_gate_exps.bias": weight[:, ::2], "ffn_up_exps.bias": weight[:, 1::2]}
        case "mlp.experts.down_proj":
            return {"ffn_down_exps.weight": weight.swapaxes(1, 2)}
        case "mlp.experts.down_proj_bias":
            return {"ffn_down_exps.bias": weight}
        case "mlp.router.weight" | "mlp.router.bias":
            return {f"ffn_gate_inp.{name.rsplit('.', 1)[1]}": weight}
        case "self_attn.sinks":
            return {"attn_sinks.weight": weight}
        case "post_attention_layernorm.weight":
            return {"post_attention_norm.weight": weight}
    return None


def _llama4(config: Any, name: str, weight: np.ndarray) -> Tensors | None:
    match name:
        case "feed_forward.experts.gate_up_proj":
            gate, up = np.split(weight.swapaxes(1, 2), 2, axis=1)
            return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
        case "feed_forward.experts.down_proj":
            return {"ffn_down_exps.weight": weight.swapaxes(1, 2)}
    return None


def _apertus(config: Any, name: str, weight: np.ndarray) -> Tensors | None:
    # These weights become keys of the file.
    return {} if ".act_fn." in name else None


def keys(architecture: str, weights: Tensors) -> dict[str, list[float]]:
    """Return the keys to which the converter changes some weights, with a number for each layer."""
    made: dict[str, list[float]] = {}
    for name, weight in sorted(weights.items()) if architecture == "apertus" else ():
        _, mark, part = name.partition(".act_fn.")
        if mark:
            made.setdefault(f"apertus.xielu.{part}", []).append(weight.item())
    return made


def _deepseek2(config: Any, name: str, weight: np.ndarray) -> Tensors | None:
    if name != "self_attn.kv_b_proj.weight":
        return None
    heads = weight.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": values}


def _convolution(config: Any, name: str, weight: np.ndarray) -> Tensors | None:
    return {"shortconv.conv.weight": weight.squeeze(1)} if name == "conv.conv.weight" else None


def _tiled(config: Any, values: np.ndarray, size: int) -> np.ndarray:
    """Return heads of values in another order: the first head of every head of keys, then the second head of each,
    and so on.
    """
    of_keys = config.linear_num_key_heads
    each = config.linear_num_value_heads // of_keys
    order = [key * each + number for number in range(each) for key in range(of_keys)]
    return np.concatenate([values[head * size : (head + 1) * size] for head in order])


def _delta(config: Any, name: str, weight: np.ndarray) -> Tensors | None:
    is_next = config.model_type == "qwen3_next"
    part = name.removeprefix("linear_attn.")

    def tiled(values: np.ndarray, size: int) -> np.ndarray:
        return values if is_next else _tiled(config, values, size)

    size = config.linear_value_head_dim
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    match part:
        case "A_log":
            return {"ssm_a": tiled(-np.exp(weight), 1)}
        case "dt_bias":
            return {"ssm_dt.bias": tiled(weight, 1)}
        case "conv1d.weight":
            flat = weight.squeeze(1)
            return {"ssm_conv1d.weight": np.concatenate([flat[:first], tiled(flat[first:], size)])}
        case "out_proj.weight":
            return {"ssm_out.weight": tiled(weight.T, size).T}
        case "in_proj_qkv.weight":
            return {"attn_qkv.weight": np.concatenate([weight[:first], tiled(weight[first:], size)])}
        case "in_proj_z.weight":
            return {"attn_gate.weight": tiled(weight, size)}
        case "in_proj_a.weight":
            return {"ssm_alpha.weight": tiled(weight, 1)}
        case "in_proj_b.weight":
            return {"ssm_beta.weight": tiled(weight, 1)}
        case "in_proj_ba.weight":
            return {"ssm_ba.weight": weight}
        case "in_proj_qkvz.weight":
            return _qkvz(config, weight)
        case "norm.weight":
            return {"ssm_norm.weight": weight}
        case "mlp.shared_expert_gate.weight":
            return {"ffn_gate_inp_shexp.weight": weight[0]}
        case "post_attention_layernorm.weight":
            return {"post_attention_norm.weight": weight + 1}
    return {"attn_norm.weight": weight + 1} if name == "input_layernorm.weight" else None


def _qkvz(config: Any, weight: np.ndarray) -> Tensors:
    """Return the rows of all heads concatenated by kind. In transformers, each head of keys has its queries, keys,
    values and gates together.
    """
    key = config.linear_key_head_dim
    values = config.linear_value_head_dim * config.linear_num_value_heads // config.linear_num_key_heads
    parts: list[list[np.ndarray]] = [[], [], [], []]
    for head in np.split(weight, config.linear_num_key_heads):
        for found, rows in zip(parts, np.split(head, [key, 2 * key, 2 * key + values]), strict=True):
            found.append(rows)
    return {
        "attn_qkv.weight": np.concatenate([np.concatenate(part) for part in parts[:3]]),
        "attn_gate.weight": np.concatenate(parts[3]),
    }


_NEMOTRON_H = {
    "norm.weight": "attn_norm.weight",
    "gate.weight": "ffn_gate_inp.weight",
    "experts.up_proj": "ffn_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "up_proj.weight": "ffn_up.weight",
    "down_proj.weight": "ffn_down.weight",
    "q_proj.weight": "attn_q.weight",
    "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight",
}
_RENAMED = {
    "gemma3n": {"altup.correct_output_scale": "altup_correct_scale.weight"},
    "gemma4": {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "router.proj.weight": "ffn_gate_inp.weight",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    },
    "glm4moe": {"post_attention_layernorm.weight": "post_attention_norm.weight"},
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}
"""Weights that are stored as they are, under another name."""

_MAMBA = ("falcon-h1", "granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe")
_DELTA = ("qwen35", "qwen35moe", "qwen3next")
_OF_LAYERS = {
    **dict.fromkeys(_DELTA, _delta),
    "apertus": _apertus,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "granitehybrid": _granite_hybrid,
    "llama4": _llama4,
    "lfm2": _convolution,
    "lfm2moe": _convolution,
}
