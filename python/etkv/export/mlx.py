"""Programs for MLX: one delegate that runs the whole graph.

``kvcache::update_and_convolve``, ``kvcache::update_and_scan`` and attention with sinks or a softcap become nodes that
ExecuTorch's schema does not have. The delegate of such a program has the backend id ``EtkvForMLX``, so that
ExecuTorch's own MLX backend does not load it.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from etkv import _library
from etkv.errors import EtkvError
from etkv.export.graphs import delegates, shape
from etkv.export.request import ExportRequest

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

    from etkv.export import packing
    from etkv.export.scratch import Scratch

NAME = "MLX"


def packer(request: ExportRequest, group_size: int | None, scratch: Scratch) -> packing.Packer | None:
    """Return the packer for the weights of linear layers, embeddings and experts; None without quantization.

    ``group_size`` counts elements; ``None`` is one scale for each row.
    """
    from etkv.export import mlx_linears

    if request.quantize is None:
        return None
    return mlx_linears.Packer({"4w": 4, "8w": 8}[request.quantize], group_size, request.group_size is not None, scratch)


def prepare(model: PreTrainedModel, request: ExportRequest, scratch: Scratch) -> None:
    """Prepare ``model`` for the trace: experts with unpacked weights become products with indexed weights."""
    from etkv.export import experts

    experts.take(model, scratch.keep)


def delegate(traced: dict[str, ExportedProgram], methods: dict[str, Any], request: ExportRequest) -> EdgeProgramManager:
    """Return the programs, each with its whole graph as one delegate."""
    from executorch import exir
    from executorch.backends.mlx import MLXPartitioner

    from etkv.export import mlx_fusions, mlx_norms, mlx_rewrites

    _register_ops()
    for program in traced.values():
        mlx_rewrites.apply(program)
        mlx_fusions.fuse(program)
    has_own_nodes = any(_has_own_nodes(program) for program in traced.values())
    if has_own_nodes:
        _register_cache_ops()
    edge = exir.to_edge_transform_and_lower(
        traced,
        transform_passes=mlx_norms.passes(),
        partitioner=[MLXPartitioner()],
        constant_methods=methods,
        # The KV cache op is not part of the edge dialect, and MLX has its own dimension order.
        compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    if has_own_nodes:
        for method in traced:
            _name_delegates(edge.exported_program(method))
    return edge


def _has_own_nodes(program: ExportedProgram) -> bool:
    """Return whether ``program`` has ops that ExecuTorch's schema has no nodes for."""
    own = ("kvcache.update_and_convolve.default", "kvcache.update_and_scan.default", "kvcache.update_and_attend.sinks")
    return any(str(node.target) in own for node in program.graph.nodes)


def _name_delegates(program: ExportedProgram) -> None:
    """Give the delegates of ``program`` the backend id of etkv."""
    for each in delegates(program):
        each._backend_id = _library.OWN_BACKEND


def check(graph: torch.fx.Graph, family: str) -> None:
    """Raise :class:`EtkvError` unless the whole graph is one delegate. Portable kernels lack the KV cache op."""
    from executorch.exir.delegate import executorch_call_delegate

    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    delegates = [call for call in calls if call is executorch_call_delegate]
    left = sorted({call.__name__ for call in calls if call not in (executorch_call_delegate, operator.getitem)})
    if left:
        raise EtkvError(f"model family {family!r} has operators that the MLX backend lacks: {', '.join(left)}")
    if len(delegates) != 1:
        raise EtkvError(f"model family {family!r} splits into {len(delegates)} delegates, expected 1")


def emit(builder: Any, node: torch.fx.Node, kind: Any, tensors: dict[str, Any], **fields: Any) -> Any:
    """Emit a node of an MLX program in place of ``node``, and return the slot of its result.

    ``kind`` is its class in ExecuTorch's schema. ``tensors`` are the slots of its inputs, or None.
    """
    made = builder.make_or_get_slot(node)
    slots = {**tensors, "out": made}
    tids = {name: None if slot is None else builder.slot_to_tid(slot) for name, slot in slots.items()}
    builder.emit(kind(**tids, **fields))
    return made


