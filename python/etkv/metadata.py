"""What a program tells of its caches: facts of the model's architecture, as constant methods of the ``.pte``.

``kv_cache.schema_version`` is 1, ``kv_cache.n_layers`` the number of layers, and ``kv_cache.n_kv_heads``, ``head_dim``,
``v_head_dim``, ``window`` and ``sinks`` have one integer for all layers, or a tensor of one a layer. The last three may
be absent. What ExecuTorch's own exporter writes is read where there is no version. The capacity and the storage format
are not among them: they are the application's choice.

The rules are those of ``read_kv_cache_metadata`` in ``include/etkv/executorch.hpp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any

from etkv.config import LayerConfig
from etkv.errors import EtkvError

SCHEMA_VERSION = 1
"""The version of the ``kv_cache.*`` metadata that is written and read here."""

MOST_LAYERS = 65536
"""More than that is damage, and not looked for."""

_VERSION = "kv_cache.schema_version"
_INT32_MAX = 2**31 - 1
_CONTEXT_NAMES = ("get_max_ctx_len", "get_max_context_len", "get_max_seq_len")

Count = int | Sequence[int]
"""One count for all layers, or one for each."""


@dataclass(frozen=True)
class ModelCacheParams:
    """What a program says of its caches, and of the steps that it was exported for."""

    layers: tuple[LayerConfig, ...]
    prefill_chunk_size: int
    """Most tokens of one step; 0 where the program does not tell."""
    max_context_length: int
    """Positions that it was exported for; 0 where the program does not tell."""


def write_kv_cache_metadata(
    metadata: dict[str, Any],
    *,
    n_layers: int,
    n_kv_heads: Count,
    head_dim: Count,
    v_head_dim: Count | None = None,
    window: Count | None = None,
    sinks: Count | None = None,
) -> dict[str, Any]:
    """Adds the facts to ``metadata``, the constant methods of a program by name, and returns it.

    Each fact is an int for all layers, or one for each, which becomes an int32 tensor. Window 0 is full history.

    Raises :class:`EtkvError`, naming the fact, for what is no count of 32 bits or has not one for each layer; nothing
    is added then.
    """
    layers = _in_range(_count("n_layers", n_layers), "n_layers")
    facts: dict[str, Any] = {_VERSION: SCHEMA_VERSION, "kv_cache.n_layers": layers}
    optional = {"v_head_dim": v_head_dim, "window": window, "sinks": sinks}
    given = {name: fact for name, fact in optional.items() if fact is not None}
    for name, fact in {"n_kv_heads": n_kv_heads, "head_dim": head_dim, **given}.items():
        facts[f"kv_cache.{name}"] = _written(name, fact, layers)
    metadata.update(facts)
    return metadata


def read_kv_cache_metadata(source: str | PathLike[str] | Mapping[str, Any]) -> ModelCacheParams:
    """What the program at a path tells, or a mapping of its constant methods: name -> int, list or tensor.

    Raises :class:`EtkvError` for a version other than 1, and for a fact that is absent or no count, naming it.
    """
    if isinstance(source, Mapping):
        constants = source
    else:
        from etkv.pte import constant_methods

        constants = constant_methods(Path(source))
    version = _find(constants, _VERSION)
    if version is not None and version != SCHEMA_VERSION:
        raise EtkvError(f"the program's {_VERSION} is {version}; this etkv reads version {SCHEMA_VERSION}")
    layers = _exporters_layers(constants) if version is None else _versioned_layers(constants)
    context = next((found for name in _CONTEXT_NAMES if (found := _find(constants, name)) is not None), 0)
    return ModelCacheParams(layers, _find(constants, "get_prefill_chunk_size") or 0, context)


def _versioned_layers(constants: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    n_layers = _n_layers(constants, "kv_cache.n_layers")
    kv_heads = _each(constants, "kv_cache.n_kv_heads", n_layers)
    head_dims = _each(constants, "kv_cache.head_dim", n_layers)
    v_head_dims = _each(constants, "kv_cache.v_head_dim", n_layers, head_dims)
    windows, sinks = (_each(constants, f"kv_cache.{name}", n_layers, [0] * n_layers) for name in ("window", "sinks"))
    facts = zip(kv_heads, head_dims, v_head_dims, windows, sinks, strict=True)
    return tuple(LayerConfig(heads, k, v, window=window, sinks=sinks) for heads, k, v, window, sinks in facts)


def _exporters_layers(constants: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    n_layers = _n_layers(constants, "get_n_caches")
    kv_heads, head_dims, windows = (
        _each(constants, name, n_layers) for name in ("get_kv_heads", "get_head_dims", "get_windows")
    )
    facts = zip(kv_heads, head_dims, windows, strict=True)
    return tuple(LayerConfig(heads, dim, dim, window=window) for heads, dim, window in facts)


def _n_layers(constants: Mapping[str, Any], name: str) -> int:
    found = _find(constants, name)
    if found is None:
        raise _absent(name)
    return _in_range(found, name)


def _in_range(n_layers: int, name: str) -> int:
    if not 1 <= n_layers <= MOST_LAYERS:
        raise EtkvError(f"`{name}` is {n_layers}, it is 1 to {MOST_LAYERS}")
    return n_layers


def _find(constants: Mapping[str, Any], name: str) -> int | None:
    """The count of that name; None where there is none."""
    return _count(name, constants[name]) if name in constants else None


def _each(constants: Mapping[str, Any], name: str, n_layers: int, otherwise: list[int] | None = None) -> list[int]:
    """One count for each layer."""
    if name not in constants:
        if otherwise is None:
            raise _absent(name)
        return otherwise
    value = constants[name]
    if _is_int(value):
        return [_count(name, value)] * n_layers
    return _counts(name, value, n_layers)


def _written(name: str, fact: Count, n_layers: int) -> Any:
    if _is_int(fact):
        return _count(name, fact)
    import torch

    return torch.tensor(_counts(name, fact, n_layers), dtype=torch.int32)


def _counts(name: str, value: Any, n_layers: int) -> list[int]:
    """The counts of a list or a tensor, one for each layer."""
    flat = value.flatten().tolist() if hasattr(value, "flatten") else value
    if not isinstance(flat, Sequence) or len(flat) != n_layers or not all(_is_int(count) for count in flat):
        raise EtkvError(f"`{name}` is not one integer for each of {n_layers} layers")
    for count in flat:
        if not 0 <= count <= _INT32_MAX:
            raise EtkvError(f"`{name}` has {count}, which is not a 32-bit count")
    return [int(count) for count in flat]


def _count(name: str, value: Any) -> int:
    if not _is_int(value) or not 0 <= value <= _INT32_MAX:
        raise EtkvError(f"`{name}` is {value!r}, which is not a 32-bit count")
    return int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _absent(name: str) -> EtkvError:
    return EtkvError(f"the program does not tell `{name}`; export it with an off-graph KV cache")
