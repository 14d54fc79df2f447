"""Inserts operators into a traced graph."""

from __future__ import annotations

from typing import Any

import torch


def call(graph: torch.fx.Graph, target: Any, *arguments: Any) -> torch.fx.Node:
    """Insert a call of ``target`` at the insertion point of ``graph``, with the metadata of its result."""
    node: torch.fx.Node = graph.call_function(target, arguments)
    node.meta["val"] = target(*torch.fx.node.map_arg(arguments, lambda given: given.meta["val"]))
    return node
