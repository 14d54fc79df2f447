"""Rewrites a traced graph to operators that XNNPACK supports, so that the nodes between two calls are one delegate.

XNNPACK does not support means over the last axis, slices of tensors with a dynamic length, and views with a length that
is an input. Means and slices become products, and views infer their length.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from etkv.export.cpu import constants
from etkv.export.graphs import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.export import ExportedProgram

_ATEN = torch.ops.aten


def apply(program: ExportedProgram) -> None:
    """Rewrite the graph of ``program`` in place."""
    _drop_checks(program)
    if any("update_and_convolve" in str(node.target) for node in program.graph.nodes):
        constants.fold(program)
    for rewrite, targets in _REWRITES:
        for node in _calls(program, *targets):
            rewrite(program, node)
    _share(program)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _calls(program: ExportedProgram, *targets: Any) -> Iterator[torch.fx.Node]:
    """Yield the calls of ``targets`` in order. The graph may change during the iteration."""
    for node in list(program.graph.nodes):
        if node.op == "call_function" and node.target in targets:
            yield node


def _drop_checks(program: ExportedProgram) -> None:
    """Remove checks of dtypes, and conversions of a tensor to its own dtype. Both would slow down later passes."""
    for node in _calls(program, _ATEN._assert_tensor_metadata.default):
        program.graph.erase_node(node)
    for node in _calls(program, _ATEN.to.dtype, _ATEN.to.device, _ATEN.alias.default):
        source: Any = node.args[0]
        is_output = any(user.op == "output" for user in node.users)
        if source.meta["val"].dtype == node.meta["val"].dtype and not is_output:
            node.replace_all_uses_with(source)
            program.graph.erase_node(node)


def _parts(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace a split of heads [1, heads, T, dim] along their last axis by slices."""
    source: Any = node.args[0]
    value = source.meta["val"]
    given: list[Any] = [*node.args, *[0] * (3 - len(node.args))]
    if value.dim() != 4 or node.kwargs.get("dim", given[2]) % 4 != 3:
        return
    begin = 0
    for part, made in enumerate(node.meta["val"]):
        with program.graph.inserting_before(node):
            piece = call(program.graph, _ATEN.slice.Tensor, source, 3, begin, begin + made.shape[3])
        begin += made.shape[3]
        for user in [user for user in node.users if user.args[1] == part]:
            _replace(program, user, piece)
    program.graph.erase_node(node)


