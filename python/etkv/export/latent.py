"""Latent attention (MLA): the cache keeps one latent row a token, and not the keys and values of each head.

transformers' modules expand a latent of ``rank`` values to the keys and values of all heads, by one weight, in their
method ``expand_kv``. Within a step of a program that weight is applied to queries and results instead: a query reads
latents, as if they were keys, and its result is a mean of latents. Both forms are equal but for rounding. So each token
has one row of ``rank`` and ``rotary`` elements as its key, of which the first ``rank`` are its value.
:mod:`etkv.export.values_in_keys` finds that in the graph, and the cache stores the key alone.
"""

from __future__ import annotations

import types
from typing import Any

import torch

_EXPANDS = "expand_kv"
"""The method by which transformers' modules expand latents."""


class _Expansion(torch.nn.Module):
    """The weight that expands latents, ``[heads * (key + value), rank]``, under the name of the layer that it replaces.

    It is no linear layer, so it is not quantized.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """Expand ``[..., rank]``."""
        return torch.nn.functional.linear(latent, self.weight)


def take(model: torch.nn.Module) -> None:
    """Let the modules of ``model`` with latent attention keep latents within a step of a program.

    Raises :class:`ValueError` for a module whose latents are expanded in a form that is not known.
    """
    for name, module in model.named_modules():
        if hasattr(module, _EXPANDS) and not is_latent(module):
            _take(name, module)


def expansions(model: torch.nn.Module) -> set[Any]:
    """Return the layers of ``model`` that expand latents, which :func:`take` replaces."""
    return {getattr(module, "kv_b_proj", None) for module in model.modules() if hasattr(module, _EXPANDS)}


def is_latent(module: torch.nn.Module) -> bool:
    """Return whether ``module`` was taken."""
    return hasattr(module, "etkv_expands")


def query(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Return queries that read latent rows, ``[1, heads, T, rank + rotary]``, of those that read keys."""
    plain, rotary = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    joined: torch.Tensor = torch.cat((plain @ module.etkv_of_key, rotary), dim=-1)
    return joined


def result(module: Any, latent: torch.Tensor) -> torch.Tensor:
    """Return results ``[1, heads, T, v_head_dim]`` of means of latents, ``[1, heads, T, rank]``."""
    expanded: torch.Tensor = latent @ module.etkv_of_value
    return expanded


def _take(name: str, module: Any) -> None:
    expansion = getattr(module, "kv_b_proj", None)
    sizes = [getattr(module, size, None) for size in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if not isinstance(expansion, torch.nn.Linear) or expansion.bias is not None or None in sizes:
        raise ValueError(f"{name}: its latents are expanded in a form that the exporter does not know")
    key, rotary, value = sizes
    weight = expansion.weight
    by_head = weight.detach().view(-1, key + value, weight.shape[1])
    of_key, of_value = by_head[:, :key].contiguous(), by_head[:, key:].transpose(1, 2).contiguous()
    if not _expands(module, of_key, of_value, rotary):
        raise ValueError(f"{name}: its latents are expanded in a form that the exporter does not know")
    module.kv_b_proj = _Expansion(weight)
    # Not written with the model: they are parts of the weight.
    module.register_buffer("etkv_of_key", of_key, persistent=False)
    module.register_buffer("etkv_of_value", of_value, persistent=False)
    module.etkv_expands = getattr(module, _EXPANDS)
    setattr(module, _EXPANDS, types.MethodType(_expand, module))


def _expands(module: Any, of_key: torch.Tensor, of_value: torch.Tensor, rotary: int) -> bool:
    """Return whether the method of ``module`` expands a latent as the parts of its weight do."""
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
    """Return the rows of latents ``[1, 1, T, rank]``, or expand them outside of a step."""
    from etkv.export import attention

    if not attention.is_in_step():
        expanded: tuple[torch.Tensor, torch.Tensor] = module.etkv_expands(latent, rotary)
        return expanded
    return torch.cat((latent, rotary), dim=-1), latent
