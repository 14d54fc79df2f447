"""Configs of caches as C structs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etkv._capi import encoded, ffi, int32, lib, struct
from etkv.config import DTYPES, GROWTHS, CacheConfig
from etkv.errors import EtkvError
from etkv.recurrent_layer import KINDS, RecurrentLayer


def raw_config(config: CacheConfig) -> tuple[Any, Any]:
    """Return ``config`` as the C struct, and the objects that must live while the struct is used."""
    if not isinstance(config, CacheConfig):
        raise EtkvError(f"config is {config!r}, expected a CacheConfig")
    lib()
    layers = ffi.new("etkv_layer_config[]", max(1, len(config.layers)))
    for raw, layer in zip(layers, config.layers, strict=False):
        raw.struct_size = ffi.sizeof("etkv_layer_config")
        for size in ("n_kv_heads", "k_head_dim", "v_head_dim", "window", "sinks", "chunk"):
            setattr(raw, size, int32(getattr(layer, size) or 0, size))
        raw.dtype = 0 if layer.dtype is None else 1 + DTYPES.index(layer.dtype)
        raw.values_in_keys = int(layer.values_in_keys)
    recurrent_layers = _raw_recurrent_layers(config.recurrent_layers)
    if config.growth not in GROWTHS:
        raise EtkvError(f"growth is {config.growth!r}, expected one of {', '.join(GROWTHS)}")
    formats = {field: getattr(config, field) for field in ("k_format", "v_format", "float_format")}
    names = {field: ffi.new("char[]", encoded(name, field)) for field, name in formats.items() if name is not None}
    sizes = ("capacity", "max_step_tokens", "min_chunk", "quantized_kv_start", "anchors")
    raw = struct(
        "etkv_cache_config",
        layers=layers,
        n_layers=len(config.layers),
        growth=GROWTHS.index(config.growth),
        recurrent_layers=recurrent_layers,
        n_recurrent_layers=len(config.recurrent_layers),
        checkpoints=_raw_checkpoints(config.checkpoints),
        **{size: int32(getattr(config, size), size) for size in sizes},
        **names,
    )
    return raw, (layers, recurrent_layers, names)


def _raw_recurrent_layers(layers: Sequence[RecurrentLayer]) -> Any:
    raws = ffi.new("etkv_recurrent_layer_config[]", max(1, len(layers)))
    for raw, layer in zip(raws, layers, strict=False):
        raw.struct_size = ffi.sizeof("etkv_recurrent_layer_config")
        raw.kind = 1 + KINDS.index(layer.kind)
        for size in ("channels", "width", "k_heads", "heads", "k_dim", "v_dim"):
            setattr(raw, size, int32(getattr(layer, size), size))
        raw.channel_decay = int(layer.channel_decay)
    return raws


def _raw_checkpoints(checkpoints: int | None) -> int:
    """Return ``checkpoints`` for the C interface, where 0 is the default and -1 is no checkpoints."""
    if checkpoints is None:
        return 0
    number = int32(checkpoints, "checkpoints")
    if number < 0:
        raise EtkvError(f"checkpoints is {number}, the minimum is 0")
    return number or -1
