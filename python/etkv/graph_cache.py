"""The cache that a program keeps in its graph, instead of in a session."""

from __future__ import annotations

from etkv import _capi
from etkv.errors import EtkvError, PositionError


class GraphCache:
    """The positions of one text, in buffers of a program. :attr:`Program.cache` of such a program has one.

    It cannot rewind: apart from steps of the program, which extend it, only :meth:`clear` changes it.
    """

    def __init__(self, buffers: str, capacity: int) -> None:
        self._buffers = _capi.ffi.new("char[]", buffers.encode())
        self._length = 0
        self.capacity = capacity
        """The most positions that it holds: those that the program was exported for."""
        self.clear()

    @property
    def length(self) -> int:
        """The number of positions that it holds now: the position after the last one that ran."""
        return self._length

    def can_extend(self, n: int = 1) -> bool:
        """Return whether ``n`` more positions fit."""
        return self._length + n <= self.capacity

    def rewindable_to(self) -> int:
        """Return the least length, apart from 0, that :meth:`rewind` accepts now: the length."""
        return self._length

    def rewind(self, length: int) -> None:
        """Clear it if ``length`` is 0. Raises :class:`PositionError` for another length than the present one."""
        if length == 0:
            self.clear()
        elif length != self._length:
            raise PositionError(
                f"length is {length}, and the cache in the program's graph holds {self._length} positions and cannot "
                "rewind; clear it, or load a program with an off-graph cache"
            )

    def clear(self) -> None:
        """Remove every position. Raises :class:`EtkvError` if the program is closed, or if it keeps no buffers."""
        try:
            _capi.call("etkv_delegate_reset_buffers", self._buffers)
        except EtkvError:
            raise
        except BaseException:
            # Interrupted, and perhaps after they were reset: with the old length it would be a cache of zeros.
            _capi.call("etkv_delegate_reset_buffers", self._buffers)
            self._length = 0
            raise
        self._length = 0

    def ran_to(self, length: int) -> None:
        """Note that a step of the program has extended it to ``length`` positions."""
        self._length = length

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._length} of {self.capacity} positions in the program's graph>"
