"""Rewrites a traced graph to operators that ExecuTorch's exporter for MLX has and exports correctly.

Routers of experts gather scores, and scatter the value 1. The exporter would convert an index with as many axes as
its tensor to a take-along-axis, which is another operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from etkv.export.graphs import call

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ATEN = torch.ops.aten


def apply(program: ExportedProgram) -> None:
    """Rewrite the graph of ``program``."""
    graph = program.graph
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
        if rewrite is not None:
            with graph.inserting_before(node):
                made = rewrite(graph, node)
            if made is not None:
                if node.target in _IN_PLACE:
                    # Later nodes may read the result of an in-place operator through its source.
                    node.args[0].replace_all_uses_with(made, lambda user, made=made: user > made)
                node.replace_all_uses_with(made)
                graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _scatter(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node | None:
    """Replace a scatter along the last axis by a ``where``, true for the elements whose index is among the indices."""
    arguments: list[Any] = [*node.args]
    source, axis, index, value = arguments
    shape = source.meta["val"].shape
    if axis % len(shape) != len(shape) - 1 or not isinstance(shape[-1], int):
        return None
    if node.target in _IN_PLACE and (source.target not in _NEW or any(user < node for user in source.users)):
        # A view of the tensor that the operator writes to may be read later.
        return None
    indexed = [str(size) for size in index.meta["val"].shape]
    if indexed[:-1] != [str(size) for size in shape[:-1]]:
        return None
    if isinstance(value, torch.fx.Node):
        given_value = value.meta["val"]
        if [str(size) for size in given_value.shape] != indexed or not given_value.is_floating_point():
            # The sum of integers below would have another dtype.
            return None
    places = call(graph, _ATEN.arange.default, shape[-1])
    hits = call(graph, _ATEN.eq.Tensor, call(graph, _ATEN.unsqueeze.default, index, -1), places)
    hit = call(graph, _ATEN.any.dim, hits, -2)
    if isinstance(value, torch.fx.Node):
        # At most one index matches an element, and the other indices add zeros.
        column = call(graph, _ATEN.unsqueeze.default, value, -1)
        given = call(graph, _ATEN.where.self, hits, column, call(graph, _ATEN.zeros_like.default, column))
        written = call(graph, _ATEN.sum.dim_IntList, given, [-2])
    else:
        written = call(graph, _ATEN.full_like.default, source, value)
    return call(graph, _ATEN.where.self, hit, written, source)


def _index(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node | None:
    """Flatten the only index of a tensor with the same number of axes, and reshape the selected rows."""
    given: list[Any] = [*node.args]
    source, indices = given
    if len(indices) != 1 or indices[0].meta["val"].dtype == torch.bool:
        return None
    value, index = source.meta["val"], indices[0].meta["val"]
    n_dynamic = sum(not isinstance(size, int) for size in node.meta["val"].shape)
    if value.dim() != index.dim() or value.dim() < 2 or n_dynamic > 1:
        return None
    flat = call(graph, _ATEN.view.default, indices[0], [-1])
    rows = call(graph, _ATEN.index.Tensor, source, [flat])
    sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    return call(graph, _ATEN.view.default, rows, sizes)


def _max(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Replace a max with indices by separate operations for values and indices."""
    arguments: list[Any] = [*node.args, *([False] if len(node.args) < 3 else [])]
    source, axis, keeps = arguments
    for user in list(node.users):
        with graph.inserting_before(user):
            if user.args[1] == 0:
                made = call(graph, _ATEN.amax.default, source, [axis], keeps)
            else:
                made = call(graph, _ATEN.argmax.default, source, axis, keeps)
        user.replace_all_uses_with(made)
        graph.erase_node(user)


_IN_PLACE = (_ATEN.scatter_.value, _ATEN.scatter_.src)

_NEW = (_ATEN.full_like.default, _ATEN.zeros_like.default, _ATEN.zeros.default, _ATEN.new_zeros.default)
"""Operators that return a new tensor, which has no views."""

_REWRITES = {
    **dict.fromkeys((_ATEN.scatter.value, _ATEN.scatter.src, *_IN_PLACE), _scatter),
    _ATEN.index.Tensor: _index,
    _ATEN.max.dim: _max,
}
"""Operators -> functions that return the replacement, or None to leave the node unchanged."""
