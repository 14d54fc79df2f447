"""The ``kv_cache.*`` metadata of a program: what its caches look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SCHEMA_VERSION = 1
"""The version of the metadata that this module writes."""


def write_kv_cache_metadata(
    metadata: dict[str, Any],
    *,
    n_layers: int,
    n_kv_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    v_head_dim: int | Sequence[int] | None = None,
    window: int | Sequence[int] | None = None,
    sinks: int | Sequence[int] | None = None,
) -> dict[str, Any]:
    """Add the architecture facts of a program's caches to its constant methods, and return these.

    A fact is one int for all layers, or a sequence of one for each, which becomes an int32 tensor. ``None`` says
    nothing: V as wide as K, no windows, no sinks.
    """
    import torch

    facts = {
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "window": window,
        "sinks": sinks,
    }
    metadata["kv_cache.schema_version"] = SCHEMA_VERSION
    metadata["kv_cache.n_layers"] = n_layers
    for name, fact in facts.items():
        if fact is not None:
            metadata[f"kv_cache.{name}"] = fact if isinstance(fact, int) else torch.tensor(fact, dtype=torch.int32)
    return metadata
