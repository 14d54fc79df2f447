"""Rotary embeddings whose frequencies depend on the length of a text, which a graph does not know.

The keys in a cache were rotated with the frequencies of an earlier length, so one text has one set of them. Long RoPE
has two: those up to the length of the first training, and those for longer texts. A program that may get so long has
both, and takes those of its cache's capacity when it is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_FIXED = "default"
"""The kind of rotary embedding that keeps its frequencies."""


def settle(model: PreTrainedModel, max_context: int) -> None:
    """Let no rotary embedding of ``model`` look at the length of a text; a program has ``max_context`` positions.

    Dynamic scaling begins past the positions that the model was made for, and no program has more positions than these.
    """
    # A list: what is given two sets becomes another class.
    for module in list(model.modules()):
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
    limit = parameters["original_max_position_embeddings"]
    if max_context <= limit:
        return
    within: torch.Tensor = getattr(module, name)
    beyond, _ = ROPE_INIT_FUNCTIONS[kind](config, within.device, seq_len=max_context, layer_type=layer_type)
    if not beyond.equal(within):
        _choose(module, name, beyond.to(within.dtype), limit)


def _choose(module: torch.nn.Module, name: str, beyond: torch.Tensor, limit: int) -> None:
    """Make the attribute ``name`` of ``module`` a choice: what it is up to ``limit`` positions, and ``beyond``."""
    from etkv.export.by_capacity import select_by_capacity

    module.register_buffer(f"{name}_within", getattr(module, name), persistent=False)
    module.register_buffer(f"{name}_beyond", beyond, persistent=False)
    delattr(module, name)

    def chosen(self: torch.nn.Module) -> Any:
        return select_by_capacity(getattr(self, f"{name}_within"), getattr(self, f"{name}_beyond"), limit)

    known = type(module)
    module.__class__ = type(known.__name__, (known,), {name: property(chosen), "__module__": known.__module__})
