"""Replaces tensors that a graph makes empty and fills part by part, as keys of latent attention, by concatenations.

Backends compute with values, and have no writes to a part of a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ATEN = torch.ops.aten


def apply(program: ExportedProgram) -> None:
    """Rewrite the graph of ``program`` in place."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (_ATEN.new_empty.default, _ATEN.empty.memory_format):
            _concatenate(graph, node)
    program.graph_module.recompile()


def _concatenate(graph: torch.fx.Graph, empty: torch.fx.Node) -> None:
    """Replace ``empty`` by its parts, if they fill it along one axis before anything reads it."""
    writes: list[tuple[int, int, torch.fx.Node]] = []
    axes = set()
    shape = empty.meta["val"].shape
    for part in empty.users:
        if part.target is not _ATEN.slice.Tensor or [user.target for user in part.users] != [_ATEN.copy_.default]:
            continue
        (write,) = part.users
        given: list[Any] = [*part.args, *[None] * (4 - len(part.args))]
        axis, begin, end = given[1] or 0, given[2] or 0, given[3]
        width = shape[axis]
        source: Any = write.args[1]
        is_whole = [str(size) for size in source.meta["val"].shape] == [str(size) for size in part.meta["val"].shape]
        if write.users or write.args[0] is not part or not is_whole or not isinstance(width, int) or len(given) > 4:
            return
        axes.add(axis % len(shape))
        writes.append((begin, width if end is None else min(end, width), write))
    writes.sort(key=lambda write: write[:2])
    ends = [0, *(end for _, end, _ in writes)]
    if len(axes) != 1 or [begin for begin, _, _ in writes] != ends[:-1] or ends[-1] != shape[next(iter(axes))]:
        return
    last = max(write for _, _, write in writes)
    parts: set[Any] = {write.args[0] for _, _, write in writes}
    if any(user < last for user in empty.users if user not in parts):
        return
    with graph.inserting_after(last):
        made = graph.call_function(_ATEN.cat.default, ([write.args[1] for _, _, write in writes], next(iter(axes))))
    made.meta = {**empty.meta}
    for _, _, write in writes:
        graph.erase_node(write)
    for part in parts:
        graph.erase_node(part)
    empty.replace_all_uses_with(made)
    graph.erase_node(empty)
