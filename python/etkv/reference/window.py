"""Sliding windows: the positions that a query sees, and the positions that the native caches drop.

The reference itself drops no rows. It tracks the positions that a native cache holds for one reason: a sequence cannot
be rewound to a length where a query would see dropped positions, and both raise the same error for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sight:
    """The positions of a sequence that the queries of a layer see."""

    window: int = 0
    """The number of positions, including the query's own; 0 for all."""
    sinks: int = 0
    """The number of first positions that are also seen."""

    def sees(self, query: int, position: int) -> bool:
        """Returns whether a query at position ``query`` sees ``position`` of its own sequence."""
        if position > query:
            return False
        return not self.window or position > query - self.window or position < self.sinks


@dataclass
class WindowLayerGroup:
    """The positions that the layers of one window hold of each sequence in a native cache.

    Rows are appended until another step of ``max_step_tokens`` tokens may not fit. Sinks then stay, and so do the
    windows of the next query and of a query ``max_step_tokens`` positions before, so that a step of any legal size can
    be rolled back. All other positions are dropped.
    """

    sight: Sight
    max_step_tokens: int
    """The most tokens of one sequence in a step."""
    capacity: int
    held: dict[int, set[int]] = field(default_factory=dict)
    """The positions of each sequence."""

    def __post_init__(self) -> None:
        step, window = min(self.max_step_tokens, self.capacity), self.sight.window
        self.max_step_tokens = step
        self.slots = min(self.sight.sinks + window - 1 + 2 * step + max(step, window // 4), self.capacity)

    @property
    def drops(self) -> bool:
        """Returns whether a sequence can be longer than the slots."""
        return self.slots < self.capacity

    def append(self, sequence: int, positions: Iterable[int]) -> None:
        self.held.setdefault(sequence, set()).update(positions)

    def keep(self, sequence: int, positions: Iterable[int]) -> None:
        """Removes the positions of a sequence that are not among ``positions``."""
        self.held[sequence] = self.held.get(sequence, set()) & set(positions)

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        self.append(target, {position for position in self.held.get(source, set()) if begin <= position < end})

    def trim(self, sequence: int, following: int) -> None:
        """Drops positions after a step of a sequence whose next position is ``following``."""
        held = self.held.get(sequence, set())
        if self.drops and len(held) > self.slots - self.max_step_tokens:
            first_needed = following - (self.sight.window - 1) - self.max_step_tokens
            self.held[sequence] = {at for at in held if at < self.sight.sinks or at >= first_needed}

    def exact_from(self, sequence: int, positions: Iterable[int]) -> int:
        """Returns the least position at which a query sees no dropped position of ``positions``."""
        held = self.held.get(sequence, set())
        gone = [at for at in positions if at >= self.sight.sinks and at not in held]
        return max(gone) + self.sight.window if gone else 0

    def clear(self) -> None:
        self.held.clear()
