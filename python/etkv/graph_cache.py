"""The cache that a program keeps in its graph, instead of in a session."""

from __future__ import annotations

from etkv import _capi
from etkv.errors import EtkvError, PositionError


class GraphCache:
    """A cache of one text in buffers of a program, found as :attr:`Program.cache`.

    It cannot rewind. Steps of the program extend it, and :meth:`clear` empties it.
    """

    def __init__(self, buffers: str, capacity: int) -> None:
        self._buffers = _capi.ffi.new("char[]", buffers.encode())
        self._length = 0
        self.capacity = capacity
        """Maximum number of positions: the context that the program was exported for."""
        self.clear()

    @property
    def length(self) -> int:
        """The present number of positions, which is also the next position."""
        return self._length

    def can_extend(self, n: int = 1) -> bool:
        """Return whether ``n`` more positions fit."""
        return self._length + n <= self.capacity

    def rewindable_to(self) -> int:
        """Return the smallest length above 0 that :meth:`rewind` accepts: the present length."""
        return self._length

    def rewind(self, length: int) -> None:
        """Clear the cache if ``length`` is 0. Raises :class:`PositionError` if it is neither 0 nor the present
        length.
        """
        if length == 0:
            self.clear()
        elif length != self._length:
            raise PositionError(
                f"length is {length}, and the cache in the program's graph holds {self._length} positions and cannot "
                "rewind; clear it, or load a program with an off-graph cache"
            )

    def reachable(self, position: int) -> int:
        """Return the present length if ``position`` is not below it, else 0."""
        return self._length if position >= self._length else 0

    def rewind_to_reachable(self, length: int) -> int:
        """Clear the cache unless ``length`` is the present length. Return the length after that."""
        if length < self._length:
            self.clear()
        return self._length

    def clear(self) -> None:
        """Remove every position. Raises :class:`EtkvError` if the program is closed, or if it has no such buffers."""
        try:
            _capi.call("etkv_delegate_reset_buffers", self._buffers)
        except EtkvError:
            raise
        except BaseException:
            # If an interrupt came between these lines, the cache would have the old length and rows of zeros.
            _capi.call("etkv_delegate_reset_buffers", self._buffers)
            self._length = 0
            raise
        self._length = 0

    def ran_to(self, length: int) -> None:
        """Record that a step of the program has extended the cache to ``length`` positions."""
        self._length = length

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._length} of {self.capacity} positions in the program's graph>"
