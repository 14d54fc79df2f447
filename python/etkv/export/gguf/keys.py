"""The metadata of a GGUF file as typed values, with a record of which keys were read."""

from __future__ import annotations

import math
from typing import Any

from etkv.errors import EtkvError
from etkv.export.gguf.file import GgufFile

_DESCRIPTIVE = ("general.", "quantize.imatrix.", "imatrix.", "mradermacher.", "split.", "tokenizer.")
"""Prefixes of keys that do not affect the model's computation, such as the origin of the file.

Other modules check ``split.`` when files are opened, and ``tokenizer.`` when the tokenizer is read."""

_WITHOUT_EFFECT = ("tensor_data_layout", "rope.scaling.finetuned")
"""Keys of an architecture that describe the origin of the weights. No computation reads them."""


class Keys:
    """Reads the keys of a file's architecture. Names are without the architecture, as in ``attention.head_count``."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."
        self._read: set[str] = set()
        self._tensors_read: set[str] = set()

    def key(self, name: str) -> str:
        """Return the key of ``name`` with the architecture, for messages."""
        return self._prefix + name

    def refuse(self, name: str, reason: str) -> EtkvError:
        """Return the error for an unsupported value of ``name``."""
        return EtkvError(f"{self.file.path} has {self.key(name)} = {_shown(self._get(name))}, {reason}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 0. If the file has a list for all layers, its numbers must be equal.

        Raises :class:`EtkvError` for another value, and for an absent key without a ``default``.
        """
        value = self._shared(name, self._required(name, default))
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(name, "expected an integer of at least 0")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1, as :meth:`integer` does."""
        value = self.integer(name, default)
        if value == 0:
            raise self.refuse(name, "expected a number above 0")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a finite number. Raises :class:`EtkvError` as :meth:`integer` does."""
        value = self._shared(name, self._required(name, default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refuse(name, "expected a finite number")
        return float(value)

    def positive_real(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0. Raises :class:`EtkvError` as :meth:`integer` does."""
        value = self.real(name, default)
        if value <= 0:
            raise self.refuse(name, "expected a number above 0")
        return value

    def epsilon(self, name: str) -> float:
        """Return the number that a norm adds, at least 0. Raises :class:`EtkvError` as :meth:`integer` does."""
        value = self.real(name)
        if value < 0:
            raise self.refuse(name, "expected a number of at least 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean. Raises :class:`EtkvError` for another value."""
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "expected true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a text. Raises :class:`EtkvError` for another value."""
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, "expected a text")
        return value

    def flags_or_integer(self, name: str, default: int) -> int | list[bool]:
        """Return an integer, or a list with a boolean for each layer. Raises :class:`EtkvError` otherwise."""
        value = self._required(name, default)
        if isinstance(value, list) and all(isinstance(item, bool | int) for item in value):
            return [bool(item) for item in value]
        return self.integer(name, default)

    def of_layers(self, name: str, layers: int, default: int | None = None) -> list[int]:
        """Return an integer for each of the first ``layers``. A file may have one integer for all layers.

        Raises :class:`EtkvError` as :meth:`integer` does, and for a list that is too short.
        """
        value = self._required(name, default)
        if not isinstance(value, list):
            return [self.integer(name, default)] * layers
        if len(value) < layers or any(
            isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in value
        ):
            raise self.refuse(name, f"expected integers of at least 0, one for each of {layers} layers")
        return value[:layers]

    def reals_of_layers(self, name: str, layers: int, *, least: float | None = None) -> list[float]:
        """Return a number for each of the first ``layers``. A file may have one number for all layers. A number is
        finite, or equals ``least``.

        Raises :class:`EtkvError` as :meth:`real` does, and for a list that is too short.
        """
        value = self._required(name, None)
        if not isinstance(value, list):
            return [self.real(name)] * layers
        known = [isinstance(item, float) and (math.isfinite(item) or item == least) for item in value]
        if len(value) < layers or not all(known):
            raise self.refuse(name, f"expected finite numbers, one for each of {layers} layers")
        return value[:layers]

    def has(self, name: str) -> bool:
        """Return whether the file has the key ``name``. This does not mark the key as read."""
        return self._get(name) is not None

    def was_read(self, name: str) -> bool:
        """Return whether the key ``name`` is marked as read."""
        return self.key(name) in self._read

    def only(self, name: str, *allowed: float | bool | str, reason: str) -> None:
        """Read a key that must be absent or have one of the values ``allowed``. Other values are not supported.

        Numbers are compared up to the rounding of float32. Raises :class:`EtkvError` with ``reason`` for other values.
        """
        self._read.add(self.key(name))
        value = self._get(name)
        if value is None:
            return
        value = self._shared(name, value)
        if any(_same(value, item) for item in allowed):
            return
        raise self.refuse(name, reason)

    def skip(self, *names: str) -> None:
        """Mark ``names``, which have no effect, as read."""
        self._read.update(self.key(name) for name in names)

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has the tensor ``name``."""
        return name in self.file.tensors

    def vector(self, name: str, length: int) -> list[float] | None:
        """Return a settings tensor of ``length`` numbers; ``None`` if the file has no tensor ``name``.

        Raises :class:`EtkvError` for another shape, and for values that are not finite or not above 0.
        """
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        self._tensors_read.add(name)
        if tensor.shape != (length,):
            raise EtkvError(f"tensor {name} of {self.file.path} has shape {list(tensor.shape)}, expected [{length}]")
        values = [float(value) for value in tensor.read()]
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise EtkvError(f"tensor {name} of {self.file.path} has a value that is not a finite number above 0")
        return values

    def check_all_read(self, settings: tuple[str, ...]) -> None:
        """Raise :class:`EtkvError` if a key, or a tensor of ``settings``, was not read."""
        allowed = {self.key(name) for name in _WITHOUT_EFFECT}
        for key, value in self.file.values.items():
            if key in self._read or key in allowed or key.startswith(_DESCRIPTIVE):
                continue
            raise EtkvError(
                f"{self.file.path} has {key} = {_shown(value)}, which the exporter does not support for architecture "
                f"{self.file.architecture!r}; export the model's Hugging Face folder instead"
            )
        for name in settings:
            if name in self.file.tensors and name not in self._tensors_read:
                raise EtkvError(
                    f"{self.file.path} has tensor {name}, which the exporter does not support for architecture "
                    f"{self.file.architecture!r}; export the model's Hugging Face folder instead"
                )

    def _get(self, name: str) -> Any:
        return self.file.values.get(self.key(name))

    def _required(self, name: str, default: Any) -> Any:
        self._read.add(self.key(name))
        value = self._get(name)
        if value is not None:
            return value
        if default is None:
            raise EtkvError(f"{self.file.path} lacks {self.key(name)}")
        return default

    def _shared(self, name: str, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if not value or any(item != value[0] for item in value):
            raise self.refuse(name, "which differs between layers; the exporter supports one value for all layers")
        return value[0]


def _same(value: Any, allowed: float | bool | str) -> bool:
    """Return whether a file's ``value`` is ``allowed``, up to the rounding of float32."""
    if isinstance(value, bool | str) or isinstance(allowed, bool | str):
        return type(value) is type(allowed) and bool(value == allowed)
    return isinstance(value, int | float) and math.isclose(value, allowed, rel_tol=1e-6)


def _shown(value: Any) -> str:
    """Return ``value`` for a message, truncated if it is long."""
    text = repr(value) if not isinstance(value, list) else f"{value[:4]!r}"[:-1] + (", …]" if len(value) > 4 else "]")
    return text if len(text) <= 60 else text[:57] + "…"
