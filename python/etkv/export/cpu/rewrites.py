"""Rewrites of a traced graph to operators that XNNPACK takes, so that a layer is few delegates.

XNNPACK takes neither means over the last axis nor slices with a dynamic length beside them. Both are linear.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.export import ExportedProgram

_ATEN = torch.ops.aten


def apply(program: ExportedProgram) -> None:
    """Rewrite the graph of ``program`` in place."""
    for node in list(_calls(program, _ATEN.mean.dim)):
        _mean(program, node)
    for node in list(_calls(program, _ATEN.cat.default)):
        _half_turn(program, node)
    _share(program, _ATEN.unsqueeze.default)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _calls(program: ExportedProgram, target: Any) -> Iterator[torch.fx.Node]:
    return (node for node in program.graph.nodes if node.op == "call_function" and node.target is target)


def _mean(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace a mean over the last axis, kept as one element, by a product with equal weights."""
    source, dims, *rest = node.args
    keep = rest[0] if rest else node.kwargs.get("keepdim", False)
    shape = source.meta["val"].shape
    width = shape[-1]
    if [dim % len(shape) for dim in dims] != [len(shape) - 1] or not keep or not isinstance(width, int):
        return
    if node.kwargs.get("dtype") not in (None, source.meta["val"].dtype):
        return
    weights = torch.full((1, width), 1.0 / width, dtype=source.meta["val"].dtype)
    _linear(program, node, source, f"etkv_mean_of_{width}", weights)


def _half_turn(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace ``cat(-x[..., half:], x[..., :half])``, of rotary embeddings, by a product with a signed permutation."""
    parts, *dim = node.args
    if len(parts) != 2 or parts[0].target is not _ATEN.neg.default:
        return
    ends, starts = parts[0].args[0], parts[1]
    if not all(part.target is _ATEN.slice.Tensor for part in (ends, starts)) or ends.args[0] is not starts.args[0]:
        return
    source = starts.args[0]
    shape = source.meta["val"].shape
    axis, width = len(shape) - 1, shape[-1]
    if not isinstance(width, int) or (dim[0] if dim else 0) % len(shape) != axis or width % 2:
        return
    if _range(ends, axis, width) != (width // 2, width) or _range(starts, axis, width) != (0, width // 2):
        return
    half = torch.eye(width // 2, dtype=source.meta["val"].dtype)
    zero = torch.zeros_like(half)
    turn = torch.cat([torch.cat([zero, -half], 1), torch.cat([half, zero], 1)])
    _linear(program, node, source, f"etkv_half_turn_of_{width}", turn)


def _range(node: torch.fx.Node, axis: int, width: int) -> tuple[int, int] | None:
    """Return the first element of a slice of the last axis and the end, or None for another slice."""
    _, dim, first, end, *step = [*node.args, *[None] * (4 - len(node.args))]
    if (dim or 0) % (axis + 1) != axis or (step and step[0] not in (None, 1)):
        return None
    first, end = first or 0, width if end is None else end
    if not isinstance(first, int) or not isinstance(end, int):
        return None
    return first % width if first < 0 else first, min(end % width if end < 0 else end, width)


def _linear(program: ExportedProgram, node: torch.fx.Node, source: torch.fx.Node, name: str, weights: Any) -> None:
    """Replace ``node`` by a product of ``source`` with constant weights, [out, in]."""
    from executorch.backends.transforms.utils import create_constant_placeholder
    from torch.export.graph_signature import InputKind

    graph = program.graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "placeholder")):
        constant = create_constant_placeholder(program, graph, name, InputKind.BUFFER, weights, persistent_buffer=True)
    with graph.inserting_before(node):
        product = graph.call_function(_ATEN.linear.default, (source, constant))
    product.meta = {**node.meta}
    node.replace_all_uses_with(product)
    graph.erase_node(node)


def _share(program: ExportedProgram, target: Any) -> None:
    """Replace calls of ``target`` with equal arguments by the first of them."""
    had: dict[Any, torch.fx.Node] = {}
    for node in list(_calls(program, target)):
        key = (node.args, tuple(sorted(node.kwargs.items(), key=operator.itemgetter(0))))
        first = had.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            program.graph.erase_node(node)
