"""``etkv::routed_experts``: the experts of one layer. A router chooses some of them for each token.

In a CPU program a delegate runs the op, see ``crates/etkv-cpu/src/experts/``. In plain PyTorch the op computes the
experts one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from etkv.linear_op import rounded
from etkv.packed_weights import WeightFormat, apart

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
}
"""Names of activations -> their functions."""

ACTIVATIONS = tuple(_ACTIVATIONS)


@dataclass(frozen=True)
class Activation:
    """The function between the two products of an expert.

    Without a gate, it applies the activation ``name`` to each element. With a gate it is::

        gate = min(gate, limit)
        up = min(max(up, -limit), limit)
        name(alpha * gate) / alpha * (up + offset)

    ``alpha`` is 1 except for ``silu``. ``limit`` is infinite if nothing is clamped.
    """

    name: str
    gated: bool
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0

    def __post_init__(self) -> None:
        """Raise :class:`ValueError` for an ``alpha`` that the activation does not use."""
        if self.alpha != 1.0 and not (self.gated and self.name == "silu"):
            raise ValueError(f"alpha is {self.alpha}, expected 1 except for gated experts with silu")

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activations of ``x`` ``[..., n]``. With a gate, the first half of ``x`` is the gate."""
        compute = _ACTIVATIONS[self.name]
        if not self.gated:
            return compute(x)
        gate, up = x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return compute(gate * self.alpha) / self.alpha * (up + self.offset)


@torch.library.custom_op("etkv::routed_experts", mutates_args=())
def routed_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
    first_format: str,
    first_group: int,
    second_format: str,
    second_group: int,
    activation: str,
    gated: bool,
    alpha: float,
    limit: float,
    offset: float,
) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs.

    Args:
        x: hidden states, ``[T, hidden]``.
        experts: int64 ``[T, k]``, the experts of each token, possibly with repetitions.
        weights: ``[T, k]``, the factors of the experts' outputs.
        first: the packed weights of all experts' first products, see :mod:`etkv.packed_weights`. With a gate, tiles of
            the gate and of the product that it gates alternate.
        second: the packed weights of all experts' second products.
        first_bias: ``[experts, rows of the packed weights]``, in the order of the packed rows, or None.
        second_bias: ``[experts, hidden]``, or None.
        first_format: the format of the first products' weights.
        first_group: the number of these weights that share a scale, or 0.
        second_format: the format of the second products' weights.
        second_group: the number of these weights that share a scale, or 0.
        activation: the ``name`` of an :class:`Activation`. The arguments after it are the activation's other fields.

    Returns:
        ``[T, hidden]`` in the dtype of ``x``.

    Raises:
        ValueError: an index is not the number of an expert.
    """
    return compute(
        x,
        experts,
        weights,
        first,
        second,
        first_bias,
        second_bias,
        (WeightFormat(first_format, first_group), WeightFormat(second_format, second_group)),
        Activation(activation, gated, alpha, limit, offset),
    )


routed_experts.register_fake(lambda x, *_: torch.empty_like(x))


def compute(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
    formats: tuple[WeightFormat, WeightFormat],
    between: Activation,
    *,
    rounds: bool = True,
) -> Tensor:
    """Return the outputs of :func:`routed_experts`.

    Without ``rounds``, the inputs of products with integer weights are not rounded.

    Each chosen expert computes all tokens, and the outputs of tokens that did not choose it are discarded. So the
    outputs of a token do not depend on the choices of other tokens, not even in their last bits.
    """
    chosen = sorted({int(expert) for expert in experts.flatten()})
    if chosen and not 0 <= chosen[0] <= chosen[-1] < len(first):
        raise ValueError(f"expected experts from 0 to {len(first) - 1}, got {chosen[0]} to {chosen[-1]}")

    def product(rows: Tensor, matrix: Tensor, bias: Tensor | None, fmt: WeightFormat) -> Tensor:
        if rounds and fmt.group_size:
            rows = rounded(rows, fmt.group_size)
        made = rows @ matrix.T
        return made if bias is None else made + bias

    made = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen:
        bias = None if first_bias is None else first_bias[expert]
        hidden = product(x.float(), formats[0].unpack(first[expert]), bias, formats[0])
        hidden = between(torch.cat([half.T for half in apart(hidden.T)], dim=-1) if between.gated else hidden)
        matrix = formats[1].unpack(second[expert])[: x.shape[1]]
        output = product(hidden, matrix, None if second_bias is None else second_bias[expert], formats[1])
        is_chosen = experts == expert
        factors = torch.where(is_chosen, weights, 0.0).sum(dim=1, keepdim=True)
        made = torch.where(is_chosen.any(dim=1, keepdim=True), made + output * factors, made)
    return made.to(x.dtype)
