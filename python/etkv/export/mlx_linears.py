"""Linear layers and embeddings with packed weights, as MLX's operations read them.

In a program ``etkv::packed_linear`` is a ``QuantizedMatmul``, and ``etkv::packed_embedding`` a gather of packed rows
and their dequantization. In plain PyTorch both unpack the weights, a part at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from etkv.export import experts, mlx_quantization
from etkv.export.packing import PackedLayer
from etkv.export.request import GROUP_SIZES
from etkv.export.scratch import Scratch

if TYPE_CHECKING:
    import torch.fx

_PART = 1 << 22
"""The weights that are unpacked at once."""


@torch.library.custom_op("etkv::packed_linear", mutates_args=())
def linear(x: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the products ``[.., rows]`` of ``x``, ``[.., columns]``, with a matrix of packed weights.

    ``packed`` and ``scales`` are those of :func:`etkv.export.mlx_quantization.quantize`.
    """
    step = max(1, _PART // x.shape[-1])
    parts = zip(packed.split(step), scales.split(step), strict=True)
    products = (x @ mlx_quantization.dequantize(*part, bits, x.dtype).T for part in parts)
    return torch.cat(list(products), dim=-1)


@linear.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@torch.library.custom_op("etkv::packed_embedding", mutates_args=())
def embedding(ids: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the rows of packed weights at ``ids``, ``[*shape of ids, columns]`` in the dtype of ``scales``."""
    # An index selects no rows of uint32.
    rows = packed.view(torch.int32)[ids].view(torch.uint32)
    return mlx_quantization.dequantize(rows, scales[ids], bits, scales.dtype)


@embedding.register_fake
def _(ids: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    return scales.new_empty((*ids.shape, packed.shape[1] * 32 // bits))


@torch.library.custom_op("etkv::packed_gathered", mutates_args=())
def gathered(
    x: Tensor, packed: Tensor, scales: Tensor, biases: Tensor, experts: Tensor, is_sorted: Tensor, bits: int
) -> Tensor:
    """Return the products ``[n, 1, rows]`` of ``x``, ``[n, 1, columns]``, with the matrices at ``experts``, ``[n]``.

    ``packed`` and ``scales`` are those of :func:`etkv.export.mlx_quantization.quantize` for each expert. ``biases`` are
    for MLX, and so is ``is_sorted``: whether rows of one expert are adjacent.
    """
    made = x.new_empty((*x.shape[:-1], packed.shape[1]))
    for expert in experts.unique().tolist():
        chosen = experts == expert
        matrix = mlx_quantization.dequantize(packed[expert], scales[expert], bits, x.dtype)
        made[chosen] = x[chosen] @ matrix.T
    return made


@gathered.register_fake
def _(
    x: Tensor, packed: Tensor, scales: Tensor, biases: Tensor, experts: Tensor, is_sorted: Tensor, bits: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[1]))


class _Layer(PackedLayer):
    packed: Tensor
    scales: Tensor
    etkv_bits: int

    def plain(self) -> Tensor:
        """Return the weights, dequantized, in the dtype of the model."""
        return mlx_quantization.dequantize(self.packed, self.scales, self.etkv_bits, self.scales.dtype)


class PackedLinear(_Layer, torch.nn.Linear):  # type: ignore[override] # Its weight is no parameter.
    """A linear layer with packed weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the products, ``[.., out]``."""
        made: Tensor = linear(input, self.packed, self.scales, self.etkv_bits)
        return made if self.bias is None else made + self.bias


class PackedEmbedding(_Layer, torch.nn.Embedding):  # type: ignore[override] # Its weight is no parameter.
    """An embedding with packed weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ids."""
        made: Tensor = embedding(input, self.packed, self.scales, self.etkv_bits)
        return made


class Packer:
    """Packs weights in ``bits`` bits. ``group_size`` elements of a row share a scale; ``None`` is the whole row."""

    def __init__(self, bits: int, group_size: int | None, scratch: Scratch) -> None:
        self._bits, self._group_size, self._scratch = bits, group_size, scratch

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return packed weights and scales, in groups of a size that MLX takes."""
        columns = weight.shape[1]
        group_size = self._group_size or columns
        packed, scales = mlx_quantization.quantize(weight, self._bits, group_size, self._scratch.empty)
        # A row's one scale is repeated over groups.
        taken = group_size if group_size in GROUP_SIZES else max(size for size in GROUP_SIZES if columns % size == 0)
        return packed, self._scratch.keep(scales.repeat_interleave(group_size // taken, dim=1))

    def install(self, layer: Any, packed: tuple[Tensor, Tensor]) -> type[PackedLayer]:
        """Give packed weights to ``layer``."""
        for name, tensor in zip(("packed", "scales"), packed, strict=True):
            layer.register_buffer(name, tensor)
        layer.etkv_bits = self._bits
        return PackedLinear if isinstance(layer, torch.nn.Linear) else PackedEmbedding

    def pack_experts(self, module: Any) -> None:
        """Pack the weights of experts in place."""
        experts.pack(module, self._bits, self.pack, self._scratch.keep)


def register() -> None:
    """Tell ExecuTorch which nodes of MLX programs the operations of this module are."""
    from executorch.backends.mlx.builder.op_helpers import emit_lifted_constant, emit_quantized_gather
    from executorch.backends.mlx.builder.op_registry import REGISTRY
    from executorch.backends.mlx.ops import _resolve_sorted_indices_flag
    from executorch.backends.mlx.serialization.mlx_graph_schema import (
        GatherQmmNode,
        MultiplyNode,
        QuantizedMatmulNode,
    )

    def biases_of(builder: Any, scales: torch.fx.Node, bits: int) -> Any:
        """Return the slot of biases, which a program computes from scales when it is loaded."""
        name = f"{builder.get_placeholder_target(scales)}_to_biases"
        if name in builder.extra_constants:
            return builder.slot_manager.get_slot(name)
        dtype = scales.meta["val"].dtype
        offset = emit_lifted_constant(builder, -(1 << (bits - 1)), dtype)
        (slot,) = builder.slot_map([scales])
        made = builder.make_or_get_constant(name, torch.tensor(0.0, dtype=dtype))
        a, b, out = (builder.slot_to_tid(each) for each in (slot, offset, made))
        builder.emit_init(MultiplyNode(a=a, b=b, out=out))
        return made

    def packed_linear(builder: Any, node: torch.fx.Node) -> Any:
        x, packed, scales, bits = builder.args(node)
        biases = biases_of(builder, node.args[2], bits)  # type: ignore[arg-type] # A weight is a node.
        made = builder.make_or_get_slot(node)
        names = ("x", "w", "scales", "out", "biases")
        tids = map(builder.slot_to_tid, (x, packed, scales, made, biases))
        builder.emit(
            QuantizedMatmulNode(
                **dict(zip(names, tids, strict=True)),
                group_size=_group_size(node.args[1], node.args[2], bits),
                bits=bits,
                mode="affine",
                transpose=True,
            )
        )
        return made

    def packed_embedding(builder: Any, node: torch.fx.Node) -> Any:
        ids, packed, scales, bits = builder.args(node)
        biases = biases_of(builder, node.args[2], bits)  # type: ignore[arg-type] # A weight is a node.
        made = builder.make_or_get_slot(node)
        emit_quantized_gather(
            builder,
            made,
            ids,
            packed,
            scales,
            biases,
            group_size=_group_size(node.args[1], node.args[2], bits),
            bits=bits,
            mode="affine",
            out_dtype=node.meta["val"].dtype,
        )
        return made

    def packed_gathered(builder: Any, node: torch.fx.Node) -> Any:
        x, packed, scales, biases, experts, is_sorted, bits = builder.args(node)
        flag = _resolve_sorted_indices_flag(builder, is_sorted)
        made = builder.make_or_get_slot(node)
        names = ("x", "w", "scales", "out", "biases", "rhs_indices")
        tids = map(builder.slot_to_tid, (x, packed, scales, made, biases, experts))
        builder.emit(
            GatherQmmNode(
                **dict(zip(names, tids, strict=True)),
                lhs_indices=None,
                transpose=True,
                group_size=_group_size(node.args[1], node.args[2], bits),
                bits=bits,
                mode="affine",
                sorted_indices=False,
                sorted_indices_flag=flag,
            )
        )
        return made

    ops: Any = torch.ops.etkv
    REGISTRY.register(target=[ops.packed_linear.default])(packed_linear)
    REGISTRY.register(target=[ops.packed_embedding.default])(packed_embedding)
    REGISTRY.register(target=[ops.packed_gathered.default])(packed_gathered)


def _group_size(packed: Any, scales: Any, bits: int) -> int:
    columns: int = packed.meta["val"].shape[-1] * 32 // bits
    return columns // int(scales.meta["val"].shape[-1])
