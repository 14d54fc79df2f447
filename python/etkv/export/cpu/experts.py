"""Mixtures of experts for the CPU: each layer's experts become one call of ``etkv::routed_experts``.

A module of experts is recognised by transformers' interface for replacing its computation. To find the activation
between the products, the results of the module's own function are compared with those of each activation of the op.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from etkv.experts_op import ACTIVATIONS, Activation, routed_experts
from etkv.export import experts, parallel
from etkv.packed_weights import WeightFormat, alternate, apart, filled, padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from etkv.export.packing import FileIntegers

NAME = "etkv_routed"
"""The name under which transformers finds these products."""

FORMATS = {"8da4w": "int4", "8da8w": "int8"}
"""Quantization -> format of the weights."""

GROUP_SIZE = 32
"""The group size of experts for quantizations with one scale for each row of a linear layer."""

_PROBES = 64
"""Number of rows on which functions are compared."""

_QUICK_GELU = 1.702
"""The factor with which SiLU is transformers' ``quick_gelu``."""

_FACTORS = (4.0, 16.0, 256.0, 4096.0, 65536.0)
"""The sizes of the inputs in :func:`find_activation`."""


class Packed(torch.nn.Module):
    """The packed weights of one product of all experts. In the model the weights were ``[experts, out, in]``.

    ``shape`` is the shape in the model. ``join`` joins the rows of a gate and the rows of the product that it gates,
    in the model's order; None without a gate. ``bias`` is in the order of the packed rows.
    """

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        shape: torch.Size,
        fmt: WeightFormat,
        packed: torch.Tensor,
        join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.fmt, self._join = tuple(shape), fmt, join
        self.register_buffer("packed", packed)
        self.register_buffer("bias", bias)

    def plain(self) -> torch.Tensor:
        """Return the dequantized weights in the model's order."""
        _, rows, columns = self.shape
        made = torch.empty(self.shape)
        for expert, of_expert in enumerate(self.packed):
            matrix = self.fmt.unpack(of_expert)
            if self._join is not None:
                matrix = self._join(*(half[: rows // 2] for half in apart(matrix)))
            made[expert] = matrix[:rows, :columns]
        return made


def register() -> None:
    """Register the op with transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _run)


def pack(
    model: PreTrainedModel,
    name: str | None = None,
    group_size: int | None = None,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> None:
    """Pack the weights of experts of ``model`` that are not packed yet, and let the op compute the experts.

    ``name`` is the quantization. Without a quantization, weights are stored in bfloat16 if bfloat16 represents their
    values exactly, else in float32. ``empty`` allocates tensors.

    Raises :class:`ValueError` for experts that the op cannot compute.
    """
    register()
    for path, module in experts.mixtures(model):
        if isinstance(module.down_proj, Packed):
            continue
        try:
            pack_module(module, None if name is None else FORMATS[name], group_size, empty)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def pack_module(
    module: Any,
    name: str | None,
    group_size: int | None,
    empty: Callable[..., torch.Tensor] = torch.empty,
    kept: FileIntegers | None = None,
) -> None:
    """Pack the weights of a module of experts in the format ``name``; ``None`` is bfloat16 or float32.

    ``empty`` allocates tensors. ``kept`` returns the packed integers of a file. These keep their format. Raises
    :class:`ValueError` for experts that the op cannot compute.
    """
    if module.has_post_expert_norm:
        raise ValueError("its experts end with a norm, which backend cpu does not support")
    first, second = experts.names(module)
    activation = find_activation(module)
    split, join = _halves(module) if module.has_gate else (None, None)
    weights = [getattr(module, part).detach() for part in (first, second)]
    if module.is_transposed:
        weights = [part.transpose(-1, -2) for part in weights]
    fmt = _format(weights, name, group_size)
    biases: list[torch.Tensor | None] = [None, None]
    if module.has_bias:
        rows = getattr(module, f"{first}_bias").detach().float()
        rows = torch.stack([alternate(*split(of)) if split else of for of in rows])
        rows = torch.nn.functional.pad(rows, (0, padded(rows.shape[1]) - rows.shape[1]))
        biases = [rows, getattr(module, f"{second}_bias").detach().float().clone()]
    made = []
    for part, of_part, splits in ((first, weights[0], split), (second, weights[1], None)):
        found = None if kept is None else kept(part, of_part, functools.partial(_arranged, len(of_part), splits))
        if found is None:
            width = of_part.shape[2] if part == first else padded(of_part.shape[2])
            found = _quantized(of_part, fmt, splits, width, empty), fmt
        made.append(found)
    packed = [
        Packed(of_part.shape, own, tensor.unflatten(0, (len(of_part), -1)), joins, bias)
        for of_part, (tensor, own), joins, bias in zip(weights, made, (join, None), biases, strict=True)
    ]
    for part, of_part in zip((first, second), packed, strict=True):
        # Free the model's own weights before the next layer is packed.
        delattr(module, part)
        setattr(module, part, of_part)
    formats = [value for part in packed for value in dataclasses.astuple(part.fmt)]
    module.etkv_constants = (*formats, *dataclasses.astuple(activation))
    module.config._experts_implementation = NAME


def _arranged(n_experts: int, split: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all experts in the order of packed weights. The rows of each expert fill whole tiles."""
    of_experts = rows.unflatten(0, (n_experts, -1))
    return torch.cat([alternate(*split(of)) if split else filled(of) for of in of_experts])


def _quantized(
    weights: torch.Tensor, fmt: WeightFormat, split: Any, width: int, empty: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Return packed ``weights``, ``[experts, out, in]``, whose columns are padded with zeros to ``width``."""
    n_experts, rows, columns = weights.shape
    of_expert = fmt.shape(2 * padded(rows // 2) if split else rows, width)
    packed = empty((n_experts * of_expert[0], *of_expert[1:]), dtype=fmt.dtype)
    tiles = packed.unflatten(0, (n_experts, -1))

    def fill(part: slice) -> None:
        # One expert at a time: all experts in float32 would need several times the memory of the packed weights.
        for expert in range(part.start, part.stop):
            matrix = weights[expert].detach().float()
            if split is not None:
                matrix = alternate(*split(matrix))
            tiles[expert] = fmt.pack(torch.nn.functional.pad(matrix, (0, width - columns)))

    parallel.by_parts(n_experts, 1, fill)
    return packed


def _format(weights: list[torch.Tensor], name: str | None, group_size: int | None) -> WeightFormat:
    if name is not None:
        return WeightFormat(name, group_size or 0)
    exact = all(bool((of.bfloat16().to(of.dtype) == of).all()) for part in weights for of in part)
    return WeightFormat("bfloat16" if exact else "float32")


def _halves(module: Any) -> tuple[Any, Any]:
    """Return two functions, which split and join the rows of a gate and the product that it gates."""
    if module.is_concatenated:
        return lambda rows: rows.chunk(2), lambda gate, up: torch.cat([gate, up])
    return lambda rows: (rows[::2], rows[1::2]), lambda gate, up: torch.stack([gate, up], dim=1).flatten(0, 1)


def find_activation(module: Any) -> Activation:
    """Return the function between the products of a module of experts.

    Raises :class:`ValueError` if the op does not have it.
    """
    gated = module.has_gate
    theirs = module._apply_gate if gated else module.act_fn
    numbers = sorted(
        {float(value) for value in vars(module).values() if type(value) in (int, float) and 0 < value < 1e4}
    )
    generator = torch.Generator().manual_seed(0)
    width = getattr(module, experts.names(module)[0]).shape[-1 if module.is_transposed else -2]
    x = torch.randn(_PROBES, width, generator=generator)
    # Limits are numbers of the module, or are not attributes. Scale the rows so that some exceed every possible
    # limit.
    x *= torch.tensor([1.0, *_FACTORS, *(2 * number for number in numbers)]).repeat(_PROBES)[:_PROBES, None]
    with torch.no_grad():
        expected = theirs(x.clone())
    mine = x
    if gated:
        split, _ = _halves(module)
        mine = torch.cat([half.T for half in split(x.T)], dim=-1)
    for found in _candidates(gated, numbers):
        if torch.allclose(found(mine), expected, rtol=1e-4, atol=1e-5):
            return found
    name = type(getattr(module, "act_fn", None)).__name__
    raise ValueError(
        f"the function between the products of its experts ({name}) is not one of those of backend cpu: "
        f"{', '.join(ACTIVATIONS)}, gated or not, with or without limits"
    )


def _candidates(gated: bool, numbers: list[float]) -> Iterator[Activation]:
    """Yield activations, simple ones first. ``numbers`` are candidates for limits and factors."""
    if not gated:
        yield from (Activation(name, gated=False) for name in ACTIVATIONS)
        return
    for limit, offset, alpha in itertools.product((math.inf, *numbers), (0.0, 1.0), (1.0, _QUICK_GELU, *numbers)):
        for name in ACTIVATIONS if alpha == 1.0 else ("silu",):
            yield Activation(name, True, alpha, limit, offset)


def _run(module: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
    """Compute the experts of one layer: ``[T, hidden]``, from ``[T, k]`` experts and their weights."""
    first, second = (getattr(module, name) for name in experts.names(module))
    made: torch.Tensor = routed_experts(
        hidden_states,
        chosen.to(torch.int64),
        routing_weights.to(torch.float32),
        first.packed,
        second.packed,
        first.bias,
        second.bias,
        *module.etkv_constants,
    )
    return made
