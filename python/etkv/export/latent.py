"""Latent attention (MLA): the cache keeps one latent row for each token, instead of keys and values of each head.

The modules of transformers expand a latent of ``rank`` elements to the keys and values of all heads, with one weight,
in their method ``expand_kv``. In a program, that weight is applied to queries and results instead: queries attend to
latents as if they were keys, and a result is a mean of latents. Both computations are equal except for rounding. So
each token has one row of ``rank + rotary`` elements as its key, and the first ``rank`` elements are its value.
:mod:`etkv.export.values_in_keys` finds such values in the graph, and the cache stores only the key.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from etkv.export import recurrent

_EXPANDS = "expand_kv"
"""The method of transformers' modules that expands latents."""


class _Expansion(torch.nn.Module):
    """The weight that expands latents, ``[heads * (key + value), rank]``. It has the name of the layer that it
    replaces.

    It is not a linear layer, so it is not quantized.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """Expand ``[..., rank]``."""
        return torch.nn.functional.linear(latent, self.weight)


def take(model: torch.nn.Module) -> None:
    """Let the modules of ``model`` with latent attention cache latents within a step of a program.

    Raises :class:`ValueError` for a module that expands latents in an unknown way.
    """
    for name, module in model.named_modules():
        if hasattr(module, _EXPANDS) and not is_latent(module):
            _take(name, module)


def expansions(model: torch.nn.Module) -> set[Any]:
    """Return the layers of ``model`` that expand latents. :func:`take` replaces these layers."""
    return {getattr(module, "kv_b_proj", None) for module in model.modules() if hasattr(module, _EXPANDS)}


def is_latent(module: torch.nn.Module) -> bool:
    """Return whether :func:`take` has changed ``module``."""
    return hasattr(module, "etkv_expands")


def query(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Convert queries for keys to queries for latent rows, ``[1, heads, T, rank + rotary]``."""
    plain, rotary = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    joined: torch.Tensor = torch.cat((plain @ module.etkv_of_key, rotary), dim=-1)
    return joined


def result(module: Any, latent: torch.Tensor) -> torch.Tensor:
    """Convert means of latents ``[1, heads, T, rank]`` to results ``[1, heads, T, v_head_dim]``."""
    expanded: torch.Tensor = latent @ module.etkv_of_value
    return expanded


def _take(name: str, module: Any) -> None:
    expansion = getattr(module, "kv_b_proj", None)
    sizes = [getattr(module, size, None) for size in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if not isinstance(expansion, torch.nn.Linear) or expansion.bias is not None or None in sizes:
        raise ValueError(f"{name}: its latents are expanded in a way that the exporter does not support")
    key, rotary, value = sizes
    weight = expansion.weight
    by_head = weight.detach().view(-1, key + value, weight.shape[1])
    of_key, of_value = by_head[:, :key].contiguous(), by_head[:, key:].transpose(1, 2).contiguous()
    if not _expands(module, of_key, of_value, rotary):
        raise ValueError(f"{name}: its latents are expanded in a way that the exporter does not support")
    module.kv_b_proj = _Expansion(weight)
    # These buffers are not written with the model, because they are parts of the weight.
    module.register_buffer("etkv_of_key", of_key, persistent=False)
    module.register_buffer("etkv_of_value", of_value, persistent=False)
    module.etkv_expands = getattr(module, _EXPANDS)
    setattr(module, _EXPANDS, types.MethodType(_expand, module))


def _expands(module: Any, of_key: torch.Tensor, of_value: torch.Tensor, rotary: int) -> bool:
    """Return whether the method of ``module`` expands a latent to its products with the two parts of the weight."""
    random = torch.Generator().manual_seed(0)
    latent = torch.randn(1, 1, 2, of_value.shape[1], generator=random).to(of_value)
    rotated = torch.randn(1, 1, 2, rotary, generator=random).to(of_value)
    with torch.no_grad():
        keys, values = getattr(module, _EXPANDS)(latent, rotated)
    expected = torch.cat((latent @ of_key.transpose(1, 2), rotated.expand(-1, of_key.shape[0], -1, -1)), dim=-1)
    pairs = ((keys, expected), (values, latent @ of_value))
    return all(
        found.shape == other.shape and bool((found - other).abs().max() <= 0.05 * other.abs().max())
        for found, other in pairs
    )


def _expand(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latent rows of ``[1, 1, T, rank]`` within a step. Outside of a step, expand the latents."""
    if not recurrent.is_in_step():
        expanded: tuple[torch.Tensor, torch.Tensor] = module.etkv_expands(latent, rotary)
        return expanded
    return torch.cat((latent, rotary), dim=-1), latent
