"""The KV cache of an ExecuTorch program, from Python.

.. code-block:: python

    config = etkv.CacheConfig(etkv.read_kv_cache_metadata("model.pte").layers, capacity=4096)
    with etkv.DecodeSession(config) as session, etkv.load("model.pte", session, logits="last") as program:
        tokenizer = etkv.Tokenizer.beside("model.pte")
        for piece in tokenizer.stream(etkv.generate(program, tokenizer.chat("What is a KV cache?"))):
            print(piece, end="", flush=True)

Importing this package imports neither torch nor ExecuTorch; its names do so when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "cache": ("ALL", "Cache", "Memory", "SeqCache", "TreeCache", "estimate", "row_bytes"),
    "config": ("CacheConfig", "LayerConfig"),
    "errors": (
        "CapacityError",
        "EtkvError",
        "KindError",
        "NativeError",
        "NoCacheError",
        "PositionError",
        "ProgramError",
        "Status",
        "StepError",
        "UnsupportedError",
    ),
    "generation": ("Generation", "generate"),
    "metadata": ("ModelCacheParams", "read_kv_cache_metadata", "write_kv_cache_metadata"),
    "runtime": ("Program", "load", "register_backend"),
    "session": ("DecodeSession", "SeqSession", "Session", "TreeSession"),
    "tokenizer": ("Tokenizer",),
}
"""Module -> what it gives to the package."""

_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULES)

if TYPE_CHECKING:
    from etkv.cache import ALL, Cache, Memory, SeqCache, TreeCache, estimate, row_bytes
    from etkv.config import CacheConfig, LayerConfig
    from etkv.errors import (
        CapacityError,
        EtkvError,
        KindError,
        NativeError,
        NoCacheError,
        PositionError,
        ProgramError,
        Status,
        StepError,
        UnsupportedError,
    )
    from etkv.generation import Generation, generate
    from etkv.metadata import ModelCacheParams, read_kv_cache_metadata, write_kv_cache_metadata
    from etkv.runtime import Program, load, register_backend
    from etkv.session import DecodeSession, SeqSession, Session, TreeSession
    from etkv.tokenizer import Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
