"""Scales the queries of Llama 4 by the positions of their tokens.

In layers without a rotary embedding, transformers multiplies queries by a factor that grows with the position. It
counts positions from the length of its own cache, which a program lacks: each step would begin at position 0. Here the
factor follows from the positions of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from etkv.export import recurrent


class ScaledAttention(Llama4TextAttention):  # type: ignore[misc] # transformers has no types.
    """An attention layer whose queries :mod:`etkv.export.attention` scales within a step of a program."""

    floor_scale: float
    attn_scale: float

    @property
    def attn_temperature_tuning(self) -> bool:
        """Whether transformers scales the queries: outside of a step of a program."""
        return not recurrent.is_in_step()


def take(model: torch.nn.Module) -> None:
    """Let the layers of ``model`` that scale queries by positions use the positions of a step."""
    module: Any
    for module in model.modules():
        if type(module) is Llama4TextAttention and module.attn_temperature_tuning and not module.use_rope:
            module.__class__ = ScaledAttention


def scaled(module: torch.nn.Module, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return the queries of ``module``, ``[1, heads, T, head_dim]``, scaled for tokens at ``position``, ``[T]``.

    Queries of modules that :func:`take` has not changed are returned unchanged.
    """
    if not isinstance(module, ScaledAttention):
        return query
    # transformers counts positions from 0, and adds 1 here.
    steps = torch.floor((position.float() + 1.0) / module.floor_scale)
    scale = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scale.reshape(1, 1, -1, 1)).to(query.dtype)
