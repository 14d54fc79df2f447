"""Attention that calls the KV cache op, and refuses features that the op lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etkv._mlx_serialization import ensure_available

if TYPE_CHECKING:
    import torch

NAME = "etkv_offgraph"
"""The name under which transformers finds this attention."""

_LACKED = {"softcap": "a softcap", "s_aux": "learned sinks"}
"""Arguments of attention functions that the op lacks -> their names in messages."""


def register() -> None:
    """Register the attention :data:`NAME` with transformers, without masks: the cache applies them."""
    ensure_available()
    from executorch.backends.mlx.llm.hf_attention import register_mlx_offgraph_attention, sdpa_mask_passthrough
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # This imports the op, which registers it once.
    register_mlx_offgraph_attention()
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask_passthrough)


def layer_windows(config: Any) -> list[int]:
    """Return the window of each layer in positions, from the configuration of a model; 0 is full history."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    )
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer, from ``[1, heads, T, head_dim]`` to ``[1, T, heads, head_dim]``.

    Raises :class:`ValueError` for arguments that change the result and that the op lacks. Other arguments are ignored.
    """
    from executorch.backends.mlx.llm.hf_attention import mlx_offgraph_attention_forward

    if not getattr(module, "is_causal", True) or arguments.get("is_causal") is False:
        raise ValueError("its tokens see those after them, and the KV cache op is causal")
    for name, meaning in _LACKED.items():
        if arguments.get(name) is not None:
            raise ValueError(f"its attention has {meaning}, which the KV cache op lacks")
    layer: Any = module
    declared = layer_windows(layer.config)[layer.layer_idx]
    used = arguments.get("sliding_window") or 0
    if used != declared:
        raise ValueError(f"layer {layer.layer_idx} has a window of {used}, and its configuration says {declared}")
    attended: tuple[torch.Tensor, None] = mlx_offgraph_attention_forward(
        module, query, key, value, attention_mask, **arguments
    )
    return attended
