"""KV caches in plain PyTorch, one for each kind. Tests compare the native caches with them.

They return the same results as the native caches, refuse calls with the same status, and round rows in the same way.
Read the modules in this order: ``attention``; ``tokens`` (the positions that a query sees); ``cache`` (a forward);
``sequences``; ``trees``; ``formats``; ``config``. Run a model on such a cache within ``etkv.op.active(cache)``.

The caches hold only keys and values. Convolutions and recurrences run on a separate :class:`RecurrentState`.
"""

from __future__ import annotations

from etkv.config import CacheConfig
from etkv.reference.cache import ContiguousCache, ReferenceCache
from etkv.reference.errors import NoActiveCacheError, invalid
from etkv.reference.sequences import SeqCache
from etkv.reference.state import RecurrentState
from etkv.reference.trees import TreeCache

KINDS: dict[str, type[ReferenceCache]] = {cache.kind: cache for cache in (ContiguousCache, SeqCache, TreeCache)}
"""The caches by the names of their kinds."""


def make_cache(kind: str, config: CacheConfig) -> ReferenceCache:
    """Returns an empty cache of the kind ``contiguous``, ``seq`` or ``tree``. Refuses other kinds, and invalid
    configs.
    """
    if kind not in KINDS:
        raise invalid(f"unknown cache kind {kind!r}; available: {', '.join(KINDS)}")
    return KINDS[kind](config)


__all__ = [
    "KINDS",
    "ContiguousCache",
    "NoActiveCacheError",
    "RecurrentState",
    "ReferenceCache",
    "SeqCache",
    "TreeCache",
    "make_cache",
]
