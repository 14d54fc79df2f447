"""Rotary embeddings of GGUF files, as the ``rope_parameters`` of a transformers configuration."""

from __future__ import annotations

import math
from typing import Any

from etkv.errors import EtkvError
from etkv.export.gguf.keys import Keys

FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors with divisors of the frequencies: for all texts (Llama 3), or for short and long texts (Phi-3)."""

SETTINGS = (FACTORS, SHORT_FACTORS, LONG_FACTORS)
"""Tensors that are settings of the rotary embedding, not weights."""


def read(keys: Keys, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """Return the rotary embedding of every layer, as transformers' ``rope_parameters``.

    Factors that a file stores as a tensor become ``longrope``, which divides frequencies by arbitrary factors.
    ``partial`` allows heads in which only the first elements are rotated.

    Raises :class:`EtkvError` for settings that transformers' embeddings cannot express.
    """
    base = keys.positive_real("rope.freq_base", 10000.0)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    rotary_dim = keys.positive("rope.dimension_count", head_dim)
    if head_dim % 2 and not keys.has("rope.dimension_count"):
        raise keys.refuse(
            "attention.key_length", f"but a head of {head_dim} elements, an odd number, cannot be rotated"
        )
    if rotary_dim > head_dim or rotary_dim % 2 or (rotary_dim != head_dim and not partial):
        limit = "an even number up to" if partial else "exactly"
        raise keys.refuse("rope.dimension_count", f"but this architecture rotates {limit} {head_dim} elements")
    if partial:
        parameters["partial_rotary_factor"] = _share(rotary_dim, head_dim)
    kind = keys.text("rope.scaling.type", "linear")
    factor = _factor(keys)
    context = keys.positive("context_length")
    original = keys.integer("rope.scaling.original_context_length", 0) or context
    attention_factor = keys.real("rope.scaling.attn_factor", 0.0)
    factors = keys.vector(FACTORS, rotary_dim // 2)
    short, long = (keys.vector(name, rotary_dim // 2) for name in (SHORT_FACTORS, LONG_FACTORS))
    if (short is None) != (long is None):
        raise EtkvError(f"{keys.file.path} has only one of {SHORT_FACTORS} and {LONG_FACTORS}, expected both")
    if kind == "yarn":
        if factors or short:
            raise keys.refuse(
                "rope.scaling.type", "and a tensor of factors too; the exporter supports only one of the two"
            )
        return parameters | _yarn(keys, factor, original, attention_factor)
    if kind == "none":
        factor = 1.0
    elif kind not in ("linear", "longrope"):
        raise keys.refuse("rope.scaling.type", "but the exporter supports none, linear, yarn and longrope")
    _refuse_yarn_settings(keys, kind)
    if short is not None and long is not None:
        if factors is not None:
            raise EtkvError(
                f"{keys.file.path} has {FACTORS} and {SHORT_FACTORS}; the exporter supports only one of the two"
            )
        parameters |= {"rope_type": "longrope", "short_factor": _scaled(short, factor), "original": original}
        parameters |= {"long_factor": _scaled(long, factor)}
    elif kind == "longrope":
        raise keys.refuse("rope.scaling.type", f"and no {SHORT_FACTORS} and {LONG_FACTORS}")
    elif factors is not None or attention_factor not in (0.0, 1.0):
        both = _scaled(factors or [1.0] * (rotary_dim // 2), factor)
        parameters |= {"rope_type": "longrope", "short_factor": both, "long_factor": both, "original": context}
    elif factor != 1.0:
        return parameters | {"rope_type": "linear", "factor": factor}
    else:
        return parameters
    parameters["original_max_position_embeddings"] = parameters.pop("original")
    parameters["factor"] = max(1.0, context / parameters["original_max_position_embeddings"])
    # Without this entry, transformers would derive an attention factor from the context lengths.
    parameters["attention_factor"] = attention_factor or 1.0
    return parameters


def _factor(keys: Keys) -> float:
    """Return the scaling factor of positions; 1 if the file has none. ``rope.scale_linear`` is an older key for it."""
    keys.skip("rope.scale_linear")
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        factor = keys.real(name, 0.0)
        if factor and factor < 1.0:
            raise keys.refuse(name, "expected at least 1")
        if factor:
            return factor
    return 1.0


def _yarn(keys: Keys, factor: float, original: int, attention_factor: float) -> dict[str, Any]:
    """Return YaRN's settings.

    ``yarn_attn_factor`` is the factor of cosines and sines, like transformers' ``attention_factor``. Without this
    key, the factor follows from the scaling, and is multiplied by ``attn_factor``.
    """
    keys.only("rope.scaling.yarn_ext_factor", 1.0, reason="but the exporter reads YaRN with a factor of 1")
    logarithm = math.log(factor)
    scale = keys.real("rope.scaling.yarn_attn_factor", 0.0)
    all_dimensions = keys.real("rope.scaling.yarn_log_multiplier", 0.0)
    if not scale:
        scale = (0.1 * logarithm + 1.0) / (0.1 * all_dimensions * logarithm + 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": scale * (attention_factor or 1.0),
        "beta_fast": keys.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.real("rope.scaling.yarn_beta_slow", 1.0),
    }


def _refuse_yarn_settings(keys: Keys, kind: str) -> None:
    reason = f"but no YaRN: rope.scaling.type is {kind!r}"
    keys.only("rope.scaling.yarn_ext_factor", 0.0, reason=reason)
    keys.only("rope.scaling.yarn_attn_factor", 0.0, 1.0, reason=reason)
    keys.only("rope.scaling.yarn_beta_fast", 32.0, reason=reason)
    keys.only("rope.scaling.yarn_beta_slow", 1.0, reason=reason)
    keys.only("rope.scaling.yarn_log_multiplier", 0.0, reason=reason)


def _scaled(factors: list[float], factor: float) -> list[float]:
    return [value * factor for value in factors]


def _share(rotary_dim: int, head_dim: int) -> float:
    """Return the ``partial_rotary_factor`` from which transformers computes ``rotary_dim``, with rounding down."""
    share = rotary_dim / head_dim
    return share if int(share * head_dim) == rotary_dim else math.nextafter(share, 1.0)
