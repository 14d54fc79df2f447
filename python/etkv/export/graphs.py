"""Reads the nodes of traced graphs, and inserts operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def call(graph: torch.fx.Graph, target: Any, *arguments: Any) -> torch.fx.Node:
    """Insert a call of ``target`` at the insertion point of ``graph``, with the metadata of its result."""
    node: torch.fx.Node = graph.call_function(target, arguments)
    node.meta["val"] = target(*torch.fx.node.map_arg(arguments, lambda given: given.meta["val"]))
    return node


def argument(node: Any, index: int, name: str) -> Any:
    """Return an argument of ``node``, which is given by its index or by its name."""
    return node.kwargs[name] if name in node.kwargs else node.args[index]


def shape(node: Any, index: int) -> Any:
    """Return the shape of an argument of ``node``."""
    return node.args[index].meta["val"].shape


def delegates(program: ExportedProgram) -> Iterator[Any]:
    """Return the delegates of ``program``, in the order in which they run."""
    from executorch.exir.delegate import executorch_call_delegate

    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is executorch_call_delegate:
            yield getattr(program.graph_module, node.args[0].target)
