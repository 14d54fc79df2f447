"""Fixes rotary embeddings whose frequencies depend on the length of a text. In a graph, the length is unknown.

A cache stores rotated keys, so a text must use one set of frequencies. Long RoPE has two sets: one up to the original
context length, and one for longer texts. A program for longer texts has both sets. When the program is loaded, the
capacity of its cache selects the set.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FIXED = "default"
"""The kind of rotary embedding with constant frequencies."""


def settle(model: PreTrainedModel, max_context: int) -> None:
    """Make the rotary embeddings of ``model`` independent of the length of a text, for ``max_context`` positions.

    Dynamic scaling begins beyond the model's own context, which no program exceeds, so the initial frequencies stay.
    """
    for module in model.modules():
        if hasattr(module, "recomposition_frequencies") and _takes_the_first(module):
            module.recomposition_frequencies = _of_text
    # The loop runs over a list, because it changes the class of some modules.
    for module in list(model.modules()):
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            _settle(module, kind, None, max_context)
            _compute_once(module, kind)
            module.rope_type = _FIXED
        elif isinstance(kind, dict):
            for layer_type, own in kind.items():
                _settle(module, own, layer_type, max_context)
            module.rope_type = dict.fromkeys(kind, _FIXED)


def _takes_the_first(module: Any) -> bool:
    """Return whether ``module`` composes three equal sets of frequencies as :func:`_of_text` does."""
    n = getattr(getattr(module, "inv_freq", None), "shape", (0,))[-1]
    equal = torch.arange(float(n)).expand(3, 1, 1, n)
    # The method may modify its argument.
    return n > 0 and torch.equal(module.recomposition_frequencies(equal.clone()), _of_text(equal))


def _of_text(frequencies: torch.Tensor) -> torch.Tensor:
    """Replace the method of Qwen's rotary embeddings that composes ``frequencies`` ``[3, 1, T, n]``.

    The three sets are for time, height and width. In a text, all three have the same position, so the first is used.
    """
    return torch.cat((frequencies[0], frequencies[0]), dim=-1)


def _compute_once(module: Any, kind: str) -> None:
    """Let a module that computes its frequencies in every step use the frequencies that it was created with."""
    if kind == _FIXED and hasattr(module, "rope_init_fn"):
        module.rope_init_fn = lambda *_, **__: (module.inv_freq, module.attention_scaling)


def _settle(module: torch.nn.Module, kind: str, layer_type: str | None, max_context: int) -> None:
    if kind != "longrope":
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = module.config
    parameters: dict[str, Any] = config.rope_parameters
    name = "inv_freq"
    if layer_type is not None:
        parameters, name = parameters[layer_type], f"{layer_type}_inv_freq"
    limit = parameters["original_max_position_embeddings"]
    if "short_mscale" in parameters:
        _scale(module, parameters, limit if max_context > limit else None)
    if max_context <= limit:
        return
    within: torch.Tensor = getattr(module, name)
    beyond, _ = ROPE_INIT_FUNCTIONS[kind](config, within.device, seq_len=max_context, layer_type=layer_type)
    if not beyond.equal(within):
        _choose(module, name, within, beyond.to(within.dtype), limit)


def _scale(module: Any, parameters: dict[str, Any], limit: int | None) -> None:
    """Let a rotary embedding of Phi-3.5-MoE, which has an output factor for each set of frequencies, choose the factor
    by the capacity too.

    For a long text, transformers uses the factor for long texts, but the frequencies for short ones. The model was
    trained with the factor and the frequencies for long texts. Without a ``limit`` there are no long texts.
    """
    within, beyond = (torch.tensor([float(parameters[f"{text}_mscale"])]) for text in ("short", "long"))
    if limit is None or beyond.equal(within):
        module.register_buffer("etkv_scale", within, persistent=False)
    else:
        _choose(module, "etkv_scale", within, beyond, limit)
    module.forward = types.MethodType(_rotation, module)


def _rotation(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines ``[1, T, head_dim]`` of positions ``[1, T]``."""
    angles = position_ids[..., None].float() * self.inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    scale = self.etkv_scale
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def _choose(module: torch.nn.Module, name: str, within: torch.Tensor, beyond: torch.Tensor, limit: int) -> None:
    """Let the attribute ``name`` of ``module`` be ``within`` up to a capacity of ``limit`` positions, else
    ``beyond``.
    """
    from etkv.export.by_capacity import select_by_capacity

    module.register_buffer(f"{name}_within", within, persistent=False)
    module.register_buffer(f"{name}_beyond", beyond, persistent=False)
    if hasattr(module, name):
        delattr(module, name)

    def chosen(self: torch.nn.Module) -> Any:
        return select_by_capacity(getattr(self, f"{name}_within"), getattr(self, f"{name}_beyond"), limit)

    known = type(module)
    module.__class__ = type(known.__name__, (known,), {name: property(chosen), "__module__": known.__module__})
