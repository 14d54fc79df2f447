"""Splits delegates that would need each other's results, such as nodes before and after a call of the cache.

XNNPACK's partitioner checks cycles for one delegate at a time. In some models, such as Gemma 3n and Gemma 4, a layer
has more inputs than the output of the layer below. In such models, several delegates together can form a cycle.
"""

from __future__ import annotations

import graphlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_TAG = "delegation_tag"


def split(graph: torch.fx.Graph, tags: set[str]) -> dict[str, str]:
    """Split the nodes of ``tags`` into more tags, until the delegates can run one after the other.

    Returns a mapping from each new tag to the earlier tag of its nodes.
    """
    made: dict[str, str] = {}
    while cycle := _cycle(graph):
        for node, level in _levels(graph, cycle).items():
            tag = node.meta.get(_TAG)
            if tag in tags or tag in made:
                node.meta[_TAG] = f"{tag}_{level}"
                made[node.meta[_TAG]] = made.get(tag, tag)
    return made


def _part(node: torch.fx.Node) -> Any:
    """Return the tag of the delegate of ``node``, or ``node`` itself if it is in no delegate."""
    return node.meta.get(_TAG, node)


def _cycle(graph: torch.fx.Graph) -> set[Any]:
    """Return parts that form a cycle; empty if there is no cycle."""
    needed: dict[Any, set[Any]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            # Inputs are available from the beginning. A weight may have the tag of one of its readers.
            continue
        part, inputs = _part(node), (given for given in node.all_input_nodes if given.op != "placeholder")
        needed.setdefault(part, set()).update(map(_part, inputs))
        needed[part].discard(part)
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as error:
        return set(error.args[1])
    return set()


def _levels(graph: torch.fx.Graph, parts: set[Any]) -> dict[torch.fx.Node, int]:
    """Return for each node of ``parts`` its level: the maximum number of changes between ``parts`` on a path to it."""
    levels: dict[torch.fx.Node, int] = {}
    # For each node: the maximum number of changes on a path to it, and the last parts of the paths with that number.
    ends: dict[torch.fx.Node, tuple[int, set[Any]]] = {}
    for node in graph.nodes:
        part, ways = _part(node), [ends[given] for given in node.all_input_nodes]
        if node.op == "placeholder":
            ends[node] = 0, set()
        elif part in parts:
            levels[node] = max((at + bool(sources - {part}) for at, sources in ways), default=0)
            ends[node] = levels[node], {part}
        else:
            longest = max((at for at, _ in ways), default=0)
            ends[node] = longest, set().union(*(sources for at, sources in ways if at == longest))
    return levels
