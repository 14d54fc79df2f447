"""Finds caches whose values are the first elements of their keys, from the graph of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from etkv.export.graphs import argument

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def of(traced: ExportedProgram, n_caches: int) -> list[bool]:
    """Return for each cache of ``traced`` whether its values are the first elements of its keys, in every step.

    This holds if in every call that writes to the cache, keys are a concatenation of the values and other elements, or
    values are a slice of the keys that begins with the first element. Other values may be equal too, but that cannot be
    proved from the graph.
    """
    packet = torch.ops.kvcache.update_and_attend
    found: dict[int, bool] = {}
    for node in traced.graph.nodes:
        if node.target in (packet.default, packet.sinks):
            cache = argument(node, 4, "layer_id")
            found[cache] = found.get(cache, True) and _begins_with(node.args[1], node.args[2])
    return [found.get(cache, False) for cache in range(n_caches)]


def _begins_with(key: torch.fx.Node, value: torch.fx.Node) -> bool:
    """Return whether ``key``, ``[1, heads, T, k]``, begins with ``value``, ``[1, heads, T, v]``, in each row."""
    aten: Any = torch.ops.aten
    if key.target is aten.cat.default:
        parts = key.args[0]
        axis = key.args[1] if len(key.args) > 1 else key.kwargs.get("dim", 0)
        if axis in (3, -1) and isinstance(parts, (list, tuple)) and parts[0] is value:
            return True
    if value.target is aten.slice.Tensor:
        names = ("self", "dim", "start", "end", "step")
        given: dict[str, Any] = {**dict(zip(names, value.args, strict=False)), **value.kwargs}
        from_first, every = given.get("start") in (0, None), given.get("step", 1) == 1
        return given["self"] is key and given.get("dim", 0) in (3, -1) and from_first and every
    return False
