"""The rows of a cache: keys and values of each token, rounded by their format."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from etkv.config import CacheConfig
from etkv.errors import Status, StatusError, status_error
from etkv.reference.errors import invalid
from etkv.reference.formats import Format, format_of
from etkv.reference.limits import Limits, check_formats

TokenKv = tuple[Tensor, Tensor]
"""A token's key ``[n_kv_heads, k_head_dim]`` and value ``[n_kv_heads, v_head_dim]``, as float32."""


class RowStore:
    """Keys and values of each layer by token. A token is a unique number."""

    def __init__(self, config: CacheConfig, limits: Limits) -> None:
        self._config, self._limits = config, limits
        self._layers: list[dict[int, TokenKv]] = [{} for _ in config.layers]
        self.formats: tuple[Format, Format]
        self.awaits_conversion: bool
        self.clear()

    def clear(self) -> None:
        """Removes every row and restores the formats of the config."""
        for layer in self._layers:
            layer.clear()
        self.awaits_conversion = self._limits.quantized_kv_start > 0
        floats = (self._limits.float_format, self._limits.float_format)
        self.formats = floats if self.awaits_conversion else self._limits.formats

    def encode(self, layer: int, k: Tensor, v: Tensor, n_tokens: int) -> list[TokenKv]:
        """Returns new rows, ``[1, n_kv_heads, n_tokens, head_dim]``, in their stored form, by token. Stores nothing.

        Raises :class:`StatusError` with ``SHAPE`` for another shape.
        """
        config = self._config.layers[layer]
        for what, rows, head_dim in (("keys", k, config.k_head_dim), ("values", v, config.value_dim)):
            expected = (1, config.n_kv_heads, n_tokens, head_dim)
            if tuple(rows.shape) != expected:
                raise status_error(
                    Status.SHAPE,
                    f"expected {what} of shape {list(expected)} for layer {layer}, got {list(rows.shape)}",
                )
        keys, values = (stored_as.stored(rows[0]) for stored_as, rows in zip(self.formats, (k, v), strict=True))
        return [(keys[:, token], values[:, token]) for token in range(n_tokens)]

    def check_values(self, layer: int, v: Tensor) -> None:
        """Raises :class:`StatusError` with ``INVALID_ARGUMENT`` for values that are not finite as stored.

        The native caches read masked rows with weight 0, and 0 times infinity is NaN: other sequences would get NaN.
        """
        stored_as = self.formats[1]
        if not torch.isfinite(stored_as.stored(v) if stored_as.is_float else v).all():
            raise invalid(
                f"a value of this step is not finite as {stored_as.name} (layer {layer}); other sequences would read it"
            )

    def put(self, layer: int, tokens: Sequence[int], rows: Sequence[TokenKv]) -> None:
        self._layers[layer].update(zip(tokens, rows, strict=True))

    def get(self, layer: int, tokens: Sequence[int]) -> list[TokenKv]:
        return [self._layers[layer][token] for token in tokens]

    def keep(self, tokens: Collection[int]) -> None:
        """Removes the rows of all other tokens."""
        for layer in self._layers:
            for token in layer.keys() - set(tokens):
                del layer[token]

    def convert(self, k_format: str, v_format: str) -> None:
        """Converts stored and future rows to other formats, until everything is cleared.

        Raises :class:`StatusError` with ``INVALID_ARGUMENT`` for a format that is unknown or does not fit a layer.
        """
        wanted = (format_of(k_format), format_of(v_format))
        for index, layer in enumerate(self._config.layers):
            try:
                check_formats(wanted, layer)
            except StatusError as error:
                raise invalid(f"layer {index}: {error}") from None
        self._convert(wanted)

    def convert_at(self, length: int) -> None:
        """Converts to the formats of the config if ``length`` positions reach ``quantized_kv_start``."""
        if self.awaits_conversion and length >= self._limits.quantized_kv_start:
            self._convert(self._limits.formats)

    def _convert(self, wanted: tuple[Format, Format]) -> None:
        changes = [new for new, old in zip(wanted, self.formats, strict=True) if new.name != old.name]
        for layer in self._layers if changes else []:
            for token, rows in layer.items():
                k, v = (
                    row if new.name == old.name else new.stored(row)
                    for new, old, row in zip(wanted, self.formats, rows, strict=True)
                )
                layer[token] = k, v
        self.formats = wanted
        # An explicit conversion is not undone later.
        self.awaits_conversion = False


def stack(rows: Sequence[TokenKv]) -> tuple[Tensor, Tensor]:
    """Returns keys and values, each ``[1, n_kv_heads, n, head_dim]``."""
    return (
        torch.stack([key for key, _ in rows], dim=1).unsqueeze(0),
        torch.stack([value for _, value in rows], dim=1).unsqueeze(0),
    )
