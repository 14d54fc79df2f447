"""CPU programs: XNNPACK and ExecuTorch's kernels run the model, and etkv's calls run attention and packed weights.

Every call of ``kvcache::update_and_attend`` becomes a separate delegate, see :mod:`etkv.export.cpu.calls`. So the call
gets the key of its cache when the program is loaded, as an MLX program does.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError
from etkv.export.request import ExportRequest

if TYPE_CHECKING:
    import torch
    from executorch.exir import EdgeProgramManager
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

    from etkv.export import packing
    from etkv.export.scratch import Scratch

NAME = "XNNPACK"

_KERNELS = {
    "aten.arange.start_step",
    "aten._to_copy.default",
    "aten.alias_copy.default",
    "aten.cat.default",
    "aten.copy.default",
    "aten.cos.default",
    "aten.embedding.default",
    "aten.expand_copy.default",
    "aten.index.Tensor",
    "aten.mean.dim",
    "aten.permute_copy.default",
    "aten.pow.Scalar",
    "aten.reciprocal.default",
    "aten.repeat.default",
    "aten.select_copy.int",
    "aten.sin.default",
    "aten.slice_copy.Tensor",
    "aten.slice_scatter.default",
    "aten.split_with_sizes_copy.default",
    "aten.squeeze_copy.dims",
    # Operators on the number of tokens.
    "mul",
    "sym_size.int",
    "aten.unsqueeze_copy.default",
    "aten.view_copy.default",
}
"""Operators that ExecuTorch's own kernels may run, because they move rows or run once a step."""

_OF_ROUTERS = {
    "aten.bitwise_not.default",
    "aten.clamp.Tensor",
    "aten.full_like.default",
    "aten.gather.default",
    "aten.max.dim",
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.sum.dim_IntList",
    "aten.topk.default",
    "aten.where.self",
    "scalar_tensor.default",
}
"""Operators of routers that these kernels may run, because a token has only one number for each expert."""

_OF_POSITIONS = {"aten.add.Tensor", "aten.mul.Tensor", "aten.sub.Tensor"}
"""Operators that these kernels may run on integers, such as the positions of a step's tokens."""

_OF_CHOICES = {
    *(f"aten.{name}.Scalar" for name in ("eq", "ge", "gt", "le", "lt", "ne")),
    "aten.expm1.default",
    "aten.log1p.default",
    "aten.logical_and.default",
    "aten.logical_not.default",
    "aten.logical_or.default",
    "aten.where.self",
}
"""Elementwise operators that choose between ids or between the branches of an activation.

An element takes a few nanoseconds, much less than the products of the previous layer.
"""


def packer(request: ExportRequest, group_size: int | None, scratch: Scratch) -> packing.Packer | None:
    """Return the packer for the weights of linear layers, embeddings and experts; None if weights are float32.

    ``group_size`` counts elements; ``None`` lets each layer choose.
    """
    from etkv.export.cpu import experts, linears

    if request.quantize is not None:
        is_fixed = request.group_size is not None
        return linears.Packer(experts.FORMATS[request.quantize], group_size, scratch, is_fixed)
    return linears.Packer("bfloat16", None, scratch) if request.dtype == "bfloat16" else None


def prepare(model: PreTrainedModel, request: ExportRequest, scratch: Scratch) -> None:
    """Pack the weights of experts. Unless the request selects rows of logits, let the program select them at load."""
    from etkv.export.cpu import calls, experts

    experts.pack(model, empty=scratch.empty)
    if request.logits == "all":
        calls.select_rows_before_head(model)


def delegate(traced: dict[str, ExportedProgram], methods: dict[str, Any], request: ExportRequest) -> EdgeProgramManager:
    """Return the programs with delegates for the nodes that XNNPACK and etkv run."""
    from executorch import exir
    from executorch.backends.transforms.remove_clone_ops import RemoveCloneOpsTransform

    from etkv.export.cpu import calls, rewrites
    from etkv.export.cpu.partitioner import CPUPartitioner

    for program in traced.values():
        rewrites.apply(program)
    edge = exir.to_edge_transform_and_lower(
        traced,
        transform_passes=[RemoveCloneOpsTransform()],
        partitioner=[CPUPartitioner(request.logits)],
        constant_methods=methods,
        # The KV cache op is not part of the edge dialect.
        compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    for name in traced:
        calls.number(edge.exported_program(name))
    return edge


def check(graph: torch.fx.Graph, family: str) -> None:
    """Raise :class:`EtkvError` for an operator outside of delegates that ExecuTorch's own kernels should not run."""
    from executorch.exir.delegate import executorch_call_delegate

    nodes = [node for node in graph.nodes if node.op == "call_function"]
    nodes = [node for node in nodes if node.target not in (executorch_call_delegate, operator.getitem)]
    left = sorted({node.target.__name__ for node in nodes if not _may_run(node)})
    if left:
        raise EtkvError(f"model family {family!r} has operators that the CPU backend lacks: {', '.join(left)}")


def _may_run(node: torch.fx.Node) -> bool:
    """Return whether one of ExecuTorch's own kernels may run ``node``."""
    target: Any = node.target
    if target.__name__ in _OF_POSITIONS:
        return not node.meta["val"].dtype.is_floating_point
    return target.__name__ in _KERNELS | _OF_ROUTERS | _OF_CHOICES
