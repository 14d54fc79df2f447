"""Linear layers and embeddings with weights that are packed for MLX's operations.

In a program ``etkv::packed_linear`` is a ``QuantizedMatmul``, and ``etkv::packed_embedding`` gathers packed rows and
dequantizes them. In plain PyTorch both unpack the weights in parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from etkv.export import experts, mlx_quantization, parallel
from etkv.export.mlx import emit
from etkv.export.packing import PackedLayer
from etkv.export.request import GROUP_SIZES
from etkv.export.scratch import Scratch

if TYPE_CHECKING:
    import torch.fx

    from etkv.export.packing import FileIntegers
    from etkv.export.published.weight import Groups

_PART = 1 << 20
"""Number of weights that are unpacked at once."""


@torch.library.custom_op("etkv::packed_linear", mutates_args=())
def linear(x: Tensor, packed: Tensor, scales: Tensor, bits: int, biases: Tensor | None = None) -> Tensor:
    """Return the products ``[.., rows]`` of ``x``, ``[.., columns]``, with a matrix of packed weights.

    ``packed``, ``scales`` and ``biases`` are those of :func:`etkv.export.mlx_quantization.dequantize`.
    """
    made = x.new_empty((*x.shape[:-1], len(packed)))

    def fill(part: slice) -> None:
        of_part = None if biases is None else biases[part]
        made[..., part] = mlx_quantization.product(x, packed[part], scales[part], bits, of_part)

    parallel.by_parts(len(packed), max(1, _PART // x.shape[-1]), fill)
    return made


linear.register_fake(lambda x, packed, *_: x.new_empty((*x.shape[:-1], packed.shape[0])))


@torch.library.custom_op("etkv::packed_embedding", mutates_args=())
def embedding(ids: Tensor, packed: Tensor, scales: Tensor, bits: int, biases: Tensor | None = None) -> Tensor:
    """Return the rows of packed weights at ``ids``, ``[*shape of ids, columns]`` in the dtype of ``scales``."""
    # torch cannot index uint32.
    rows = packed.view(torch.int32)[ids].view(torch.uint32)
    of_rows = None if biases is None else biases[ids]
    return mlx_quantization.dequantize(rows, scales[ids], bits, scales.dtype, of_rows)


@embedding.register_fake
def _(ids: Tensor, packed: Tensor, scales: Tensor, bits: int, biases: Tensor | None = None) -> Tensor:
    return scales.new_empty((*ids.shape, packed.shape[1] * 32 // bits))


@torch.library.custom_op("etkv::packed_gathered", mutates_args=())
def gathered(
    x: Tensor, packed: Tensor, scales: Tensor, biases: Tensor | None, experts: Tensor, is_sorted: Tensor, bits: int
) -> Tensor:
    """Return the products ``[n, 1, rows]`` of ``x``, ``[n, 1, columns]``, with the matrices of ``experts``, ``[n]``.

    ``packed``, ``scales`` and ``biases`` are those of :func:`etkv.export.mlx_quantization.dequantize` for each expert.
    ``is_sorted`` is for MLX: whether rows of one expert are adjacent.
    """
    made = x.new_empty((*x.shape[:-1], packed.shape[1]))
    for expert in experts.unique().tolist():
        chosen = experts == expert
        of_expert = None if biases is None else biases[expert]
        own = mlx_quantization.shifts(scales[expert], of_expert, bits)
        matrix = mlx_quantization.dequantize(packed[expert], scales[expert], bits, x.dtype, own)
        made[chosen] = x[chosen] @ matrix.T
    return made


gathered.register_fake(lambda x, packed, *_: x.new_empty((*x.shape[:-1], packed.shape[1])))


class _Layer(PackedLayer):
    packed: Tensor
    scales: Tensor
    biases: Tensor | None
    etkv_bits: int

    def plain(self) -> Tensor:
        """Return the dequantized weights in the dtype of the model."""
        return mlx_quantization.dequantize(self.packed, self.scales, self.etkv_bits, self.scales.dtype, self.biases)


class PackedLinear(_Layer, torch.nn.Linear):  # type: ignore[override] # Its weight is no parameter.
    """A linear layer with packed weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the products, ``[.., out]``."""
        made: Tensor = linear(input, self.packed, self.scales, self.etkv_bits, self.biases)
        return made if self.bias is None else made + self.bias


class PackedEmbedding(_Layer, torch.nn.Embedding):  # type: ignore[override] # Its weight is no parameter.
    """An embedding with packed weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the embedding's rows for ids."""
        made: Tensor = embedding(input, self.packed, self.scales, self.etkv_bits, self.biases)
        return made


