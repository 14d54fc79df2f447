"""The limits of a config, which the native caches check too, with the defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass

from etkv.config import DEFAULT_MAX_STEP_TOKENS, GROWTHS, CacheConfig, LayerConfig
from etkv.errors import StatusError
from etkv.reference.errors import at_least, invalid
from etkv.reference.formats import Format, format_of
from etkv.reference.window import Sight

_MAX = 2**31 - 1


@dataclass(frozen=True)
class Limits:
    """A valid config, as a cache uses it."""

    capacity: int
    max_step_tokens: int
    formats: tuple[Format, Format]
    """The formats of keys and of values."""
    float_format: Format
    quantized_kv_start: int
    sights: tuple[Sight, ...]
    """The positions that the queries of each layer see."""

    @property
    def most_floats(self) -> int:
        """Returns the most positions that are stored in ``float_format`` before ``quantized_kv_start``."""
        return min(max(self.quantized_kv_start - 1, 0) + self.max_step_tokens, self.capacity)


def limits_of(config: CacheConfig) -> Limits:
    """Returns the limits of a config.

    Raises :class:`StatusError` with ``INVALID_ARGUMENT`` for an invalid field. The message names the field, the value
    and the limit.
    """
    if not config.layers:
        raise invalid("a cache needs at least 1 layer")
    at_least(1, "capacity", config.capacity)
    for name in ("max_step_tokens", "min_chunk", "quantized_kv_start"):
        at_least(0, name, getattr(config, name))
    for name in ("capacity", "max_step_tokens", "min_chunk", "quantized_kv_start"):
        _at_most(name, getattr(config, name))
    if config.growth not in GROWTHS:
        raise invalid(f"unknown growth {config.growth!r}; available: {', '.join(GROWTHS)}")
    if config.min_chunk and config.growth not in ("doubling", "step"):
        raise invalid(f"expected min_chunk 0 for growth {config.growth!r}, got {config.min_chunk}")
    named = {name: _format(name, _named(config, name)) for name in ("k_format", "v_format", "float_format")}
    if config.quantized_kv_start and not named["float_format"].is_float:
        raise invalid(f"expected float_format f32, f16 or bf16, got {config.float_format}")
    formats = (named["k_format"], named["v_format"])
    for index, layer in enumerate(config.layers):
        try:
            _check_layer(layer)
            check_formats(formats, layer)
        except StatusError as error:
            raise invalid(f"layer {index}: {error}") from None
    return Limits(
        config.capacity,
        config.max_step_tokens or DEFAULT_MAX_STEP_TOKENS,
        formats,
        named["float_format"],
        config.quantized_kv_start,
        tuple(Sight(layer.window, layer.sinks) for layer in config.layers),
    )


def check_formats(formats: tuple[Format, Format], layer: LayerConfig) -> None:
    for what, stored_as, head_dim in zip(("keys", "values"), formats, (layer.k_head_dim, layer.value_dim), strict=True):
        try:
            stored_as.check(head_dim)
        except StatusError as error:
            raise invalid(f"{what}: {error}") from None


def _check_layer(layer: LayerConfig) -> None:
    for name, value in (
        ("n_kv_heads", layer.n_kv_heads),
        ("k_head_dim", layer.k_head_dim),
        ("v_head_dim", layer.value_dim),
    ):
        at_least(1, name, value)
        _at_most(name, value)
    for name in ("window", "sinks"):
        at_least(0, name, getattr(layer, name))
        _at_most(name, getattr(layer, name))
    if layer.sinks and not layer.window:
        raise invalid(f"expected sinks 0 for a layer without a window, got {layer.sinks}")


def _named(config: CacheConfig, field: str) -> str:
    """Return the format of ``field``: what the layers are computed in where the config names none."""
    name: str | None = getattr(config, field)
    if name is not None:
        return name
    first = config.layers[0].dtype
    for index, layer in enumerate(config.layers):
        if layer.dtype != first and (field != "float_format" or config.quantized_kv_start):
            raise invalid(
                f"{field} is not set, and the dtype of layer {index} is {layer.dtype or 'unknown'}, "
                f"that of layer 0 {first or 'unknown'}; set {field}"
            )
    return first or "f16"


def _format(field: str, name: str) -> Format:
    try:
        return format_of(name)
    except StatusError as error:
        raise invalid(f"{field}: {error}") from None


def _at_most(name: str, value: int) -> None:
    if value > _MAX:
        raise invalid(f"{name} is {value}, the most is {_MAX}")
