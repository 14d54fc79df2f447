"""Reads and writes the cache metadata of a program: facts of the model's architecture, as constant methods.

``etkv_metadata_read`` in ``include/etkv/metadata.h`` documents the facts, and the native library has the rules for
reading them. The writer needs no library, because an export runs without it. The capacity and the storage format are
not in the metadata, because the application chooses them. The default storage format is the dtype in the metadata. If
the metadata has no dtype, the dtype of the program's first output, the logits, applies.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etkv._capi import call, ffi, lib, struct, text
from etkv.config import DTYPES, Dtype, LayerConfig, LayerConfigs
from etkv.errors import EtkvError
from etkv.recurrent_layer import Convolution, Recurrence, RecurrentLayer

SCHEMA_VERSION = 1
"""The version of the ``kv_cache.*`` metadata of programs in which all layers attend."""

RECURRENT_SCHEMA_VERSION = 2
"""The version for programs with recurrent layers. Readers of version 1 refuse it."""

CHUNK_SCHEMA_VERSION = 3
"""The version for programs with layers that attend in chunks, with or without recurrent layers."""

MAX_LAYERS = 65536
"""Maximum number of layers."""

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
    facts: dict[str, Any] = {_VERSION: version, "kv_cache.n_layers": layers}
    optional = {"v_head_dim": v_head_dim, "window": window, "sinks": sinks, "chunk": chunk}
    optional["values_in_keys"] = values_in_keys
    given = {name: fact for name, fact in optional.items() if fact is not None}
    for name, fact in {"n_kv_heads": n_kv_heads, "head_dim": head_dim, **given}.items():
        # Without layers, a tensor would be empty.
        facts[f"kv_cache.{name}"] = _written(name, fact, layers) if layers else 0
    chunks = facts.get("kv_cache.chunk", 0)
    if chunks if _is_int(chunks) else chunks.any():
        facts[_VERSION] = CHUNK_SCHEMA_VERSION
    if dtype is not None:
        if dtype not in DTYPES:
            raise EtkvError(f"`dtype` is {str(dtype)[:32]!r}, expected one of {', '.join(DTYPES)}")
        facts[_DTYPE] = dtype
    if recurrent_layers:
        import torch

        described = [fact for layer in recurrent_layers for fact in layer.facts()]
        facts[_RECURRENT] = torch.tensor(_counts("recurrent_layers", described, len(described)), dtype=torch.int32)
    metadata.update(facts)
    return metadata


def read_kv_cache_metadata(source: str | PathLike[str] | Mapping[str, Any]) -> ModelCacheParams:
    """Return the cache metadata of a program.

    ``source`` is the path of the program, or a mapping of its constant methods: name -> int, list or tensor.

    Raises :class:`EtkvError` if the version is not 1, 2 or 3, or if a fact is absent or not valid. The message names
    the fact.
    """
    if isinstance(source, Mapping):
        constants = source
    else:
        from etkv.pte import constant_methods

        constants = with_dtype(constant_methods(Path(source)), Path(source))
    values = json.dumps({name: _plain(constants[name]) for name in _names() if name in constants}).encode()
    raw = struct("etkv_metadata")
    call("etkv_metadata_read", values, raw)
    # The second call fills the arrays.
    raw.layers = layers = ffi.new("etkv_layer_config[]", max(1, raw.n_layers))
    raw.recurrent_layers = recurrent = ffi.new("etkv_recurrent_layer_config[]", max(1, raw.n_recurrent_layers))
    layers[0].struct_size, recurrent[0].struct_size = ffi.sizeof(layers[0]), ffi.sizeof(recurrent[0])
    call("etkv_metadata_read", values, raw)
    backend = constants.get(BACKEND, "MLXBackend")
    if backend not in BACKENDS:
        raise EtkvError(f"`{BACKEND}` is {backend!r}, expected one of {', '.join(BACKENDS)}")
    recurrent_layers = tuple(map(_recurrent_layer, recurrent[0 : raw.n_recurrent_layers]))
    of_layers = LayerConfigs(map(_layer, layers[0 : raw.n_layers]), backend, recurrent_layers)
    return ModelCacheParams(of_layers, raw.max_step_tokens, raw.context_length, backend, recurrent_layers)


def _names() -> list[str]:
    """Return the names of the constant methods that the library reads."""
    names = (text(lib().etkv_metadata_name(index)) for index in itertools.count())
    return list(itertools.takewhile(bool, names))


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON has it: an integer, a string, a boolean, or a list of a tensor's or a list's elements.
    Other values, which no fact has, are returned as their text.
    """
    if isinstance(value, str | bool):
        return value
    if _is_int(value):
        return int(value)
    if hasattr(value, "flatten"):
        value = value.flatten().tolist()
    return [_plain(element) for element in value] if isinstance(value, list | tuple) else repr(value)


def _layer(raw: Any) -> LayerConfig:
    return LayerConfig(
        raw.n_kv_heads,
        raw.k_head_dim,
        raw.v_head_dim,
        window=raw.window,
        sinks=raw.sinks,
        dtype=(None, *DTYPES)[raw.dtype],
        values_in_keys=bool(raw.values_in_keys),
        chunk=raw.chunk,
    )


def _recurrent_layer(raw: Any) -> RecurrentLayer:
    if raw.kind == 1:
        return Convolution(raw.channels, raw.width)
    return Recurrence(raw.k_heads, raw.heads, raw.k_dim, raw.v_dim, channel_decay=bool(raw.channel_decay))


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
    return next((_count(name, constants[name]) for name in CONTEXT_NAMES if name in constants), 0)


def describes_layers(names: Collection[str]) -> bool:
    """Return whether constant methods of these names describe the layers of a cache outside of the graph."""
    return _VERSION in names or "get_n_caches" in names


def _in_range(n_layers: int, name: str, least: int) -> int:
    if not least <= n_layers <= MAX_LAYERS:
        raise EtkvError(f"`{name}` is {n_layers}, expected {least} to {MAX_LAYERS}")
    return n_layers


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


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
