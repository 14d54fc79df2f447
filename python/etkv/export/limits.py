"""Fills in the defaults of a request and checks it against the model, before any weight is read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError
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

    from etkv.export.attention import CacheLayout


_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""The kinds of attention layers that the KV cache op supports, by their names in configurations."""

_WITHOUT_CACHE = ("mlp", "moe")
"""The kinds of layers without attention and without a state, in families whose other layers may be recurrent."""


@dataclass(frozen=True)
class Limits:
    """The limits that the program declares: tokens of context, and tokens in one execution.

    ``group_size`` counts elements; ``None`` is one scale for each row, or no quantization.
    """

    max_context: int
    prefill_chunk: int
    group_size: int | None

    def within(self, layout: CacheLayout, request: ExportRequest) -> Limits:
        """Return the limits of a program with the caches of ``layout``. Its steps are at most as long as the smallest
        window.

        Raises :class:`EtkvError` if the request has longer steps, or if a window is shorter than the minimum step.
        """
        window = min((window for window in layout.windows if window), default=self.max_context)
        if window < MIN_STEP:
            raise EtkvError(f"the model's sliding window of {window} is below the minimum step of {MIN_STEP}")
        if request.prefill_chunk is not None and request.prefill_chunk > window:
            raise EtkvError(f"prefill-chunk {request.prefill_chunk} is above the sliding window of {window}")
        return dataclasses.replace(self, prefill_chunk=min(self.prefill_chunk, window))


def settle(request: ExportRequest, config: PreTrainedConfig) -> Limits:
    """Return the limits of the program of ``request``, as far as they follow from the model's configuration.

    Raises :class:`EtkvError` if the request exceeds the limits of the model, or if the model cannot be exported.
    """
    _check_layers(request, config)
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    if own is not None and own < MIN_STEP:
        # In some configurations, -1 stands for no limit.
        own = None
    max_context = request.max_context
    if max_context is None:
        max_context = min(own or DEFAULT_MAX_CONTEXT, DEFAULT_MAX_CONTEXT)
    elif own is not None and max_context > own:
        raise EtkvError(f"max-context {max_context} is above the {own} positions of the model")
    chunk = request.prefill_chunk
    if chunk is None:
        chunk = min(DEFAULT_PREFILL_CHUNK, max_context)
    elif chunk > max_context:
        raise EtkvError(f"prefill-chunk {chunk} is above the max-context of {max_context}")
    return Limits(max_context, chunk, _group_size(request, config))


def _check_layers(request: ExportRequest, config: PreTrainedConfig) -> None:
    """Raise :class:`EtkvError` for a configuration with kinds of layers that no op of the backend supports."""
    from etkv.export import recurrent

    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    state = next((kind for kind in kinds if kind in recurrent.KINDS), None)
    other = next((kind for kind in kinds if kind not in (*_KINDS, *recurrent.KINDS, *_WITHOUT_CACHE)), None)
    if other is None and state is not None and not recurrent.is_supported(config):
        other = state
    if other is not None:
        raise EtkvError(
            f"model family {config.model_type!r} has layers of kind {other!r}; the exporter supports attention to all "
            "earlier tokens, to a sliding window or to chunks, and recurrent layers: short convolutions, the gated "
            "delta rule, Mamba-2 and lightning attention"
        )


def _group_size(request: ExportRequest, config: PreTrainedConfig) -> int | None:
    """Return the group size in elements; None for one scale for each row, or without quantization.

    Raises :class:`EtkvError` if the group size does not divide every quantized row.
    """
    if request.quantize is None:
        return None
    import torch

    from etkv.export import experts, latent, packing, recurrent, scaled_experts

    size = request.group_size or QUANTIZATIONS[request.quantize]
    # The scale of a row is repeated over groups of a size that MLX supports.
    divisor = size or min(GROUP_SIZES)
    skeleton: Any = recurrent.skeleton(config)
    scaled_experts.take(skeleton)
    expansions = latent.expansions(skeleton)
    for name, module in skeleton.named_modules():
        if module in expansions:
            continue
        if packing.is_linear(module) or isinstance(module, torch.nn.Embedding):
            widths = {name: packing.matrix(module).shape[-1]}
        else:
            widths = experts.widths(name, module)
        for of, width in widths.items():
            if width % divisor:
                raise EtkvError(f"group-size {divisor} does not divide {width}, the width of {of}")
    return size
