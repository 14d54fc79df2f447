"""Converts the experts of Llama 4, which scale their inputs, to the interface of other mixtures of experts.

transformers computes every expert for every token, with inputs of zeros if the router did not choose the expert. An
expert returns zeros for zeros, so computing the chosen experts suffices. Each pair of a token and an expert becomes a
row: its input is multiplied by the router's score, and its output has weight 1.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations import moe
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe


class RoutedExperts(Llama4TextExperts):  # type: ignore[misc] # transformers has no types.
    """The experts of one layer, with transformers' interface for replacing their computation."""

    config: Any
    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_transposed, is_concatenated = True, True
    _is_expert_parallel = False
    _apply_gate = moe._default_apply_gate

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the outputs ``[n, hidden]`` of the experts ``chosen``, ``[n, 1]``, for the rows of ``x``."""
        compute = moe.ALL_EXPERTS_FUNCTIONS.get_interface(self.config._experts_implementation or "eager", _one_by_one)
        made: torch.Tensor = compute(self, x, chosen, weights)
        return made


class RoutedMoe(Llama4TextMoe):  # type: ignore[misc] # transformers has no types.
    """A layer of experts that computes only the chosen experts."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs ``[tokens, hidden]``, and the router's logits."""
        rows = hidden_states.reshape(-1, self.hidden_dim)
        _, logits = self.router(rows)
        largest, chosen = torch.topk(logits, self.top_k, dim=1)
        scores = torch.sigmoid(largest.float()).to(rows.dtype).unsqueeze(-1)
        scaled = (rows.unsqueeze(1) * scores).reshape(-1, self.hidden_dim)
        routed = self.experts(scaled, chosen.reshape(-1, 1), torch.ones_like(scaled[:, :1]))
        return self.shared_expert(rows) + routed.reshape(-1, self.top_k, self.hidden_dim).sum(dim=1), logits


def take(model: torch.nn.Module) -> None:
    """Convert the layers of experts in ``model`` that scale their inputs."""
    module: Any
    for module in model.modules():
        if type(module) is Llama4TextMoe:
            module.__class__ = RoutedMoe
            module.experts.__class__ = RoutedExperts
            module.experts.config = module.shared_expert.config


def _one_by_one(module: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows = (chosen == expert).squeeze(1)
        between = module._apply_gate(x[rows] @ module.gate_up_proj[expert])
        made[rows] = between @ module.down_proj[expert] * weights[rows]
    return made
