"""Reads and writes the cache metadata of a program: facts of the model's architecture, as constant methods.

``kv_cache.schema_version`` is 1, and ``kv_cache.n_layers`` is the number of layers. ``kv_cache.n_kv_heads``,
``head_dim``, ``v_head_dim``, ``window``, ``sinks`` and ``values_in_keys`` are one integer for all layers, or a tensor
with an integer for each layer. All of them except ``n_kv_heads`` and ``head_dim`` may be absent. ``values_in_keys`` is
1 if a value is the first elements of its key, else 0; a reader that ignores it stores these values twice.
``kv_cache.dtype`` is the dtype of keys and values, ``f32``, ``f16`` or ``bf16``. If it is absent, the dtype is that of
the program's first output, the logits. Without a version, the facts that ExecuTorch's own exporter writes are read
instead. The capacity and the storage format are not in the metadata, because the application chooses them. The default
storage format is the dtype.

Programs with layers that attend in chunks have version 3. ``kv_cache.chunk`` is the length of a layer's chunks in
positions, or 0.

Programs with recurrent layers have version 2, or 3 with chunks. ``kv_cache.n_layers`` and the facts above then describe
only the attention layers, of which there may be none. ``kv_cache.recurrent_layers`` is a tensor of int32 with 8
integers for each recurrent layer, one layer after the other: its kind (1 for a convolution, 2 for a recurrence),
``channels``, ``width``, ``k_heads``, ``heads``, ``k_dim``, ``v_dim`` and ``channel_decay`` (0 or 1), see
:class:`RecurrentLayer`.

``read_kv_cache_metadata`` in ``include/etkv/executorch.hpp`` follows the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etkv.config import DTYPES, Dtype, LayerConfig, LayerConfigs
from etkv.errors import EtkvError
from etkv.recurrent_layer import N_FACTS, RecurrentLayer

SCHEMA_VERSION = 1
"""The version of the ``kv_cache.*`` metadata of programs in which all layers attend."""

RECURRENT_SCHEMA_VERSION = 2
"""The version for programs with recurrent layers. Readers of version 1 refuse it."""

CHUNK_SCHEMA_VERSION = 3
"""The version for programs with layers that attend in chunks, with or without recurrent layers."""

_VERSIONS = (SCHEMA_VERSION, RECURRENT_SCHEMA_VERSION, CHUNK_SCHEMA_VERSION)

MAX_LAYERS = 65536
"""Maximum number of layers. A larger number means that the program is damaged."""

BACKENDS = ("MLXBackend", "cpu")
"""The ids of the backends whose programs use caches."""

Backend: TypeAlias = Literal["MLXBackend", "cpu"]
"""One of :data:`BACKENDS`."""

BACKEND = "kv_cache.backend"
"""The constant method with the backend of the program. A program without this method is for MLX."""

VALUES_IN_KEYS = "kv_cache.values_in_keys"
"""The constant method with 1 for each layer whose values are the first elements of its keys, else 0."""

_VERSION = "kv_cache.schema_version"
_DTYPE = "kv_cache.dtype"
_RECURRENT = "kv_cache.recurrent_layers"
_INT32_MAX = 2**31 - 1
CONTEXT_NAMES = ("get_max_ctx_len", "get_max_context_len", "get_max_seq_len")

Count = int | Sequence[int]
"""One count for all layers, or one for each."""


@dataclass(frozen=True)
class ModelCacheParams:
    """The cache metadata of a program, and the sizes for which it was exported."""

    layers: LayerConfigs
    prefill_chunk_size: int
    """Maximum tokens of one step; 0 if the program does not contain it."""
    max_context_length: int
    """Number of positions that the program was exported for; 0 if the program does not contain it."""
    backend: Backend = "MLXBackend"
    """The backend that runs the program; pass it to the session."""
    recurrent_layers: tuple[RecurrentLayer, ...] = ()
    """The recurrent layers in the order of their ids. Their ids and the ids of ``layers`` are counted separately."""


def write_kv_cache_metadata(
    metadata: dict[str, Any],
    *,
    n_layers: int,
    n_kv_heads: Count,
    head_dim: Count,
    v_head_dim: Count | None = None,
    window: Count | None = None,
    sinks: Count | None = None,
    values_in_keys: Count | None = None,
    chunk: Count | None = None,
    dtype: Dtype | None = None,
    recurrent_layers: Sequence[RecurrentLayer] = (),
) -> dict[str, Any]:
    """Add the cache's facts to ``metadata``, the constant methods of a program by name, and return it.

    Each fact is one int for all layers, or a list with one int for each layer. A list becomes an int32 tensor.
    ``window`` and ``chunk`` count positions; 0 in both is full history. ``values_in_keys`` is 1 or 0. ``dtype`` is
    the dtype in which the program computes keys and values. With ``recurrent_layers``, ``n_layers`` may be 0. The
    facts of attention layers are then ignored.

    Raises :class:`EtkvError` if a value is not a 32-bit count, if a fact does not have one value for each layer, or if
    ``dtype`` is not a :data:`Dtype`. The message names the fact, and ``metadata`` is unchanged.
    """
    layers = _in_range(_count("n_layers", n_layers), "n_layers", 0 if recurrent_layers else 1)
    version = RECURRENT_SCHEMA_VERSION if recurrent_layers else SCHEMA_VERSION
    if chunk is not None and layers and any(_each({"chunk": chunk}, "chunk", layers)):
        version = CHUNK_SCHEMA_VERSION
    facts: dict[str, Any] = {_VERSION: version, "kv_cache.n_layers": layers}
    optional = {"v_head_dim": v_head_dim, "window": window, "sinks": sinks, "chunk": chunk}
    optional["values_in_keys"] = values_in_keys
    given = {name: fact for name, fact in optional.items() if fact is not None}
    for name, fact in {"n_kv_heads": n_kv_heads, "head_dim": head_dim, **given}.items():
        # Without layers, a tensor would be empty.
        facts[f"kv_cache.{name}"] = _written(name, fact, layers) if layers else 0
    if dtype is not None:
        facts[_DTYPE] = _dtype(dtype, "dtype")
    if recurrent_layers:
        import torch

        described = [fact for layer in recurrent_layers for fact in layer.facts()]
        facts[_RECURRENT] = torch.tensor(_counts("recurrent_layers", described, len(described)), dtype=torch.int32)
    metadata.update(facts)
    return metadata


def read_kv_cache_metadata(source: str | PathLike[str] | Mapping[str, Any]) -> ModelCacheParams:
    """Return the cache metadata of a program.

    ``source`` is the path of the program, or a mapping of its constant methods: name -> int, list or tensor.

    Raises :class:`EtkvError` if the version is not 1, 2 or 3, or if a fact is absent or not a count. The message names
    the fact.
    """
    if isinstance(source, Mapping):
        constants = source
    else:
        from etkv.pte import constant_methods

        constants = with_dtype(constant_methods(Path(source)), Path(source))
    dtype = _dtype(constants[_DTYPE], _DTYPE) if _DTYPE in constants else None
    version = _find(constants, _VERSION)
    if version not in (None, *_VERSIONS):
        known = f"versions {_VERSIONS[0]} to {_VERSIONS[-1]}"
        raise EtkvError(f"the program's {_VERSION} is {version}; this etkv reads {known}")
    recurrent_layers = _recurrent_layers(constants) if _has_recurrent_layers(constants) else ()
    read_layers = _exporters_layers if version is None else _versioned_layers
    of_layers = [replace(layer, dtype=dtype) for layer in read_layers(constants)]
    context = context_length(constants)
    backend = constants.get(BACKEND, "MLXBackend")
    if backend not in BACKENDS:
        raise EtkvError(f"`{BACKEND}` is {backend!r}, expected one of {', '.join(BACKENDS)}")
    layers = LayerConfigs(of_layers, backend, recurrent_layers)
    chunk = _find(constants, "get_prefill_chunk_size") or 0
    return ModelCacheParams(layers, chunk, context, backend, recurrent_layers)


def with_dtype(constants: Mapping[str, Any], program: Path) -> Mapping[str, Any]:
    """Return ``constants``. If they have no dtype, add the dtype of ``program``'s first output.

    Raises :class:`EtkvError` if the program is damaged.
    """
    if _DTYPE in constants:
        return constants
    from etkv.pte import output_dtype

    computed = output_dtype(program)
    return constants if computed is None else {**constants, _DTYPE: computed}


def context_length(constants: Mapping[str, Any]) -> int:
    """Return the number of positions that a program was exported for; 0 if no constant method contains it.

    Raises :class:`EtkvError` if the value is not a count.
    """
    return next((found for name in CONTEXT_NAMES if (found := _find(constants, name)) is not None), 0)


def describes_layers(names: Collection[str]) -> bool:
    """Return whether constant methods of these names describe the layers of a cache outside of the graph."""
    return _VERSION in names or "get_n_caches" in names


def _has_recurrent_layers(constants: Mapping[str, Any]) -> bool:
    version = constants.get(_VERSION)
    return version == RECURRENT_SCHEMA_VERSION or (version == CHUNK_SCHEMA_VERSION and _RECURRENT in constants)


def _recurrent_layers(constants: Mapping[str, Any]) -> tuple[RecurrentLayer, ...]:
    if _RECURRENT not in constants:
        raise _absent(_RECURRENT)
    value = constants[_RECURRENT]
    flat = value.flatten().tolist() if hasattr(value, "flatten") else value
    n_layers = _in_range(len(flat) // N_FACTS if isinstance(flat, Sequence) else 0, f"layers of {_RECURRENT}")
    if len(flat) != n_layers * N_FACTS:
        raise EtkvError(f"`{_RECURRENT}` has {len(flat)} integers, expected {N_FACTS} for each layer")
    facts = _counts(_RECURRENT, flat, len(flat))
    rows = [facts[at : at + N_FACTS] for at in range(0, len(facts), N_FACTS)]
    return tuple(RecurrentLayer.of_facts(row, f"layer {at} of `{_RECURRENT}`") for at, row in enumerate(rows))


def _versioned_layers(constants: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    n_layers = _n_layers(constants, "kv_cache.n_layers", 0 if _has_recurrent_layers(constants) else 1)
    kv_heads = _each(constants, "kv_cache.n_kv_heads", n_layers)
    head_dims = _each(constants, "kv_cache.head_dim", n_layers)
    v_head_dims = _each(constants, "kv_cache.v_head_dim", n_layers, head_dims)
    windows, sinks, chunks, in_keys = (
        _each(constants, f"kv_cache.{name}", n_layers, [0] * n_layers)
        for name in ("window", "sinks", "chunk", "values_in_keys")
    )
    for fact in in_keys:
        if fact > 1:
            raise EtkvError(f"`{VALUES_IN_KEYS}` has {fact}, expected 0 or 1")
    facts = zip(kv_heads, head_dims, v_head_dims, windows, sinks, chunks, in_keys, strict=True)
    return tuple(
        LayerConfig(heads, k, v, window=window, sinks=sinks, values_in_keys=bool(in_keys), chunk=chunk)
        for heads, k, v, window, sinks, chunk, in_keys in facts
    )


def _exporters_layers(constants: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    n_layers = _n_layers(constants, "get_n_caches")
    kv_heads, head_dims, windows = (
        _each(constants, name, n_layers) for name in ("get_kv_heads", "get_head_dims", "get_windows")
    )
    facts = zip(kv_heads, head_dims, windows, strict=True)
    return tuple(LayerConfig(heads, dim, dim, window=window) for heads, dim, window in facts)


def _n_layers(constants: Mapping[str, Any], name: str, least: int = 1) -> int:
    found = _find(constants, name)
    if found is None:
        raise _absent(name)
    return _in_range(found, name, least)


def _in_range(n_layers: int, name: str, least: int = 1) -> int:
    if not least <= n_layers <= MAX_LAYERS:
        raise EtkvError(f"`{name}` is {n_layers}, expected {least} to {MAX_LAYERS}")
    return n_layers


def _find(constants: Mapping[str, Any], name: str) -> int | None:
    """Return the count ``name``; None if it is absent."""
    return _count(name, constants[name]) if name in constants else None


def _each(constants: Mapping[str, Any], name: str, n_layers: int, otherwise: list[int] | None = None) -> list[int]:
    """Return the counts of the fact ``name``, one for each layer.

    If the fact is absent, returns ``otherwise``, or raises :class:`EtkvError` if ``otherwise`` is None.
    """
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
    """Return the counts of a list or a tensor, one for each layer.

    Raises :class:`EtkvError` for another number of values, and for values that are not 32-bit counts.
    """
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


def _dtype(value: Any, name: str) -> Dtype:
    for known in DTYPES:
        if value == known:
            return known
    raise EtkvError(f"`{name}` is {str(value)[:32]!r}, expected one of {', '.join(DTYPES)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _absent(name: str) -> EtkvError:
    return EtkvError(f"the program does not report `{name}`; export it with an off-graph KV cache")
