"""The settings of a quantization in a folder's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etkv.errors import EtkvError
from etkv.export.published.stored import Stored

REMEDY = "export the model from before its quantization, and let the export quantize it"


class Settings:
    """Reads settings, and creates errors with their names."""

    def __init__(self, path: Path, method: str, values: Mapping[str, Any]) -> None:
        self.path = path
        self.method = method
        self.values = values

    def refuse(self, reason: str) -> EtkvError:
        """Return the error for an unsupported quantization."""
        return EtkvError(f"the weights of {self.path} are quantized ({self.method}): {reason}; {REMEDY}")

    def one_of(self, name: str, known: tuple[Any, ...], default: Any) -> Any:
        """Return the setting ``name``. Raises :class:`EtkvError` unless it is ``known``."""
        value = self.values.get(name, default)
        if value not in known:
            raise self.refuse(f"{name} is {value!r}, but the exporter reads {', '.join(map(repr, known))}")
        return value

    def group_size(self, name: str = "group_size", default: int = 128) -> int:
        """Return the size of a group in columns; -1 for a whole row. Raises :class:`EtkvError` for another number."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
            raise self.refuse(f"{name} is {value!r}, expected a number of columns, or -1 for a row")
        return value

    def check(self, stored: Stored, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raise :class:`EtkvError` unless ``stored`` has one of ``dtypes`` and ``shape``."""
        if stored.dtype not in dtypes or stored.shape != shape:
            raise self.refuse(
                f"tensor {stored.name} is {stored.described()}, expected {' or '.join(dtypes)} {list(shape)}"
            )

    def part(self, parts: Mapping[str, Stored], weight: str, name: str) -> Stored:
        """Return the part ``name`` of ``weight``. Raises :class:`EtkvError` if it is absent."""
        stored = parts.get(name)
        if stored is None:
            raise self.refuse(f"weight {weight} lacks its {name}")
        return stored


FLOATS = ("float32", "float16", "bfloat16")
"""The dtypes of scales."""
