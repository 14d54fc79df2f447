"""Replaces complex tensors in a graph by their real and imaginary parts, because no backend supports complex tensors.

Llama 4 rotates keys and queries with complex products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from etkv.export.graphs import call

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

_ATEN = torch.ops.aten

_Parts = tuple["Node", "Node"]
"""The real and the imaginary part of a tensor, each in the shape of the tensor."""

_OF_EACH = {
    *(_ATEN.expand.default, _ATEN.permute.default, _ATEN.reshape.default, _ATEN.select.int, _ATEN.slice.Tensor),
    *(_ATEN.squeeze.dim, _ATEN.transpose.int, _ATEN.unsqueeze.default, _ATEN.view.default),
}
"""Operators that only move elements, so they apply to both parts."""

_AS_THEY_ARE = {_ATEN.to.dtype_layout, _ATEN.to.dtype, _ATEN.to.device, _ATEN.contiguous.default, _ATEN.alias.default}
"""Operators that do not change a complex tensor."""


def replace(program: ExportedProgram) -> None:
    """Replace the complex tensors in the graph of ``program``.

    Raises :class:`ValueError` for operators on complex tensors other than products and moves.
    """
    graph, parts = program.graph, dict[Any, _Parts]()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _ATEN._assert_tensor_metadata.default and node.args[0] in parts:
            graph.erase_node(node)
            continue
        with graph.inserting_before(node):
            if node.target is _ATEN.view_as_real.default:
                sides = [call(graph, _ATEN.unsqueeze.default, part, -1) for part in _known(node.args[0], parts)]
                node.replace_all_uses_with(call(graph, _ATEN.cat.default, sides, -1))
            elif _is_complex(node):
                parts[node] = _parts(graph, node, parts)
            elif any(given in parts for given in node.all_input_nodes):
                raise ValueError(f"it computes with complex numbers ({node.target})")
    if parts:
        graph.eliminate_dead_code()
        program.graph_module.recompile()


def _parts(graph: Graph, node: Node, parts: dict[Any, _Parts]) -> _Parts:
    given: list[Any] = [*node.args]
    target: Any = node.target
    if target is _ATEN.polar.default:
        size, angle = given
        cos, sin = call(graph, _ATEN.cos.default, angle), call(graph, _ATEN.sin.default, angle)
        return call(graph, _ATEN.mul.Tensor, size, cos), call(graph, _ATEN.mul.Tensor, size, sin)
    if target is _ATEN.view_as_complex.default:
        return call(graph, _ATEN.select.int, given[0], -1, 0), call(graph, _ATEN.select.int, given[0], -1, 1)
    if target in _OF_EACH:
        real, imaginary = (call(graph, target, part, *given[1:]) for part in _known(given[0], parts))
        return real, imaginary
    if target in _AS_THEY_ARE:
        return _known(given[0], parts)
    if target is _ATEN.mul.Tensor:
        return _product(graph, given[0], given[1], parts)
    raise ValueError(f"it computes with complex numbers ({target})")


def _product(graph: Graph, first: Any, second: Any, parts: dict[Any, _Parts]) -> _Parts:
    mul = _ATEN.mul.Tensor
    if first not in parts:
        first, second = second, first
    real, imaginary = _known(first, parts)
    if isinstance(second, complex) or _is_complex(second):
        _known(second, parts)
    if second not in parts:
        return call(graph, mul, real, second), call(graph, mul, imaginary, second)
    a, b = parts[second]
    left = call(graph, _ATEN.sub.Tensor, call(graph, mul, real, a), call(graph, mul, imaginary, b))
    right = call(graph, _ATEN.add.Tensor, call(graph, mul, real, b), call(graph, mul, imaginary, a))
    return left, right


def _known(node: Any, parts: dict[Any, _Parts]) -> _Parts:
    """Return the parts of ``node``. Raises :class:`ValueError` for a complex input or constant."""
    if node not in parts:
        raise ValueError(f"it computes with complex constants ({node})")
    return parts[node]


def _is_complex(node: Any) -> bool:
    value = getattr(node, "meta", {}).get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_complex
