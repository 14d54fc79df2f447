"""Gemma 3n and 4. Their layers differ in size, and the last layers share keys and values of earlier layers."""

from __future__ import annotations

import math

from etkv.errors import EtkvError
from etkv.export.gguf import rope
from etkv.export.gguf.decoder import Decoder, Reader, Settings, embedding, expert_counts, layers
from etkv.export.gguf.keys import Keys

_OWN_CACHES = 20
"""Number of layers of Gemma 3n with keys and values of their own, for files without this number."""

_PATTERN = "attention.sliding_window_pattern"
"""The key with the kinds of layers."""

_INPUTS = 4
"""Number of inputs of a layer of Gemma 3n."""

_UNROTATED = 1e30
"""The divisor of the frequencies that do not rotate."""


def _gemma3n(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    settings = decoder.llama_like() | decoder.window(5)
    keys.only("attention.scale", 0.0, 1.0, reason="but this architecture scales by 1")
    keys.only("altup.num_inputs", _INPUTS, reason=f"but this architecture has {_INPUTS} inputs of a layer")
    active = keys.integer("altup.active_idx", 0)
    if active >= _INPUTS:
        raise keys.refuse("altup.active_idx", f"expected a number below {_INPUTS}, the number of inputs of a layer")
    local = {"rope_type": "default", "rope_theta": keys.positive_real("rope.freq_base_swa", 10000.0)}
    rank = keys.file.tensors.get("blk.0.laurel_l.weight")
    if rank is None:
        raise EtkvError(f"{keys.file.path} lacks tensor blk.0.laurel_l.weight of its model")
    return "gemma3n_text", settings | _per_layer(keys) | {
        "rope_parameters": {"full_attention": settings["rope_parameters"], "sliding_attention": local},
        "num_kv_shared_layers": _shared(keys, settings["layer_types"], max(0, decoder.layers - _OWN_CACHES)),
        "altup_num_inputs": _INPUTS,
        "altup_active_idx": active,
        "laurel_rank": rank.shape[0],
        "activation_sparsity_pattern": _sparsity(keys, decoder.layers),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0) or None,
    }


def _sparsity(keys: Keys, n_layers: int) -> list[float]:
    """Return the share of activations that each layer drops. Files contain the corresponding quantile of a normal
    distribution.
    """
    quantiles = keys.reals_of_layers("activation_sparsity_scale", n_layers, least=-math.inf)
    return [round(0.5 * (1.0 + math.erf(quantile / math.sqrt(2.0))), 6) for quantile in quantiles]


