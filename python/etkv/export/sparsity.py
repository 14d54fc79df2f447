"""Sparse activations of Gemma 3n: a layer keeps only values above a quantile of a normal distribution.

transformers computes the quantile in each step, with a function that cannot be exported. Here the quantile is a
constant, because it follows from the configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_METHOD = "_gaussian_topk"


def settle(model: torch.nn.Module) -> None:
    """Let the layers of ``model`` with sparse activations use a constant quantile.

    Raises :class:`ValueError` for a layer whose result changes with the constant.
    """
    for name, module in model.named_modules():
        if hasattr(module, _METHOD) and getattr(module, "activation_sparsity", 0.0) > 0.0:
            dtype = next(model.parameters()).dtype
            own = _keep_above(module.activation_sparsity, dtype)
            trial = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
            if not torch.allclose(own(trial), getattr(module, _METHOD)(trial), atol=8 * torch.finfo(dtype).eps):
                raise ValueError(f"{name}: it makes activations sparse in a way that the exporter does not support")
            setattr(module, _METHOD, own)


def _keep_above(sparsity: float, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that subtracts the quantile ``sparsity`` of the last axis, and clamps the result at 0."""
    quantile = float(torch.distributions.Normal(0, 1).icdf(torch.tensor(sparsity, dtype=torch.float32)).to(dtype))

    def keep(x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        spread = (x - mean).square().mean(dim=-1, keepdim=True).sqrt()
        return torch.nn.functional.relu(x - (mean + spread * quantile))

    return keep