class Packer:
    """Packs weights in ``bits`` bits. ``group_size`` elements of a row share a scale; ``None`` is the whole row.

    Integers of a file keep their groups, unless the group size ``is_fixed``. With a fixed size, integers are kept if
    the fixed size divides their own group size.
    """

    def __init__(self, bits: int, group_size: int | None, is_fixed: bool, scratch: Scratch) -> None:
        self._bits, self._group_size, self._is_fixed, self._scratch = bits, group_size, is_fixed, scratch
        self.rounds = True

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return packed weights and scales, in groups of a size that MLX supports."""
        group_size = self._group_size or weight.shape[1]
        packed, scales = mlx_quantization.quantize(weight, self._bits, group_size, self._scratch.empty)
        return packed, self._repeated(scales, group_size, _taken(group_size)), None

    def keep(
        self, groups: Groups, dtype: torch.dtype, of_experts: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Return packed integers, scales and biases of a file; None if MLX does not support them.

        Experts also keep floats. In other layers, floats would prevent the passes of the interpreter, and CUDA graphs.
        """
        own = groups.codes.shape[1] // groups.scales.shape[1]
        wanted = self._group_size if self._is_fixed and self._group_size else _taken(own)
        if not wanted or own % wanted:
            return None
        found = mlx_quantization.keep(groups, self._bits, dtype, with_floats=of_experts)
        if found is None:
            return None
        packed, scales, biases = found
        kept = self._scratch.keep(packed)
        repeated = None if biases is None else self._repeated(biases, own, wanted)
        return kept, self._repeated(scales, own, wanted), repeated

    def _repeated(self, numbers: Tensor, own: int, wanted: int) -> Tensor:
        """Repeat scales or biases of groups of ``own`` columns for the smaller groups of ``wanted`` columns."""
        return self._scratch.keep(numbers.repeat_interleave(own // wanted, dim=1))

    def install(self, layer: Any, packed: tuple[Tensor, Tensor, Tensor | None]) -> type[PackedLayer]:
        """Store packed weights in ``layer``."""
        for name, tensor in zip(("packed", "scales", "biases"), packed, strict=True):
            layer.register_buffer(name, tensor)
        layer.etkv_bits = self._bits
        return PackedLinear if isinstance(layer, torch.nn.Linear) else PackedEmbedding

    def pack_experts(self, module: Any, kept: FileIntegers) -> None:
        """Pack the weights of experts in place."""

        def pack(name: str, weights: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            found: tuple[Tensor, Tensor, Tensor | None] | None = kept(name, weights)
            return self.pack(weights) if found is None else found

        experts.pack(module, self._bits, pack, self._scratch.keep)


def _taken(group_size: int) -> int:
    """Return the largest group size of MLX that divides ``group_size``; 0 if there is none."""
    return max((size for size in GROUP_SIZES if group_size % size == 0), default=0)


def register() -> None:
    """Register conversions with ExecuTorch: from this module's operations, to nodes of MLX programs."""
    from executorch.backends.mlx.builder.op_helpers import emit_lifted_constant, emit_quantized_gather
    from executorch.backends.mlx.builder.op_registry import REGISTRY
    from executorch.backends.mlx.ops import _resolve_sorted_indices_flag
    from executorch.backends.mlx.serialization.mlx_graph_schema import (
        GatherQmmNode,
        MultiplyNode,
        QuantizedMatmulNode,
    )

    def biases_of(builder: Any, scales: torch.fx.Node, bits: int) -> Any:
        """Return the slot of the biases. A program computes the biases from scales when it is loaded."""
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
        x, packed, scales, bits, *given = builder.args(node)
        biases = given[0] if given else biases_of(builder, node.args[2], bits)  # type: ignore[arg-type] # A node.
        return emit(
            builder,
            node,
            QuantizedMatmulNode,
            {"x": x, "w": packed, "scales": scales, "biases": biases},
            group_size=_group_size(node.args[1], node.args[2], bits),
            bits=bits,
            mode="affine",
            transpose=True,
        )

    def packed_embedding(builder: Any, node: torch.fx.Node) -> Any:
        ids, packed, scales, bits, *given = builder.args(node)
        biases = given[0] if given else biases_of(builder, node.args[2], bits)  # type: ignore[arg-type] # A node.
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
        has_floats = mlx_quantization.has_floats(node.args[2].meta["val"])  # type: ignore[union-attr] # A node.
        return emit(
            builder,
            node,
            GatherQmmNode,
            {"x": x, "w": packed, "scales": scales, "biases": biases, "rhs_indices": experts},
            transpose=True,
            group_size=_group_size(node.args[1], node.args[2], bits),
            bits=bits,
            mode="mxfp4" if has_floats else "affine",
            sorted_indices=False,
            sorted_indices_flag=_resolve_sorted_indices_flag(builder, is_sorted),
        )

    ops: Any = torch.ops.etkv
    REGISTRY.register(target=[ops.packed_linear.default])(packed_linear)
    REGISTRY.register(target=[ops.packed_embedding.default])(packed_embedding)
    REGISTRY.register(target=[ops.packed_gathered.default])(packed_gathered)


def _group_size(packed: Any, scales: Any, bits: int) -> int:
    columns: int = packed.meta["val"].shape[-1] * 32 // bits
    return columns // int(scales.meta["val"].shape[-1])
