"""The settings of a quantization in a folder's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        """Return the setting ``name``. Raises :class:`EtkvError` unless it is one of ``known``."""
        value = self.values.get(name, default)
        if not is_one_of(value, known):
            raise self.refuse(f"{name} is {value!r}, but the exporter reads {', '.join(map(repr, known))}")
        return value

    def group_size(self, name: str = "group_size", default: int = 128) -> int:
        """Return the size of a group in columns; -1 for a whole row. Raises :class:`EtkvError` for another number."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
            raise self.refuse(f"{name} is {value!r}, expected a number of columns, or -1 for a row")
        return value

    def mapping(self, name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings ``name`` in ``values``; empty if they are absent or null. Raises :class:`EtkvError` for
        settings that are not a mapping.
        """
        value = values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(f"{name} is {value!r}, expected a mapping")
        return value or {}

    def names(self, name: str, values: Mapping[str, Any]) -> Sequence[str]:
        """Return the list ``name`` in ``values``, as :meth:`mapping` does. Raises :class:`EtkvError` unless it contains
        only texts.
        """
        value = values.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.refuse(f"{name} is {value!r}, expected a list of names")
        return value or ()

    def block(self, name: str, value: Any) -> tuple[int, int]:
        """Return the rows and the columns of a block of weights that share a scale. Raises :class:`EtkvError` unless
        ``value`` is a list of two numbers above 0.
        """
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(type(size) is int and size > 0 for size in value):
            raise self.refuse(f"{name} is {value!r}, expected two numbers: rows and columns")
        return value[0], value[1]

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


def is_one_of(value: Any, known: Iterable[Any]) -> bool:
    """Return whether ``value`` is equal to one of ``known`` and of its type: neither 4.0 nor "4" is the integer 4."""
    return any(type(value) is type(each) and value == each for each in known)


FLOATS = ("float32", "float16", "bfloat16")
"""The dtypes of scales."""
