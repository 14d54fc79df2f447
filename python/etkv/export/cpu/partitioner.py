"""Partitions a program into delegates: one for each call, and XNNPACK's delegates for the nodes between calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, PartitionResult

from etkv.export.cpu import calls, cycles

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.export import ExportedProgram

_AS_THEY_ARE = {
    "aten.abs.default",
    "aten.add.Tensor",
    "aten.clamp.default",
    "aten.cos.default",
    "aten.div.Tensor",
    "aten.exp.default",
    "aten.gelu.default",
    "aten.linear.default",
    "aten.log.default",
    "aten.mul.Tensor",
    "aten.neg.default",
    "aten.permute_copy.default",
    "aten.pow.Tensor_Scalar",
    "aten.relu.default",
    "aten.rsqrt.default",
    "aten.sigmoid.default",
    "aten.sin.default",
    "aten.sqrt.default",
    "aten.sub.Tensor",
    "aten.tanh.default",
    "aten.view_copy.default",
    "torchao.choose_qparams_affine.default",
    "torchao.dequantize_affine.default",
    "torchao.quantize_affine.default",
    "getitem",
}
"""Operators that XNNPACK's passes leave unchanged. The passes may replace other operators."""

_ONE_PASS = CompileSpec("dqlinear_partitioner", b"")
"""The option with which XNNPACK's ``preprocess`` runs only the pass for linear layers, instead of all 17 passes.

Each pass traces the graph of each delegate again. Together, the passes take most of the time of an export. A release of
ExecuTorch without this option runs all passes.
"""


class CPUPartitioner(XnnpackPartitioner):  # type: ignore[misc] # ExecuTorch's classes have no types.
    """Tags every node that etkv or XNNPACK runs. The nodes with one tag become one delegate.

    ``logits`` is the field of the request that selects the rows of logits of a step.
    """

    def __init__(self, logits: str) -> None:
        super().__init__()
        self._logits = logits

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with tags, and the delegate of each tag."""
        found = super().partition(exported_program)
        of_calls = calls.tag(exported_program, self._logits)
        of_xnnpack = {tag: tag for tag in found.partition_tags}
        of_xnnpack |= cycles.split(exported_program.graph, set(of_xnnpack))
        nodes: dict[str, list[torch.fx.Node]] = {tag: [] for tag in (*of_xnnpack, *of_calls)}
        for node in exported_program.graph.nodes:
            if node.op == "call_function" and "delegation_tag" in node.meta:
                nodes[node.meta["delegation_tag"]].append(node)
        specs = {tag: _spec(found.partition_tags[first], nodes[tag]) for tag, first in of_xnnpack.items() if nodes[tag]}
        specs |= of_calls
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=specs)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload[Any, Any]], Callable[[torch.fx.Node], bool] | None]:
        """Return the operators that XNNPACK supports without decomposition, everywhere in the graph.

        XNNPACK's own method also returns a function that decides for each node. With that function, ExecuTorch would
        trace the whole graph two more times.
        """
        operators, takes = super().ops_to_not_decompose(ep)
        refused = {node.target for node in ep.graph.nodes if node.op == "call_function" and not takes(node)}
        return [operator for operator in operators if operator not in refused], None


def _spec(spec: DelegationSpec, nodes: list[torch.fx.Node]) -> DelegationSpec:
    """Return ``spec`` for a delegate of ``nodes``, with only one pass if the other passes would change nothing."""
    plain = all(_is_as_it_is(node) for node in nodes)
    return DelegationSpec(spec.backend_id, [*spec.compile_specs, _ONE_PASS] if plain else spec.compile_specs)


def _is_as_it_is(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if target.__name__ == "aten.cat.default":
        # XNNPACK splits longer concatenations.
        return len(node.all_input_nodes) <= 4
    return target.__name__ in _AS_THEY_ARE
