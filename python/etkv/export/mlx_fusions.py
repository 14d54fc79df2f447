"""Fuses formulas of recurrent layers into single MLX operations, because on a GPU each operation is a kernel launch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph

Node = Any
"""A node of a graph. The types of its arguments depend on the operator."""

_aten = torch.ops.aten

_MAX_SUM = 20.0
"""PyTorch's default threshold of a softplus. In float32, ``log(1 + exp(x))`` equals ``x`` above this threshold."""


def fuse(program: ExportedProgram) -> None:
    """Replace softplus, and divisions of rows by their Euclidean norms, in the graph of ``program``."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is _aten.softplus.default:
            _softplus(graph, node)
        elif node.target is _aten.mul.Tensor:
            _unit_norm(graph, node)
    graph.eliminate_dead_code()
    graph.lint()
    program.graph_module.recompile()


def _softplus(graph: Graph, node: Node) -> None:
    """Replace a softplus by ``log(exp(x) + exp(0))``."""
    given: tuple[Any, ...] = node.args
    # Arguments may be left out: the defaults are a factor of 1, and this threshold.
    x, beta, threshold = given + (1, _MAX_SUM)[len(given) - 1 :]
    if beta != 1 or threshold < _MAX_SUM:
        return
    value = node.meta["val"]
    with graph.inserting_before(node):
        zero = graph.call_function(_aten.full.default, ([], 0.0), {"dtype": value.dtype})
        joined = graph.call_function(_aten.logaddexp.default, (x, zero))
    with value.fake_mode:
        zero.meta["val"] = torch.full([], 0.0, dtype=value.dtype)
    joined.meta = {**node.meta}
    node.replace_all_uses_with(joined)


def _unit_norm(graph: Graph, node: Node) -> None:
    """Replace ``x * rsqrt(sum(x * x) + eps)`` over the last axis by an RMS norm without weight, times a factor."""
    x, factor = node.args
    eps = _eps(x, factor)
    value = node.meta["val"]
    if eps is None or not isinstance(value.shape[-1], int):
        return
    width = value.shape[-1]
    with graph.inserting_before(node):
        norm = graph.call_function(_aten.rms_norm.default, (x, [width], None, eps / width))
        scaled = graph.call_function(_aten.mul.Tensor, (norm, 1 / math.sqrt(width)))
    for made in (norm, scaled):
        made.meta = {**node.meta}
    node.replace_all_uses_with(scaled)


def _eps(x: Node, factor: Node) -> float | None:
    """Return ``eps`` if ``factor`` is ``rsqrt(sum(x * x) + eps)`` over the last axis with ``keepdim``; else None."""
    if not (_is(factor, _aten.rsqrt.default) and _is(factor.args[0], _aten.add.Tensor)):
        return None
    total, eps = factor.args[0].args[0], factor.args[0].args[1]
    if not (_is(total, _aten.sum.dim_IntList) and isinstance(eps, float) and not factor.args[0].kwargs):
        return None
    given: tuple[Any, ...] = total.args
    squares, axes, *keep = given
    last = len(x.meta["val"].shape) - 1
    is_last = [axis % (last + 1) for axis in axes] == [last] and keep == [True] and not total.kwargs
    is_square = (_is(squares, _aten.mul.Tensor) and squares.args == (x, x)) or (
        _is(squares, _aten.pow.Tensor_Scalar) and squares.args == (x, 2)
    )
    return eps if is_last and is_square else None


def _is(node: object, target: object) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is target