def _whole(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Remove slices of a whole tensor, and empty parts of concatenations. Models with fully rotated heads have both."""
    source: Any = node.args[0]
    if node.target is _ATEN.slice.Tensor:
        # Compare sizes as text: a comparison of numbers would add a guard to the graph.
        if str(source.meta["val"].shape) == str(node.meta["val"].shape):
            _replace(program, node, source)
        return
    axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    parts = [part for part in source if part.meta["val"].shape[axis] != 0]
    if len(parts) == 1:
        _replace(program, node, parts[0])
    elif parts:
        node.args = (parts, axis)


def _norm(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace a LayerNorm or an RMSNorm over the last axis by elementary operators."""
    centered = node.target is _ATEN.layer_norm.default
    names = ["input", "normalized_shape", "weight", *(["bias"] if centered else []), "eps"]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    made = given["input"]
    if len(given["normalized_shape"]) != 1:
        return
    epsilon = given.get("eps")
    if epsilon is None:
        epsilon = 1e-5 if centered else torch.finfo(made.meta["val"].dtype).eps
    with program.graph.inserting_before(node):
        if centered:
            made = call(program.graph, _ATEN.sub.Tensor, made, call(program.graph, _ATEN.mean.dim, made, [-1], True))
        square = call(program.graph, _ATEN.mul.Tensor, made, made)
        spread = call(program.graph, _ATEN.add.Tensor, call(program.graph, _ATEN.mean.dim, square, [-1], True), epsilon)
        made = call(program.graph, _ATEN.mul.Tensor, made, call(program.graph, _ATEN.rsqrt.default, spread))
        if given.get("weight") is not None:
            made = call(program.graph, _ATEN.mul.Tensor, made, given["weight"])
        if given.get("bias") is not None:
            made = call(program.graph, _ATEN.add.Tensor, made, given["bias"])
    _replace(program, node, made)


def _gelu(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace GELU's tanh approximation by elementary operators, because XNNPACK would compute the exact function."""
    if node.kwargs.get("approximate", "none") != "tanh":
        return
    source: Any = node.args[0]
    with program.graph.inserting_before(node):
        cube = call(program.graph, _ATEN.mul.Tensor, call(program.graph, _ATEN.mul.Tensor, source, source), source)
        inner = call(program.graph, _ATEN.add.Tensor, source, call(program.graph, _ATEN.mul.Tensor, cube, 0.044715))
        scaled = call(program.graph, _ATEN.mul.Tensor, inner, math.sqrt(2 / math.pi))
        bent = call(program.graph, _ATEN.tanh.default, scaled)
        part = call(program.graph, _ATEN.add.Tensor, bent, 1.0)
        made = call(program.graph, _ATEN.mul.Tensor, call(program.graph, _ATEN.mul.Tensor, source, 0.5), part)
    _replace(program, node, made)


def _softplus(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace log(1 + exp(x)) by max(x, 0) + log(1 + exp(-|x|)), which does not overflow."""
    if len(node.args) > 1 or node.kwargs:
        return
    source: Any = node.args[0]
    with program.graph.inserting_before(node):
        size = call(program.graph, _ATEN.abs.default, source)
        small = call(program.graph, _ATEN.exp.default, call(program.graph, _ATEN.neg.default, size))
        rest = call(program.graph, _ATEN.log.default, call(program.graph, _ATEN.add.Tensor, small, 1.0))
        made = call(program.graph, _ATEN.add.Tensor, call(program.graph, _ATEN.relu.default, source), rest)
    _replace(program, node, made)


def _kept_axis(node: torch.fx.Node) -> int | None:
    """Return the length of the last axis if ``node`` reduces only this axis, with ``keepdim``; else None."""
    given: list[Any] = [*node.args]
    source, dims, *rest = given
    keep = rest[0] if rest else node.kwargs.get("keepdim", False)
    value = source.meta["val"]
    width = value.shape[-1]
    if [dim % value.dim() for dim in dims] != [value.dim() - 1] or not keep or not isinstance(width, int):
        return None
    return None if node.kwargs.get("dtype") not in (None, value.dtype) else width


def _power(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace third powers by products, and powers of a half by roots, because XNNPACK supports only squares."""
    given: list[Any] = [*node.args]
    source, exponent = given
    if exponent not in (3, 0.5, -0.5):
        return
    with program.graph.inserting_before(node):
        if exponent == 3:
            made = call(program.graph, _ATEN.mul.Tensor, call(program.graph, _ATEN.mul.Tensor, source, source), source)
        else:
            made = call(program.graph, _ATEN.sqrt.default if exponent > 0 else _ATEN.rsqrt.default, source)
    _replace(program, node, made)


def _replace(program: ExportedProgram, node: torch.fx.Node, other: torch.fx.Node) -> None:
    node.replace_all_uses_with(other)
    program.graph.erase_node(node)


def _reduction(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace a sum or a mean over the last axis with ``keepdim`` by a product with equal weights."""
    width = _kept_axis(node)
    if width is not None:
        source: Any = node.args[0]
        name, weight = ("mean", 1.0 / width) if node.target is _ATEN.mean.dim else ("sum", 1.0)
        weights = torch.full((1, width), weight, dtype=source.meta["val"].dtype)
        _linear(program, node, source, f"etkv_{name}_of_{width}", weights)


def _rotate_half(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace ``cat(-x[..., half:], x[..., :half])``, of rotary embeddings, by a product with a signed permutation."""
    given: list[Any] = [*node.args]
    parts, *dim = given
    if len(parts) != 2 or parts[0].target is not _ATEN.neg.default:
        return
    ends, starts = parts[0].args[0], parts[1]
    if not all(part.target is _ATEN.slice.Tensor for part in (ends, starts)) or ends.args[0] is not starts.args[0]:
        return
    source = starts.args[0]
    value = source.meta["val"]
    axis, width = value.dim() - 1, value.shape[-1]
    if not isinstance(width, int) or (dim[0] if dim else 0) % value.dim() != axis or width % 2:
        return
    if _range(ends, axis, width) != (width // 2, width) or _range(starts, axis, width) != (0, width // 2):
        return
    half = torch.eye(width // 2, dtype=value.dtype)
    zero = torch.zeros_like(half)
    rotation = torch.cat([torch.cat([zero, -half], 1), torch.cat([half, zero], 1)])
    _linear(program, node, source, f"etkv_rotate_half_of_{width}", rotation)


def _part_of_head(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Replace a slice of the last axis of heads [1, heads, T, dim] by a product with rows of the identity."""
    source: Any = node.args[0]
    value = source.meta["val"]
    if value.dim() != 4 or not isinstance(value.shape[-1], int):
        return
    part = _range(node, 3, value.shape[-1])
    if part is not None:
        # XNNPACK's serializer writes a tensor's storage from its beginning, so the tensor must begin there.
        rows = torch.eye(value.shape[-1], dtype=value.dtype)[part[0] : part[1]].clone()
        _linear(program, node, source, f"etkv_{part[0]}_to_{part[1]}_of_{value.shape[-1]}", rows)


def _range(node: torch.fx.Node, axis: int, width: int) -> tuple[int, int] | None:
    """Return the begin and the end of a slice of the last axis; None for other slices."""
    given: list[Any] = [*node.args, *[None] * (4 - len(node.args))]
    _, dim, first, end, *step = given
    if (dim or 0) % (axis + 1) != axis or (step and step[0] not in (None, 1)):
        return None
    first, end = first or 0, width if end is None else end
    if not isinstance(first, int) or not isinstance(end, int):
        return None
    return first % width if first < 0 else first, min(end % width if end < 0 else end, width)


def _linear(
    program: ExportedProgram, node: torch.fx.Node, source: torch.fx.Node, name: str, weights: torch.Tensor
) -> None:
    """Replace ``node`` by a product of ``source`` with constant weights [out, in]. Weights of one name are shared."""
    from executorch.backends.transforms.utils import create_constant_placeholder
    from torch.export.graph_signature import InputKind

    graph = program.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        constant = create_constant_placeholder(program, graph, name, InputKind.BUFFER, weights, persistent_buffer=True)
    with graph.inserting_before(node):
        product = graph.call_function(_ATEN.linear.default, (source, constant))
    product.meta = {**node.meta}
    _replace(program, node, product)


def _infer_length(program: ExportedProgram, node: torch.fx.Node) -> None:
    """Let a view infer its dynamic length, if it has at most one. A further axis of one element is a view too."""
    sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    if sizes.count(-1) <= 1:
        node.target = _ATEN.view.default if node.target is _ATEN.unsqueeze.default else node.target
        node.args = (node.args[0], sizes)


def _share(program: ExportedProgram) -> None:
    """Merge equal views and equal row selections. Each layer computes them from positions.

    Quantized activations are not merged: XNNPACK's partitioner would split the delegate at activations that several
    layers read.
    """
    had: dict[Any, torch.fx.Node] = {}
    for node in _calls(program, _ATEN.select.int, _ATEN.view.default, _ATEN.reshape.default):
        key = (node.target, node.args, tuple(sorted(node.kwargs.items(), key=operator.itemgetter(0))))
        first = had.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            program.graph.erase_node(node)


_REWRITES: tuple[tuple[Callable[[ExportedProgram, torch.fx.Node], None], tuple[Any, ...]], ...] = (
    (_softplus, (_ATEN.softplus.default,)),
    (_reduction, (_ATEN.sum.dim_IntList,)),
    (_parts, (_ATEN.chunk.default, _ATEN.split.Tensor, _ATEN.split_with_sizes.default)),
    (_whole, (_ATEN.slice.Tensor, _ATEN.cat.default)),
    (_norm, (_ATEN.layer_norm.default, _ATEN.rms_norm.default)),
    (_gelu, (_ATEN.gelu.default,)),
    (_power, (_ATEN.pow.Tensor_Scalar,)),
    (_reduction, (_ATEN.mean.dim,)),
    (_rotate_half, (_ATEN.cat.default,)),
    (_part_of_head, (_ATEN.slice.Tensor,)),
    (_infer_length, (_ATEN.unsqueeze.default, _ATEN.view.default, _ATEN.reshape.default)),
)
"""Rewrites in their order, each with the operators that it replaces."""
