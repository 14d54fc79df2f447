"""What a method of quantization has to know of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from etkv.export.published.settings import Settings
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Weight


def replaced(name: str, parts: Iterable[str]) -> tuple[str, str] | None:
    """Return the weight that files have as ``parts`` in its place, if ``name`` is one of them, and the part."""
    for part in parts:
        if name.endswith(f".{part}"):
            return f"{name.removesuffix(part)}weight", part
    return None


def beside(name: str, tensors: Mapping[str, Stored], parts: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the weight of ``tensors`` that ``name`` is beside, and the part's name; None for other tensors.

    ``parts`` has the ends of names.
    """
    for end, part in parts.items():
        weight = f"{name.removesuffix(end)}.weight"
        if name.endswith(end) and weight in tensors:
            return weight, part
    return None


class Format(ABC):
    """A method of quantization, with the settings of a folder."""

    activations: str | None = None
    """How the publisher's runtimes round activations; ``None`` if they do not."""

    def __init__(self, settings: Settings) -> None:
        """Raise :class:`EtkvError` for settings that are not known."""
        self._settings = settings

    @abstractmethod
    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:
        """Return the weight of which ``name`` is a part, and the part's name; None for other tensors."""

    @abstractmethod
    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        """Return the weight ``name``, with the part ``weight`` if the files have a tensor of its name.

        Raises :class:`EtkvError` if its parts contradict each other or the settings.
        """
