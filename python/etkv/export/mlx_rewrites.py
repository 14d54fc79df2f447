"""Rewrites a traced graph to operators that ExecuTorch's exporter for MLX has, and has right.

Routers of experts gather scores and scatter ones. One index of as many axes as its tensor would become an operation
that takes along an axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from etkv.export.graphs import call

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ATEN = torch.ops.aten


def apply(program: ExportedProgram) -> None:
    """Rewrite the graph of ``program`` in place."""
    graph = program.graph
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
        if rewrite is not None:
            with graph.inserting_before(node):
                made = rewrite(graph, node)
            if made is not None:
                if node.target in _IN_PLACE:
                    # Later nodes may read what it wrote under its source's name.
                    node.args[0].replace_all_uses_with(made, lambda user, made=made: user > made)
                node.replace_all_uses_with(made)
                graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _scatter(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node | None:
    """Replace a scatter along the last axis by a choice where any index is that of the element."""
    arguments: list[Any] = [*node.args]
    source, axis, index, value = arguments
    shape = source.meta["val"].shape
    if axis % len(shape) != len(shape) - 1 or not isinstance(shape[-1], int):
        return None
    if node.target in _IN_PLACE and (source.target not in _NEW or any(user < node for user in source.users)):
        # Another name of the tensor that it writes to may be read later.
        return None
    indexed = [str(size) for size in index.meta["val"].shape]
    if indexed[:-1] != [str(size) for size in shape[:-1]]:
        return None
    if isinstance(value, torch.fx.Node):
        given_value = value.meta["val"]
        if [str(size) for size in given_value.shape] != indexed or not given_value.is_floating_point():
            # A sum would have another dtype than integers.
            return None
    places = call(graph, _ATEN.arange.default, shape[-1])
    hits = call(graph, _ATEN.eq.Tensor, call(graph, _ATEN.unsqueeze.default, index, -1), places)
    hit = call(graph, _ATEN.any.dim, hits, -2)
    if isinstance(value, torch.fx.Node):
        # One index, at most, is that of an element: the others add zeros.
        column = call(graph, _ATEN.unsqueeze.default, value, -1)
        given = call(graph, _ATEN.where.self, hits, column, call(graph, _ATEN.zeros_like.default, column))
        written = call(graph, _ATEN.sum.dim_IntList, given, [-2])
    else:
        written = call(graph, _ATEN.full_like.default, source, value)
    return call(graph, _ATEN.where.self, hit, written, source)


def _index(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node | None:
    """Flatten the only index of a tensor of as many axes, and shape the rows afterwards."""
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
    """Replace the largest elements along an axis and their indices by an operation for each."""
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
"""Operators that return a tensor without another name."""

_REWRITES = {
    **dict.fromkeys((_ATEN.scatter.value, _ATEN.scatter.src, *_IN_PLACE), _scatter),
    _ATEN.index.Tensor: _index,
    _ATEN.max.dim: _max,
}
"""Operators -> the functions that return what takes their place, or None."""
