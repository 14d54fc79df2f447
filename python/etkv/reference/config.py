"""Checks configs with the rules of the native caches."""

from __future__ import annotations

from etkv.config import GROWTHS, CacheConfig
from etkv.errors import StatusError
from etkv.reference.errors import check_range, invalid
from etkv.reference.formats import Format, format_of

Formats = tuple[Format, Format]  # of keys and of values


def check_config(config: CacheConfig) -> None:
    """Refuses an invalid field. The message names the field, the value and the limit."""
    if config.recurrent_layers:
        told = f"a reference cache holds keys and values, and the config has {len(config.recurrent_layers)} recurrent"
        raise invalid(f"{told} layers; leave them out, and run them on an etkv.reference.RecurrentState beside it")
    if not config.layers:
        raise invalid("a cache needs at least 1 layer")
    for name in ("capacity", "max_step_tokens", "min_chunk", "quantized_kv_start"):
        check_range(name, getattr(config, name), int(name == "capacity"))
    if config.growth not in GROWTHS:
        raise invalid(f"unknown growth {config.growth!r}; available: {', '.join(GROWTHS)}")
    if config.min_chunk and config.growth not in ("doubling", "step"):
        raise invalid(f"expected min_chunk 0 for growth {config.growth!r}, got {config.min_chunk}")
    for index, layer in enumerate(config.layers):
        for name in ("n_kv_heads", "k_head_dim"):
            check_range(f"layer {index}: {name}", getattr(layer, name), 1)
        check_range(f"layer {index}: v_head_dim", layer.value_dim, 1)
        if layer.values_in_keys and layer.value_dim > layer.k_head_dim:
            most = f"values in keys have at most the {layer.k_head_dim} elements of a key"
            raise invalid(f"layer {index}: v_head_dim is {layer.value_dim}, but {most}")
        for name in ("window", "sinks", "chunk"):
            check_range(f"layer {index}: {name}", getattr(layer, name), 0)
        if layer.chunk and (layer.window or layer.sinks):
            raise invalid(f"layer {index}: expected chunk 0 for a layer with a window or sinks, got {layer.chunk}")
        if layer.sinks and not layer.window:
            raise invalid(f"layer {index}: expected sinks 0 for a layer without a window, got {layer.sinks}")
    check_formats(formats_of(config)[0], config)


def check_formats(formats: Formats, config: CacheConfig) -> None:
    """Refuses formats that do not fit the head_dim of a layer, and a value format if all values are in keys."""
    for index, layer in enumerate(config.layers):
        formats[0].check(layer.k_head_dim, f"layer {index}: keys: ")
        if not layer.values_in_keys:
            formats[1].check(layer.value_dim, f"layer {index}: values: ")
    keys, values = (one.name for one in formats)
    if keys != values and all(layer.values_in_keys for layer in config.layers):
        told = f"the values of every layer are in its keys, which k_format stores as {keys}; give both the same format"
        raise invalid(f"v_format is {values}, but {told}")


def formats_of(config: CacheConfig) -> tuple[Formats, Format]:
    """Returns the formats of keys and values, and the float format before ``quantized_kv_start``."""
    in_keys = all(layer.values_in_keys for layer in config.layers) and config.v_format is None
    of_values = "k_format" if in_keys else "v_format"
    keys, values, floats = (_format(config, field) for field in ("k_format", of_values, "float_format"))
    if config.quantized_kv_start and not floats.is_float:
        raise invalid(f"expected float_format f32, f16 or bf16, got {config.float_format}")
    return (keys, values), floats


def _format(config: CacheConfig, field: str) -> Format:
    """Returns the format of a field; by default the dtype of the layers."""
    name: str | None = getattr(config, field)
    first = config.layers[0].dtype
    for index, layer in enumerate(config.layers):
        if name is None and layer.dtype != first and (field != "float_format" or config.quantized_kv_start):
            dtypes = f"the dtype of layer {index} is {layer.dtype or 'unknown'}, that of layer 0 {first or 'unknown'}"
            raise invalid(f"{field} is not set, and {dtypes}; set {field}")
    try:
        return format_of((first or "f16") if name is None else name)
    except StatusError as error:
        raise invalid(f"{field}: {error}") from None
