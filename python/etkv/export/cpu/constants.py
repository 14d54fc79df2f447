"""Constant folding: computes the parts of a graph that depend only on weights when a program is exported.

Recurrent layers have many such parts, such as the exponential of a decay or the squeezed weight of a convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.transforms.utils import create_constant_placeholder
from torch._export.utils import get_buffer, get_lifted_tensor_constant, get_param
from torch.export.graph_signature import InputKind

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ATEN = torch.ops.aten

_FOLDED = {
    _ATEN.add.Tensor,
    _ATEN.exp.default,
    _ATEN.mul.Tensor,
    _ATEN.neg.default,
    _ATEN.reshape.default,
    _ATEN.squeeze.dim,
    _ATEN.to.dtype,
    _ATEN.unsqueeze.default,
    _ATEN.view.default,
}
"""Operators that are folded. Operators on quantized weights are not folded."""


def fold(program: ExportedProgram) -> None:
    """Replace each constant part of the graph of ``program`` by its value."""
    values: dict[torch.fx.Node, torch.Tensor] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value = _value(program, node)
            if type(value) in (torch.Tensor, torch.nn.Parameter):
                values[node] = value.detach()
        elif node.op == "call_function" and node.target in _FOLDED and all(map(values.__contains__, _inputs(node))):
            arguments, named = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*arguments, **named)
    for node, value in values.items():
        if node.op != "placeholder" and any(user not in values for user in node.users):
            _replace(program, node, value)


def _inputs(node: torch.fx.Node) -> list[torch.fx.Node | None]:
    """Return the inputs of ``node``. None in the list marks a node without inputs."""
    return [*node.all_input_nodes] or [None]


def _value(program: ExportedProgram, node: torch.fx.Node) -> Any:
    """Return the value of a constant input; None for another input."""
    for get in (get_param, get_buffer, get_lifted_tensor_constant):
        value = get(program, node)
        if value is not None:
            return value
    return None


def _replace(program: ExportedProgram, node: torch.fx.Node, value: torch.Tensor) -> None:
    graph = program.graph
    # XNNPACK's serializer writes a tensor's storage from its beginning, so the tensor must begin there.
    value = value.contiguous().clone()
    with graph.inserting_before(next(iter(graph.nodes))):
        name = f"etkv_folded_{node.name}"
        constant = create_constant_placeholder(program, graph, name, InputKind.BUFFER, value, persistent_buffer=True)
    node.replace_all_uses_with(constant)
