"""Mixtures of experts: products with the weights of the experts that a router chooses for each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from etkv.export.request import GROUP_SIZES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "etkv_gathered"
"""The name under which transformers finds these products."""

SORTED_FROM = 64
"""The least number of rows of a step that are sorted by expert, so that rows of one expert are adjacent."""


class Weights(torch.nn.Module):
    """The weights of one product for all experts, from ``[experts, out, in]``.

    Until :meth:`pack`, they are one linear layer with the rows of all experts, which a quantization finds. Then they
    are quantized tensors ``[experts, out, in]``, or one float tensor ``[experts, in, out]``.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.shape = weights.shape
        rows = weights.flatten(0, 1)
        self.rows = torch.nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        self.rows.weight = torch.nn.Parameter(rows, requires_grad=False)
        self.group_size = self.bits = 0

    def plain(self) -> torch.Tensor:
        """Return the weights ``[experts, out, in]``, dequantized."""
        from torchao.utils import TorchAOBaseTensor

        rows = self.rows.weight.detach()
        plain = rows.dequantize() if isinstance(rows, TorchAOBaseTensor) else rows
        return plain.reshape(self.shape)

    def pack(self) -> None:
        """Replace the linear layer by the operands of MLX's operations."""
        rows: Any = self.rows.weight.detach()
        del self.rows
        if not hasattr(rows, "qdata"):
            self.register_buffer("weight", rows.reshape(self.shape).transpose(-1, -2).contiguous())
            return
        self.bits = 4 if rows.target_dtype == getattr(torch, "int4") else 8  # noqa: B009 (torch's types lack it)
        self.group_size, repeats = rows.block_size[-1], 1
        if self.group_size not in GROUP_SIZES:
            # A row's one scale is repeated over groups of a size that MLX takes.
            self.group_size = max(size for size in GROUP_SIZES if self.shape[-1] % size == 0)
            repeats = self.shape[-1] // self.group_size
        experts = self.shape[:-1]
        self.register_buffer("qdata", rows.qdata.reshape(self.shape))
        for name in ("scale", "zero_point"):
            groups = getattr(rows, name).reshape(*experts, -1)
            self.register_buffer(name, groups.repeat_interleave(repeats, dim=-1))

    def forward(self, x: torch.Tensor, experts: torch.Tensor, is_sorted: torch.Tensor) -> torch.Tensor:
        """Multiply each row of ``x``, ``[rows, 1, in]``, by the weights of its expert: ``[rows, 1, out]``."""
        ops: Any = torch.ops.mlx
        if not self.group_size:
            # A model that is not packed runs only as the reference of a comparison.
            weight = self.plain().transpose(-1, -2) if "rows" in self._modules else self.weight
            product: torch.Tensor = ops.gather_mm(x, weight, rhs_indices=experts, sorted_indices=is_sorted)
            return product
        product = ops.gather_qmm(
            x,
            self.qdata,
            self.scale,
            biases=self.zero_point,
            rhs_indices=experts,
            group_size=self.group_size,
            bits=self.bits,
            sorted_indices=is_sorted,
        )
        return product


def register() -> None:
    """Register the products with transformers."""
    # This registers the operations.
    import executorch.backends.mlx.custom_ops  # noqa: F401
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _run)


def _is_mixture(module: torch.nn.Module) -> bool:
    """Return whether ``module`` holds experts whose computation transformers lets others replace."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def is_mixture(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has experts that a router chooses."""
    return any(_is_mixture(module) for module in model.modules())


def mixtures(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Return the modules of experts, each with its name."""
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


def take(model: PreTrainedModel) -> None:
    """Let every mixture of experts in ``model`` compute with this module, with linear layers as weights."""
    for _, module in mixtures(model):
        module.config._experts_implementation = NAME
        for name in names(module):
            weights = getattr(module, name).detach()
            delattr(module, name)
            setattr(module, name, Weights(weights.transpose(-1, -2) if module.is_transposed else weights))


def plain_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the dequantized weights of experts under transformers' names."""
    return {
        f"{name}.{part}": (plain.transpose(-1, -2).contiguous() if module.is_transposed else plain)
        for name, module in mixtures(model)
        for part in names(module)
        # A module that no backend took has tensors.
        if not isinstance(weights := getattr(module, part), torch.Tensor)
        for plain in [weights.plain()]
    }


def pack(model: PreTrainedModel) -> None:
    """Pack the weights of all experts of ``model``."""
    for module in model.modules():
        if isinstance(module, Weights):
            module.pack()


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
