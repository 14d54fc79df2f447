"""Fixes rotary embeddings whose frequencies depend on the length of a text, for the context of a program.

A graph cannot change its frequencies, and the keys in a cache were rotated with the frequencies of an earlier length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_FIXED = "default"
"""The kind of rotary embedding that keeps its frequencies."""


def settle(model: PreTrainedModel, max_context: int) -> None:
    """Set every rotary embedding of ``model`` to its frequencies at ``max_context`` positions.

    Long RoPE has two sets of frequencies: the second is for texts longer than those of the first training. Dynamic
    scaling begins past the positions that the model was made for, and no program has more positions than these.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            _settle(module, kind, None, max_context)
            module.rope_type = _FIXED
        elif isinstance(kind, dict):
            for layer_type, own in kind.items():
                _settle(module, own, layer_type, max_context)
            module.rope_type = dict.fromkeys(kind, _FIXED)


def _settle(module: torch.nn.Module, kind: str, layer_type: str | None, max_context: int) -> None:
    if kind != "longrope":
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = module.config
    parameters: dict[str, Any] = config.rope_parameters
    name = "inv_freq"
    if layer_type is not None:
        parameters, name = parameters[layer_type], f"{layer_type}_inv_freq"
    if max_context > parameters["original_max_position_embeddings"]:
        frequencies = getattr(module, name)
        long, _ = ROPE_INIT_FUNCTIONS[kind](
            module.config, frequencies.device, seq_len=max_context, layer_type=layer_type
        )
        frequencies.copy_(long)