@functools.cache
def _register_ops() -> None:
    """Register conversions with ExecuTorch: from the exporter's ops, to nodes of MLX programs."""
    from executorch.backends.mlx.builder.op_registry import REGISTRY
    from executorch.backends.mlx.serialization.mlx_graph_schema import TakeAlongAxisNode, WhereNode

    from etkv.export import by_capacity, mlx_linears

    mlx_linears.register()

    def select_by_capacity(builder: Any, node: torch.fx.Node) -> Any:
        within, beyond, limit = builder.args(node)
        flag = builder.make_or_get_constant(by_capacity.FLAG.format(limit), torch.tensor(False))
        return emit(builder, node, WhereNode, {"condition": flag, "x": beyond, "y": within})

    def gather(builder: Any, node: torch.fx.Node) -> Any:
        source, axis, index = builder.args(node)
        had, wanted = list(shape(node, 0)), list(shape(node, 2))
        axis %= len(had)
        # Indices with fewer rows than the source would require a slice of the source.
        others, of_wanted = ([str(size) for size in (*of[:axis], *of[axis + 1 :])] for of in (had, wanted))
        if others != of_wanted:
            raise ValueError(f"cannot gather {wanted} indices from {had} along axis {axis}: expected equal other axes")
        return emit(builder, node, TakeAlongAxisNode, {"x": source, "indices": index}, axis=axis)

    REGISTRY.register(target=[torch.ops.etkv.select_by_capacity.default])(select_by_capacity)
    REGISTRY.register(target=[torch.ops.aten.gather.default])(gather)


@functools.cache
def _register_cache_ops() -> None:
    """Register conversions with ExecuTorch: from the cache ops that it lacks, to nodes of MLX programs.

    Raises :class:`EtkvError` if ExecuTorch's schema was loaded without the nodes of etkv.
    """
    from executorch.backends.mlx.builder.op_helpers import torch_dtype_to_scalar_type
    from executorch.backends.mlx.builder.op_registry import REGISTRY
    from executorch.backends.mlx.serialization import mlx_graph_schema

    # The import registers the ops of recurrent layers.
    import etkv.recurrent_op  # noqa: F401

    if not hasattr(mlx_graph_schema, "UpdateAndScanNode"):
        raise EtkvError("executorch.backends.mlx was imported before etkv.export; import etkv.export first")

    def update_and_convolve(builder: Any, node: torch.fx.Node) -> Any:
        *tensors, layer, activation, dtype = builder.args(node)
        channels, width = shape(node, 1)
        return emit(
            builder,
            node,
            mlx_graph_schema.UpdateAndConvolveNode,
            dict(zip(("x", "weight", "bias", "position"), tensors, strict=True)),
            layer_id=layer,
            activation=activation,
            out_dtype=torch_dtype_to_scalar_type(dtype),
            channels=channels,
            width=width,
        )

    def update_and_scan(builder: Any, node: torch.fx.Node) -> Any:
        *tensors, layer, scale, dtype = builder.args(node)
        (_, k_heads, _, k_dim), (_, heads, _, v_dim) = shape(node, 1), shape(node, 2)
        return emit(
            builder,
            node,
            mlx_graph_schema.UpdateAndScanNode,
            dict(zip(("q", "k", "v", "g", "beta", "position"), tensors, strict=True)),
            layer_id=layer,
            scale=float(scale),
            out_dtype=torch_dtype_to_scalar_type(dtype),
            k_heads=k_heads,
            heads=heads,
            k_dim=k_dim,
            v_dim=v_dim,
            channel_decay=len(shape(node, 3)) == 4,
        )

    def update_and_attend_sinks(builder: Any, node: torch.fx.Node) -> Any:
        *tensors, layer, scale, dtype, sinks, softcap = builder.args(node)
        return emit(
            builder,
            node,
            mlx_graph_schema.UpdateAndAttendSinksNode,
            dict(zip(("q", "k", "v", "position", "sinks"), (*tensors, sinks), strict=True)),
            layer_id=layer,
            scale=float(scale),
            softcap=float(softcap) or None,
            out_dtype=torch_dtype_to_scalar_type(dtype),
        )

    REGISTRY.register(target=[torch.ops.kvcache.update_and_attend.sinks])(update_and_attend_sinks)
    REGISTRY.register(target=[torch.ops.kvcache.update_and_convolve.default])(update_and_convolve)
    REGISTRY.register(target=[torch.ops.kvcache.update_and_scan.default])(update_and_scan)
