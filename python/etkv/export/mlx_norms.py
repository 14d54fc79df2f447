"""Finds the RMS norms in a graph. MLX computes such a norm in one operation.

ExecuTorch's own pass does not compare the operands of a product before it replaces the product by a norm. A product
with a weight for each head, or with the mean of another tensor, would become an error or a wrong norm. This pass leaves
such products unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.mlx.passes import FuseRMSNormPass, RMSNormMatch, get_default_passes
from executorch.exir.pass_base import ExportPass
from torch.fx.passes.infra.pass_base import PassResult

if TYPE_CHECKING:
    from torch.fx import GraphModule


class FuseNorms(ExportPass):  # type: ignore[misc] # ExecuTorch's classes have no types.
    """Replaces products that are RMS norms over the last axis by ``aten.rms_norm``."""

    def call(self, graph_module: GraphModule) -> PassResult:
        """Return the graph with its norms, and whether there are any."""
        graph, found = graph_module.graph, False
        for node in list(graph.nodes):
            match = RMSNormMatch.maybe_create(node)
            if match is None or not _is_norm(match):
                continue
            width = match.input_node.meta["val"].shape[-1]
            arguments = (match.input_node, [width], match.weight_node, match.eps)
            with graph.inserting_before(node):
                norm = graph.call_function(torch.ops.aten.rms_norm.default, arguments)
            norm.meta = {**node.meta}
            node.replace_all_uses_with(norm)
            match.remove_body_nodes(graph)
            graph.erase_node(node)
            found = True
        if found:
            graph.eliminate_dead_code()
        return PassResult(graph_module, found)


def passes() -> list[Any]:
    """Return ExecuTorch's passes, with :class:`FuseNorms` in place of its own."""
    return [FuseNorms() if isinstance(each, FuseRMSNormPass) else each for each in get_default_passes()]


def _is_norm(match: RMSNormMatch) -> bool:
    """Return whether ``match`` scales a tensor by its mean square over the last axis, and by a weight of that axis."""
    value = match.input_node.meta["val"]
    weight = match.weight_node.meta["val"] if isinstance(match.weight_node, torch.fx.Node) else None
    if weight is None or weight.shape != value.shape[-1:]:
        return False
    by_name = {node.target.__name__: node for node in reversed(match.body)}
    scaled, squared, mean = (by_name[f"aten.{name}"] for name in ("mul.Tensor", "pow.Tensor_Scalar", "mean.dim"))
    dims, *keep = mean.args[1:]
    axes = [axis % value.dim() for axis in dims]
    return scaled.args[0] is squared.args[0] and axes == [value.dim() - 1] and keep == [True]
