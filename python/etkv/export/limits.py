"""Fills in the defaults of a request and checks it against the model, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from etkv.errors import EtkvError
from etkv.export import attention
from etkv.export.request import (
    DEFAULT_MAX_CONTEXT,
    DEFAULT_PREFILL_CHUNK,
    GROUP_SIZES,
    MIN_STEP,
    QUANTIZATIONS,
    ExportRequest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names that families have for their number of experts."""


@dataclass(frozen=True)
class CacheLayout:
    """One entry for each KV cache of the program, in the order of their ids.

    ``kv_heads`` counts heads, ``head_dims`` elements of a head, ``windows`` positions (0 keeps the full history).
    """

    kv_heads: list[int]
    head_dims: list[int]
    windows: list[int]


@dataclass(frozen=True)
class Limits:
    """The facts that the program declares: tokens of context, tokens in one execution, and its caches.

    ``group_size`` counts elements; ``None`` is one scale a row, or no quantization at all.
    """

    max_context: int
    prefill_chunk: int
    group_size: int | None
    layout: CacheLayout


def settle(request: ExportRequest, config: PreTrainedConfig) -> Limits:
    """Return the limits of the program of ``request``.

    Raises :class:`EtkvError` if the request exceeds the limits of the model, or if the model cannot be exported.
    """
    _check_experts(request, config)
    layout = _layout(config)
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    max_context = request.max_context
    if max_context is None:
        max_context = min(own or DEFAULT_MAX_CONTEXT, DEFAULT_MAX_CONTEXT)
    elif own is not None and max_context > own:
        raise EtkvError(f"max-context {max_context} is above the {own} positions of the model")

    windows = [window for window in layout.windows if window]
    ceiling = min([max_context, *windows])
    if ceiling < MIN_STEP:
        raise EtkvError(f"the model's sliding window of {ceiling} is below the minimum step of {MIN_STEP}")
    chunk = request.prefill_chunk
    if chunk is None:
        chunk = min(DEFAULT_PREFILL_CHUNK, ceiling)
    elif chunk > ceiling:
        limit = "sliding window" if ceiling < max_context else "max-context"
        raise EtkvError(f"prefill-chunk {chunk} is above the {limit} of {ceiling}")

    return Limits(max_context, chunk, _group_size(request, config), layout)


def _check_experts(request: ExportRequest, config: PreTrainedConfig) -> None:
    """Raise :class:`EtkvError` for a mixture of experts whose backend cannot select weights by an index."""
    text_config = config.get_text_config()
    for name in _EXPERTS:
        count = getattr(text_config, name, None) or 1
        if count > 1 and request.backend != "mlx":
            raise EtkvError(
                f"model family {config.model_type!r} is a mixture of {count} experts, which backend "
                f"{request.backend} cannot run; --backend mlx can"
            )


def _layout(config: PreTrainedConfig) -> CacheLayout:
    from executorch.backends.mlx.llm.cache import resolve_hf_cache_layout

    text_config = config.get_text_config()
    try:
        kinds, kv_heads, head_dims = resolve_hf_cache_layout(config)
    except AttributeError as error:
        raise EtkvError(f"model family {config.model_type!r} has no KV cache that can be described: {error}") from error
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise EtkvError(f"model family {config.model_type!r} has layers of kind {unknown[0]!r}, which keep no KV cache")
    # A family whose head size follows from its hidden size may leave it out.
    derived = text_config.hidden_size // text_config.num_attention_heads
    return CacheLayout(
        kv_heads=[int(heads) for heads in kv_heads],
        head_dims=[int(size or derived) for size in head_dims],
        # Layers that share the keys and values of others come last and have no cache.
        windows=attention.layer_windows(text_config)[: len(kinds)],
    )


def _group_size(request: ExportRequest, config: PreTrainedConfig) -> int | None:
    """Return the group size in elements; None for one scale a row, or without quantization.

    Raises :class:`EtkvError` if the group size does not divide every quantized row.
    """
    if request.quantize is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    from etkv.export import experts

    size = request.group_size or QUANTIZATIONS[request.quantize]
    # A scale for a whole row is repeated over groups of a size that MLX takes.
    divisor = size or min(GROUP_SIZES)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    for name, module in skeleton.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            widths = {name: module.weight.shape[-1]}
        else:
            widths = experts.widths(name, module)
        for of, width in widths.items():
            if width % divisor:
                raise EtkvError(f"group-size {divisor} does not divide {width}, the width of {of}")
    return size
