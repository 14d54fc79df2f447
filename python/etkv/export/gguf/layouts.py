"""Weights that GGUF files store under other names or in another layout than transformers, by architecture.

Weights without a rule have the names of the ``gguf`` package, and the layout of transformers except for the changes in
:mod:`etkv.export.gguf.weights`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

Make = Callable[[Sequence[Any], Any], Any]
"""A function that computes a parameter from its tensors and the configuration."""


def joined(parts: Sequence[Any], config: Any) -> Any:
    """Concatenate parts along the rows. For stacked experts, rows are the second axis."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=parts[0].ndim - 2)


@dataclass(frozen=True)
class Rule:
    """A rule for a parameter. ``pattern`` matches the part of the parameter's name after the layer's name.
    ``sources`` are the parameter's tensors in the layer's block. ``make`` computes the values.

    ``orders`` says what ``make`` reorders: whole rows of the tensors, the columns of a tensor, or elements (anything
    else).
    """

    pattern: str
    sources: tuple[str, ...]
    make: Make = joined
    orders: Literal["rows", "columns", "elements"] = "rows"


def _flat(parts: Sequence[Any], config: Any) -> Any:
    return parts[0].ravel()


def _logarithm(parts: Sequence[Any], config: Any) -> Any:
    """Return the logarithm of decays. Files store decays as negative numbers."""
    return np.log(-parts[0].ravel())


def _channels(parts: Sequence[Any], config: Any) -> Any:
    """Return the weights of a depthwise convolution."""
    return parts[0][:, None]


def _transposed(parts: Sequence[Any], config: Any) -> Any:
    return parts[0].swapaxes(-1, -2)


def _transposed_halves(parts: Sequence[Any], config: Any) -> Any:
    """Return the outputs of two products, one after the other in the last axis."""
    return np.concatenate([part.swapaxes(-1, -2) for part in parts], axis=-1)


def _alternating(parts: Sequence[Any], config: Any) -> Any:
    """Return the outputs of two products, interleaved in the last axis."""
    parts = [part.swapaxes(-1, -2) if part.ndim == 3 else part for part in parts]
    return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)


def _latents(parts: Sequence[Any], config: Any) -> Any:
    """Return the matrix that expands latents, from a tensor for keys [heads, rank, key] and one for values."""
    keys, values = parts
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, config.kv_lora_rank)


def _by_key_head(parts: Sequence[Any], config: Any) -> Any:
    """Return rows in the order of the heads of keys: for each head its queries, keys, values and gates."""
    joined, gate = parts
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    queries, keys, values = np.split(joined, [heads * key, 2 * heads * key])
    apart = [part.reshape(heads, -1, joined.shape[1]) for part in (queries, keys, values, gate)]
    return np.concatenate(apart, axis=1).reshape(-1, joined.shape[1])


def _grouped(values: Any, config: Any, size: int, axis: int = 0) -> Any:
    """Return heads of values grouped by their head of keys. Files have the first head of every group, then the second
    head of every group.
    """
    groups = config.linear_num_key_heads
    in_group = config.linear_num_value_heads // groups
    shape = values.shape
    apart = values.reshape(*shape[:axis], in_group, groups, size, *shape[axis + 1 :])
    return apart.swapaxes(axis, axis + 1).reshape(shape)


def _grouped_values(parts: Sequence[Any], config: Any) -> Any:
    """Return the rows of queries and keys, followed by the grouped rows of values."""
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    values = _grouped(parts[0][first:], config, config.linear_value_head_dim)
    return np.concatenate([parts[0][:first], values])


