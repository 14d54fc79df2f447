"""The parts of a model that affect its cache and its backend, found in its program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from etkv.export.graphs import argument

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from etkv.export.attention import CacheLayout


def of(traced: ExportedProgram, layout: CacheLayout) -> list[str]:
    """Return the names of the parts of ``traced``. Its caches are described by ``layout``."""
    calls: dict[str, list[Any]] = {}
    for node in traced.graph.nodes:
        if node.op == "call_function":
            calls.setdefault(str(node.target), []).append(node)
    plain, extended = (calls.get(f"kvcache.update_and_attend.{name}", []) for name in ("default", "sinks"))
    scans = calls.get("kvcache.update_and_scan.default", [])
    constants = _of_weights(traced)
    reaches = set(zip(layout.windows, layout.chunks, strict=True))
    sizes = zip(layout.kv_heads, layout.head_dims, layout.v_head_dims, strict=True)
    found = {
        "full attention": (0, 0) in reaches,
        "windows": any(layout.windows),
        "chunks": any(layout.chunks),
        # One head of a latent and a rotary part. The values are the latents.
        "latent attention": any(heads == 1 and values < keys for heads, keys, values in sizes),
        "sinks": any(argument(node, 7, "sinks") is not None for node in extended),
        "softcap": any(argument(node, 8, "softcap") for node in extended),
        "layers that share keys and values": len(plain) + len(extended) > len(layout.windows),
        "sizes by layer": any(len(set(each)) > 1 for each in (layout.kv_heads, layout.head_dims, layout.v_head_dims)),
        "convolutions": "kvcache.update_and_convolve.default" in calls,
        "Mamba-2": any(node.args[4] is None and node.args[3] not in constants for node in scans),
        "lightning attention": any(node.args[3] in constants for node in scans),
        "gated delta rule": any(node.args[4] is not None and _n_axes(node.args[3]) == 3 for node in scans),
        "delta rule with a decay of each channel": any(_n_axes(node.args[3]) == 4 for node in scans),
        "experts": any("gather_mm" in name or "gather_qmm" in name or "experts" in name for name in calls),
    }
    return [name for name, there in found.items() if there]


def _n_axes(node: Any) -> int:
    axes: int = node.meta["val"].dim()
    return axes


def _of_weights(traced: ExportedProgram) -> set[Any]:
    """Return the nodes with tensors that are computed from weights alone."""
    found: set[Any] = set()
    inputs = set(traced.graph_signature.user_inputs)
    for node in traced.graph.nodes:
        # Sizes do not count: a decay that is repeated for each token is constant.
        tensors = [of for of in node.all_input_nodes if not isinstance(of.meta.get("val"), torch.SymInt)]
        if node.name not in inputs and all(of in found for of in tensors):
            found.add(node)
    return found
