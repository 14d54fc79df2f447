"""One growing sequence."""

from __future__ import annotations

from etkv.config import CacheConfig
from etkv.errors import Status, status_error
from etkv.reference.cache import ReferenceCache, Step, refuse_empty
from etkv.reference.errors import integer

ONLY = 0
"""The number of the only sequence."""


class ContiguousCache(ReferenceCache):
    """One sequence. A step at its length appends. A step below its length first rewinds to its start."""

    kind = "contiguous"

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._tokens: list[int] = []
        """The token at each position."""

    @property
    def length(self) -> int:
        return len(self._tokens)

    def rewindable_to(self) -> int:
        return self._exact_from(ONLY, range(self.length))

    def rewind(self, length: int) -> None:
        """Removes the positions from ``length`` on.

        Raises :class:`StatusError` with ``POSITION`` if there are fewer positions, or if windows have dropped some that
        a query there sees.
        """
        self._refuse_in_step("rewind the cache")
        length = integer("length", length)
        if not 0 <= length <= self.length:
            raise status_error(
                Status.POSITION, f"cannot rewind to length {length}: the sequence has {self.length} positions"
            )
        self._check_rewind(length)
        self._cut(length)
        self._settle()

    def _plan(self, positions: list[int]) -> Step:
        refuse_empty(positions)
        start, end = positions[0], positions[0] + len(positions)
        if start < 0:
            raise status_error(Status.POSITION, f"position {start} is negative")
        if start > self.length:
            raise status_error(Status.POSITION, f"position {start} leaves a gap: the next is {self.length}")
        for offset, (position, expected) in enumerate(zip(positions, range(start, end), strict=True)):
            if position != expected:
                raise status_error(
                    Status.POSITION,
                    f"expected position {expected} for token {offset} of the step, got {position}: the positions "
                    "of one sequence are consecutive",
                )
        if end > self.capacity:
            raise status_error(
                Status.CAPACITY,
                f"{len(positions)} tokens from position {start} on need {end} positions, the capacity is "
                f"{self.capacity}; rewind, or make a larger cache",
            )
        if start < self.length:
            self._check_rewind(start)
        self._check_count(len(positions))
        self._check_floats(len(positions), end)

        tokens, history = self._new_tokens(len(positions)), self._tokens[:start]
        seen = [{*history, *tokens}] * len(tokens)

        def commit() -> None:
            self._cut(start)
            self._tokens += tokens
            for group in self._groups.values():
                group.append(ONLY, positions)
                group.trim(ONLY, end)

        return Step(positions, tokens, history, seen, commit)

    def _check_rewind(self, length: int) -> None:
        least = self.rewindable_to()
        if 0 != length < least:
            raise status_error(
                Status.POSITION,
                f"cannot rewind to length {length}: the window layers have dropped what a query there sees; rewind to "
                f"0, or to {least} or more",
            )

    def _cut(self, length: int) -> None:
        del self._tokens[length:]
        for group in self._groups.values():
            group.keep(ONLY, range(length))

    def _held(self) -> list[int]:
        return self._tokens

    def _forget_all(self) -> None:
        self._tokens.clear()