_EXPERTS = (
    Rule(r"experts\.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
    Rule(r"experts\.gate_up_proj", ("ffn_gate_up_exps.weight",)),
    Rule(r"experts\.up_proj", ("ffn_up_exps.weight",)),
    Rule(r"experts\.down_proj", ("ffn_down_exps.weight",)),
    Rule(r"(block_sparse_moe\.router|mixer\.gate)\.weight", ("ffn_gate_inp.weight",)),
    Rule(r"shared_mlp\.input_linear\.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
    Rule(r"e_score_correction_bias|expert_bias|moe_statics\.e_score_correction_bias", ("exp_probs_b.bias",)),
)
"""Names of experts' weights that the ``gguf`` package does not map."""

_MAMBA = (
    Rule(r"(mamba|mixer)\.A_log", ("ssm_a",), _logarithm, "elements"),
    Rule(r"(mamba|mixer)\.D", ("ssm_d",), _flat),
    Rule(r"(mamba|mixer)\.dt_bias", ("ssm_dt.bias",)),
    Rule(r"(mamba|mixer)\.conv1d\.weight", ("ssm_conv1d.weight",), _channels, "elements"),
    Rule(r"(mamba|mixer)\.conv1d\.bias", ("ssm_conv1d.bias",)),
    Rule(r"(mamba|mixer)\.in_proj\.weight", ("ssm_in.weight",)),
    Rule(r"(mamba|mixer)\.out_proj\.weight", ("ssm_out.weight",)),
    Rule(r"(mamba|mixer)\.norm\.weight", ("ssm_norm.weight",), _flat),
)

_NEMOTRON_H = (
    *_MAMBA,
    Rule(r"mixer\.([qkv])_proj\.(weight|bias)", (r"attn_\1.\2",)),
    Rule(r"mixer\.o_proj\.(weight|bias)", (r"attn_output.\1",)),
    Rule(r"mixer\.(up|down)_proj\.(weight|bias)", (r"ffn_\1.\2",)),
    Rule(r"mixer\.shared_experts\.(up|down)_proj\.weight", (r"ffn_\1_shexp.weight",)),
)

_DELTA = (
    Rule(r"linear_attn\.norm\.weight", ("ssm_norm.weight",)),
    Rule(r"self_attn\.([qkv])_proj\.weight", (r"attn_\1.weight",)),
    Rule(r"self_attn\.o_proj\.weight", ("attn_output.weight",)),
    Rule(r"post_attention_layernorm\.weight", ("post_attention_norm.weight",)),
    Rule(r"mlp\.shared_expert_gate\.weight", ("ffn_gate_inp_shexp.weight",)),
)

_NEXT = (
    *_DELTA,
    Rule(r"linear_attn\.A_log", ("ssm_a",), _logarithm, "elements"),
    Rule(r"linear_attn\.dt_bias", ("ssm_dt.bias",)),
    Rule(r"linear_attn\.conv1d\.weight", ("ssm_conv1d.weight",), _channels, "elements"),
    Rule(r"linear_attn\.out_proj\.weight", ("ssm_out.weight",)),
    Rule(r"linear_attn\.in_proj_ba\.weight", ("ssm_ba.weight",)),
    Rule(r"linear_attn\.in_proj_qkvz\.weight", ("attn_qkv.weight", "attn_gate.weight"), _by_key_head),
)

_QWEN35 = (
    *_DELTA,
    Rule(
        r"linear_attn\.A_log",
        ("ssm_a",),
        lambda parts, config: _grouped(_logarithm(parts, config), config, 1),
        "elements",
    ),
    Rule(r"linear_attn\.dt_bias", ("ssm_dt.bias",), lambda parts, config: _grouped(parts[0], config, 1)),
    Rule(
        r"linear_attn\.conv1d\.weight",
        ("ssm_conv1d.weight",),
        lambda parts, config: _grouped_values(parts, config)[:, None],
        "elements",
    ),
    Rule(
        r"linear_attn\.out_proj\.weight",
        ("ssm_out.weight",),
        lambda parts, config: _grouped(parts[0], config, config.linear_value_head_dim, axis=1),
        "columns",
    ),
    Rule(r"linear_attn\.in_proj_qkv\.weight", ("attn_qkv.weight",), _grouped_values),
    Rule(
        r"linear_attn\.in_proj_z\.weight",
        ("attn_gate.weight",),
        lambda parts, config: _grouped(parts[0], config, config.linear_value_head_dim),
    ),
    Rule(r"linear_attn\.in_proj_a\.weight", ("ssm_alpha.weight",), lambda parts, config: _grouped(parts[0], config, 1)),
    Rule(r"linear_attn\.in_proj_b\.weight", ("ssm_beta.weight",), lambda parts, config: _grouped(parts[0], config, 1)),
)

_POST_NORM = Rule(r"post_attention_layernorm\.weight", ("post_attention_norm.weight",))

_RULES: dict[str, tuple[Rule, ...]] = {
    "deepseek2": (
        Rule(r"self_attn\.kv_b_proj\.weight", ("attn_k_b.weight", "attn_v_b.weight"), _latents, "elements"),
        Rule(r"self_attn\.kv_b_proj\.weight", ("attn_kv_b.weight",)),
    ),
    "falcon-h1": _MAMBA,
    "gemma3n": (Rule(r"altup\.correct_output_scale", ("altup_correct_scale.weight",)),),
    "gemma4": (
        Rule(r"layer_scalar", ("layer_output_scale.weight",)),
        Rule(r"router\.proj\.weight", ("ffn_gate_inp.weight",)),
        Rule(r"router\.scale", ("ffn_gate_inp.scale",)),
        Rule(r"router\.per_expert_scale", ("ffn_down_exps.scale",)),
        Rule(r"experts\.gate_up_proj", ("ffn_gate_up_exps.weight",)),
    ),
    "glm4moe": (_POST_NORM,),
    "gpt-oss": (
        _POST_NORM,
        Rule(r"mlp\.experts\.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), _alternating),
        Rule(r"mlp\.experts\.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), _alternating),
        Rule(r"mlp\.experts\.down_proj", ("ffn_down_exps.weight",), _transposed),
        Rule(r"mlp\.experts\.down_proj_bias", ("ffn_down_exps.bias",)),
        Rule(r"mlp\.router\.(weight|bias)", (r"ffn_gate_inp.\1",)),
        Rule(r"self_attn\.sinks", ("attn_sinks.weight",)),
    ),
    "granitehybrid": (
        *_MAMBA,
        # Without experts, the block for all tokens is the only block.
        Rule(r"shared_mlp\.input_linear\.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
        Rule(r"shared_mlp\.input_linear\.weight", ("ffn_gate.weight", "ffn_up.weight")),
        Rule(r"shared_mlp\.output_linear\.weight", ("ffn_down_shexp.weight",)),
        Rule(r"shared_mlp\.output_linear\.weight", ("ffn_down.weight",)),
    ),
    "lfm2": (Rule(r"conv\.conv\.weight", ("shortconv.conv.weight",), _channels, "elements"),),
    "lfm2moe": (Rule(r"conv\.conv\.weight", ("shortconv.conv.weight",), _channels, "elements"),),
    "llama4": (
        Rule(r"experts\.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), _transposed_halves),
        Rule(r"experts\.down_proj", ("ffn_down_exps.weight",), _transposed),
    ),
    "mamba2": _MAMBA,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "qwen3next": _NEXT,
}
"""llama.cpp's name of an architecture -> its rules. The first rule whose tensors are in the file applies."""


_OF_KEYS = {"apertus": (re.compile(r"mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)"), r"xielu.\1")}
"""llama.cpp's name of an architecture -> the parameters of a layer that are keys of the file, and the name of the
key."""


def key_of(architecture: str, name: str) -> str | None:
    """Return the key with a number for each layer. The parameter ``name`` is the number of its layer."""
    pattern, key = _OF_KEYS.get(architecture, (None, ""))
    match = None if pattern is None else pattern.fullmatch(name)
    return None if match is None else match.expand(key)


def rules(architecture: str, name: str) -> list[Rule]:
    """Return the rules that match ``name``, the part of a parameter's name after its layer's name."""
    found = []
    for rule in (*_RULES.get(architecture, ()), *_EXPERTS):
        match = re.fullmatch(rf"(?:.*\.)?(?:{rule.pattern})", name)
        if match is not None:
            found.append(replace(rule, sources=tuple(match.expand(source) for source in rule.sources)))
    return found
