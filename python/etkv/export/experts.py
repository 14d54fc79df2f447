"""Mixtures of experts: products with the weights of the experts that a router chooses for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from etkv.export import mlx_quantization

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "etkv_gathered"
"""The name under which transformers finds these products."""

SORTED_FROM = 64
"""Steps with at least this number of rows sort the rows by expert, so that rows of one expert are adjacent."""


class Weights(torch.nn.Module):
    """The weights of one product for all experts, ``[experts, in, out]`` or packed ``[experts, out, ...]``."""

    weight: torch.Tensor
    packed: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, bits: int, tensors: dict[str, torch.Tensor | None]
    ) -> None:
        """``tensors`` are ``weight``, or ``packed``, ``scales`` and ``biases`` in ``bits`` bits.

        ``shape`` is ``[experts, out, in]``, and ``dtype`` that of the model.
        """
        super().__init__()
        self.shape, self.dtype, self.bits = shape, dtype, bits
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def plain(self) -> torch.Tensor:
        """Return the weights ``[experts, out, in]``, dequantized."""
        if not self.bits:
            plain: torch.Tensor = self.weight.transpose(-1, -2)
            return plain
        own = mlx_quantization.shifts(self.scales, self.biases, self.bits)
        return mlx_quantization.dequantize(self.packed, self.scales, self.bits, self.dtype, own)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, is_sorted: torch.Tensor) -> torch.Tensor:
        """Multiply each row of ``x``, ``[rows, 1, in]``, by the weights of its expert: ``[rows, 1, out]``."""
        ops: Any = torch.ops
        if not self.bits:
            product: torch.Tensor = ops.mlx.gather_mm(x, self.weight, rhs_indices=experts, sorted_indices=is_sorted)
        else:
            tensors = (self.packed, self.scales, self.biases)
            product = ops.etkv.packed_gathered(x, *tensors, experts, is_sorted, self.bits)
        return product


def register() -> None:
    """Register the products with transformers."""
    # The import registers the operations.
    import executorch.backends.mlx.custom_ops  # noqa: F401
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _run)


def _is_mixture(module: torch.nn.Module) -> bool:
    """Return whether ``module`` holds experts with transformers' interface for replacing their computation."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def are_plain(module: torch.nn.Module) -> bool:
    """Return whether ``module`` holds experts whose weights are those of transformers: no backend has replaced
    them.
    """
    return _is_mixture(module) and all(isinstance(getattr(module, name), torch.Tensor) for name in names(module))


def is_mixture(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has experts that a router chooses."""
    return any(_is_mixture(module) for module in model.modules())


def mixtures(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each layer's experts."""
    return ((name, module) for name, module in model.named_modules() if _is_mixture(module))


def names(module: Any) -> tuple[str, str]:
    """Return the names of the weights of the experts' first products, and of their second products."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def widths(name: str, module: Any) -> dict[str, int]:
    """Return the width of each product's input in a module of experts, by name; empty for other modules."""
    if not _is_mixture(module):
        return {}
    axis = -2 if module.is_transposed else -1
    return {f"{name}.{part}": getattr(module, part).shape[axis] for part in names(module)}


def take(model: PreTrainedModel, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let mixtures of experts in ``model`` whose weights are not packed compute with the functions of this file.

    ``keep`` moves a tensor to a file.
    """
    for _, module in mixtures(model):
        if are_plain(module):
            _replace(module, lambda _, weights: (0, {"weight": keep(weights.transpose(-1, -2).contiguous())}))


def pack(
    module: Any,
    bits: int,
    pack_rows: Callable[[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    keep: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Pack the weights of a module of experts in ``bits`` bits, and let it compute with the functions of this file.

    ``pack_rows`` returns packed weights, scales and biases for a name and the rows of all experts.
    """

    def packed(name: str, weights: torch.Tensor) -> tuple[int, dict[str, torch.Tensor | None]]:
        codes, scales, biases = pack_rows(name, weights.flatten(0, 1))
        if biases is None and not mlx_quantization.has_floats(scales):
            # In MLX, a weight is an unsigned integer times its scale, plus a bias.
            biases = keep(mlx_quantization.biases_of(scales, bits))
        parts = {"packed": codes, "scales": scales, "biases": biases}
        return bits, {
            part: None if tensor is None else tensor.unflatten(0, weights.shape[:2]) for part, tensor in parts.items()
        }

    _replace(module, packed)


def _replace(module: Any, made: Callable[[str, torch.Tensor], tuple[int, dict[str, torch.Tensor | None]]]) -> None:
    module.config._experts_implementation = NAME
    for name in names(module):
        weights = getattr(module, name).detach()
        delattr(module, name)
        weights = weights.transpose(-1, -2) if module.is_transposed else weights
        setattr(module, name, Weights(weights.shape, weights.dtype, *made(name, weights)))
        del weights


def plain_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the dequantized weights of experts under transformers' names."""
    return {
        f"{name}.{part}": (plain.transpose(-1, -2).contiguous() if module.is_transposed else plain)
        for name, module in mixtures(model)
        for part in names(module)
        # In a module that no backend has replaced, weights are tensors.
        if not isinstance(weights := getattr(module, part), torch.Tensor)
        for plain in [weights.plain()]
    }


def _run(
    module: Any, hidden_states: torch.Tensor, experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of one layer: ``[T, hidden]``, from ``[T, chosen]`` experts and their weights."""
    first, second = (getattr(module, name) for name in names(module))
    chosen = experts.shape[-1]
    ops: Any = torch.ops.mlx
    x, experts, is_sorted, inverse = ops.moe_gather_inputs(
        hidden_states, experts, chosen, max(1, SORTED_FROM // chosen - 1)
    )

    made = first(x, experts, is_sorted)
    if module.has_bias:
        made = made + getattr(module, f"{names(module)[0]}_bias")[experts].unsqueeze(-2)
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    made = second(made, experts, is_sorted)
    if module.has_bias:
        made = made + module.down_proj_bias[experts].unsqueeze(-2)
    if module.has_post_expert_norm:
        made = module.post_expert_norm(made)
    made = ops.moe_scatter_outputs(made, is_sorted, inverse, chosen)
    weighted: torch.Tensor = (made * routing_weights.unsqueeze(-1)).sum(dim=-2)
    return weighted.to(hidden_states.dtype)