def _per_layer(keys: Keys) -> Settings:
    """Return the sizes of the per-layer embeddings."""
    settings: Settings = {"hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0)}
    of_tokens = keys.file.tensors.get("per_layer_token_embd.weight")
    if of_tokens is not None:
        settings["vocab_size_per_layer_input"] = of_tokens.shape[0]
    return settings


def _shared(keys: Keys, kinds: list[str], default: int) -> int:
    """Return the number of last layers that share the keys and values of earlier layers. ``kinds`` are those of all
    layers. A layer shares with the last layer of its kind that has keys and values of its own.
    """
    shared = keys.integer("attention.shared_kv_layers", default)
    own = len(kinds) - shared
    if own < 1:
        raise keys.refuse("attention.shared_kv_layers", f"but the model has {len(kinds)} layers")
    missing = set(kinds[own:]) - set(kinds[:own])
    if missing:
        lacking = "has a window" if missing == {"sliding_attention"} else "is without a window"
        raise keys.refuse(
            _PATTERN if keys.has(_PATTERN) else "attention.shared_kv_layers",
            f"but none of the first {own} layers, which have keys and values of their own, {lacking}",
        )
    return shared


def _kinds(keys: Keys, n_layers: int) -> list[str]:
    """Return the kind of each layer, by the flags of the file."""
    slides = keys.flags_or_integer(_PATTERN, 0)
    if isinstance(slides, int) or len(slides) < n_layers:
        raise keys.refuse(_PATTERN, f"expected a flag for each of {n_layers} layers")
    if slides[n_layers - 1]:
        # transformers would silently attend to all positions there.
        raise keys.refuse(_PATTERN, f"but the last of {n_layers} layers has no window in this architecture")
    return ["sliding_attention" if each else "full_attention" for each in slides[:n_layers]]


def _one_of(keys: Keys, name: str, numbers: list[int], kinds: list[str], kind: str) -> int | None:
    """Return the number that all layers of ``kind`` have; None without such layers."""
    found = {number for number, other in zip(numbers, kinds, strict=True) if other == kind}
    if 0 in found:
        raise keys.refuse(name, "expected numbers above 0")
    if len(found) > 1:
        raise keys.refuse(name, "which differs between layers with a window, or between those without one")
    return found.pop() if found else None


def _gemma4(keys: Keys) -> tuple[str, Settings]:
    vocab_size, hidden = embedding(keys)
    n_layers = layers(keys)
    kinds = _kinds(keys, n_layers)
    head_dim, whole = keys.positive("attention.key_length_swa"), keys.positive("attention.key_length")
    for size, end in ((head_dim, "_swa"), (whole, "")):
        keys.only(f"attention.value_length{end}", size, reason=f"but keys have {size} elements")
        keys.only(f"rope.dimension_count{end}", size, reason=f"but all {size} elements of a head are rotated")
    heads = keys.of_layers("attention.head_count_kv", n_layers)
    of_windows = _one_of(keys, "attention.head_count_kv", heads, kinds, "sliding_attention")
    of_whole = _one_of(keys, "attention.head_count_kv", heads, kinds, "full_attention")
    shared = _shared(keys, kinds, 0)
    settings: Settings = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": n_layers,
        "num_attention_heads": keys.positive("attention.head_count"),
        "num_key_value_heads": of_windows or of_whole,
        "num_global_key_value_heads": of_whole,
        "head_dim": head_dim,
        "global_head_dim": whole,
        "max_position_embeddings": keys.positive("context_length"),
        "rms_norm_eps": keys.epsilon("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
        "sliding_window": keys.positive("attention.sliding_window"),
        "layer_types": kinds,
        "num_kv_shared_layers": shared,
        "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
        # Layers without a matrix for values use their keys as values.
        "attention_k_eq_v": any(
            kind == "full_attention" and not keys.has_tensor(f"blk.{layer}.attn_v.weight")
            for layer, kind in enumerate(kinds[: n_layers - shared])
        ),
    }
    keys.only("attention.scale", 0.0, 1.0, reason="but this architecture scales by 1")
    settings |= _per_layer(keys)
    return "gemma4_text", settings | _widths(keys, n_layers, shared) | _experts(keys) | _rotary(keys, whole)


def _widths(keys: Keys, n_layers: int, shared: int) -> Settings:
    """Return the width of feed-forward blocks. Layers that share keys and values may have blocks twice as wide."""
    widths = keys.of_layers("feed_forward_length", n_layers)
    first = widths[0]
    doubled = [first] * (n_layers - shared) + [2 * first] * shared
    if first < 1 or widths not in ([first] * n_layers, doubled):
        raise keys.refuse("feed_forward_length", "but layers that share keys and values have one width, or twice that")
    return {"intermediate_size": first, "use_double_wide_mlp": shared > 0 and widths == doubled}


def _experts(keys: Keys) -> Settings:
    if not keys.integer("expert_count", 0):
        return {"enable_moe_block": False}
    keys.only("expert_gating_func", 0, 1, reason="but this architecture's router is a softmax (1)")
    count, used = expert_counts(keys)
    width = keys.positive("expert_feed_forward_length")
    return {"enable_moe_block": True, "num_experts": count, "top_k_experts": used, "moe_intermediate_size": width}


def _rotary(keys: Keys, whole: int) -> Settings:
    """Return both rotary embeddings. Layers without a window rotate the first part of a head's frequencies."""
    base, local = (keys.positive_real(f"rope.freq_base{end}", 10000.0) for end in ("", "_swa"))
    keys.only("rope.scaling.type", "none", "linear", reason="but this architecture does not scale positions")
    keys.only("rope.scaling.factor", 0.0, 1.0, reason="but this architecture does not scale positions")
    keys.only("rope.scale_linear", 0.0, 1.0, reason="but this architecture does not scale positions")
    factors = keys.vector(rope.FACTORS, whole // 2) or [1.0] * (whole // 2)
    rotated = sum(factor == 1.0 for factor in factors)
    if factors[:rotated] != [1.0] * rotated or any(factor < 0.99 * _UNROTATED for factor in factors[rotated:]):
        raise keys.refuse(
            "rope.dimension_count", f"and a tensor {rope.FACTORS}, whose values must be ones and then 1e30"
        )
    full = {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": 2 * rotated / whole}
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    }


READERS: dict[str, Reader] = {"gemma3n": _gemma3n, "gemma4": _gemma4}
