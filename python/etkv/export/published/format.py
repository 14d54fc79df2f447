"""The base class of quantization methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from etkv.export.published.settings import Settings
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Weight


def replaced(name: str, parts: Iterable[str]) -> tuple[str, str] | None:
    """Return the weight to which the tensor ``name`` belongs as one of ``parts``, and the part; None for others."""
    for part in parts:
        if name.endswith(f".{part}"):
            return f"{name.removesuffix(part)}weight", part
    return None


def beside(name: str, tensors: Mapping[str, Stored], parts: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the weight in ``tensors`` that the tensor ``name`` accompanies, and the name of the part; None if
    ``name`` accompanies no weight.

    ``parts`` maps suffixes of names to names of parts.
    """
    for end, part in parts.items():
        weight = f"{name.removesuffix(end)}.weight"
        if name.endswith(end) and weight in tensors:
            return weight, part
    return None


class Format(ABC):
    """A quantization method with the settings of a folder."""

    activations: str | None = None
    """A description of how the publisher's runtimes round activations; ``None`` if they do not."""

    def __init__(self, settings: Settings) -> None:
        """Raise :class:`EtkvError` for unsupported settings."""
        self._settings = settings

    @abstractmethod
    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:
        """Return the name of the weight to which the tensor ``name`` belongs, and the part; None for other tensors."""

    def weights(self, name: str, parts: Mapping[str, Stored]) -> dict[str, Weight]:
        """Return the weights in the ``parts`` of the stored weight ``name``, by their names in the model.

        Raises :class:`EtkvError` as :meth:`weight`.
        """
        return {name: self.weight(name, parts)}

    @abstractmethod
    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        """Return the weight ``name`` from its parts. A tensor with the weight's own name is the part ``weight``.

        Raises :class:`EtkvError` if the parts contradict each other or the settings.
        """
