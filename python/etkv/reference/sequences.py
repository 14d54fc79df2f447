"""Many sequences that share tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from etkv.config import CacheConfig
from etkv.errors import Status, status_error
from etkv.reference.cache import ReferenceCache, Step, refuse_empty
from etkv.reference.errors import integer, invalid

MAX_SEQUENCES = 256
"""The most sequences. Their numbers begin at 0."""

Members = tuple[int, ...]
"""The sequences that a token belongs to."""


class SeqCache(ReferenceCache):
    """Up to 256 sequences. They need no creation: a sequence without positions is empty.

    A sequence is a dictionary from positions to tokens. A fork copies the dictionary. Both then hold the same tokens,
    and each token counts once.
    """

    kind = "seq"
    shares_rows = True

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._sequences: dict[int, dict[int, int]] = {}
        """Sequence that holds tokens -> position -> token."""
        self._declared: list[Members] | None = None
        """The sequences of the next step's tokens, if they are declared."""

    # ---- Queries of a runner ---------------------------------------------

    @property
    def length(self) -> int:
        return len(self._held())

    def seq_len(self, sequence: int) -> int:
        """Returns the number of positions that a sequence holds."""
        return len(self._tokens(self._number(sequence)))

    def seq_next(self, sequence: int) -> int:
        """Returns the position of a sequence's next token: one past its last.

        After a removal at the front it is more than the number of positions.
        """
        return self._next(self._number(sequence))

    def seq_positions(self, sequence: int) -> list[range]:
        """Returns the positions that a sequence holds, as ranges in order."""
        ranges: list[range] = []
        for position in sorted(self._tokens(self._number(sequence))):
            begin = ranges.pop().start if ranges and ranges[-1].stop == position else position
            ranges.append(range(begin, position + 1))
        return ranges

    def sequences(self) -> list[int]:
        """Returns the numbers of the sequences that hold tokens, in order."""
        return sorted(self._sequences)

    def seq_rewindable_to(self, sequence: int) -> int:
        """Returns the least length other than 0 that a sequence can be rewound to.

        The sequence holds the position before that length, and every layer holds all positions that a query there sees.
        """
        positions = self._tokens(self._number(sequence))
        least = self._exact_from(sequence, list(positions))
        if least == 0 and 0 in positions:
            return 0
        return min((position + 1 for position in positions if position + 1 >= least), default=0)

    def rewindable_to(self) -> int:
        return self.seq_rewindable_to(self._only_sequence("seq_rewindable_to is for one of them"))

    # ---- Changes by a runner ---------------------------------------------

    def begin_step(self, sequences: Sequence[int]) -> None:
        """Declares the sequence of each token of the next step. The default is the only sequence.

        The declaration holds until a step commits or another declaration replaces it.
        """
        self._declare([(sequence,) for sequence in sequences])

    def begin_step_shared(self, sequences: Sequence[Iterable[int]]) -> None:
        """Declares the sequences of each token of the next step, which may be several."""
        self._declare([tuple(members) for members in sequences])

    def cancel_step(self) -> None:
        """Removes the declaration of ``begin_step`` or ``begin_step_shared``, if the declared step is not run."""
        self._refuse_in_step("cancel the declaration of the next")
        self._declared = None

    def seq_cp(self, source: int, target: int, begin: int = 0, end: int | None = None) -> None:
        """Makes ``target`` share the positions of ``source`` from ``begin`` up to ``end``.

        Raises :class:`StatusError` with ``POSITION`` if ``target`` holds other tokens at some of these positions, or if
        layers with windows have dropped positions that its next query would see.
        """
        self._refuse_in_step("copy a sequence")
        source, target = self._number(source), self._number(target)
        begin, end = _range(begin, end)
        self._refuse_under_tree(target, "copy onto it")
        known = self._tokens(target)
        copied = {at: token for at, token in self._tokens(source).items() if begin <= at < end}
        if source == target or not copied:
            return
        for position, token in sorted(copied.items()):
            if known.get(position, token) != token:
                raise status_error(
                    Status.POSITION,
                    f"sequences {source} and {target} hold different tokens at position {position}; remove it from "
                    f"sequence {target} first",
                )
        following = max(self._next(target), max(copied) + 1)
        least = max(self._exact_from(target, list(known)), self._exact_from(source, list(copied)))
        if following < least:
            raise status_error(
                Status.POSITION,
                f"sequence {target} would go on at {following}, but the window layers have dropped what a query there "
                f"sees; it can go on at {least} or later",
            )
        self._sequences[target] = {**known, **copied}
        for group in self._groups.values():
            group.copy(source, target, begin, end)

    def seq_rm(self, sequence: int, begin: int = 0, end: int | None = None) -> None:
        """Removes the positions from ``begin`` up to ``end`` from a sequence. An empty sequence begins at 0 again.

        Raises :class:`StatusError` with ``POSITION`` if it would go on below :meth:`seq_rewindable_to`.
        """
        self._refuse_in_step("remove from a sequence")
        sequence = self._number(sequence)
        begin, end = _range(begin, end)
        before = self._tokens(sequence)
        left = {at: token for at, token in before.items() if not begin <= at < end}
        if left:
            self._refuse_under_tree(sequence, "remove a part of it")
            following, least = max(left) + 1, self._exact_from(sequence, list(before))
            if following < least and following < self._next(sequence):
                raise status_error(
                    Status.POSITION,
                    f"sequence {sequence} would go on at {following}, but the window layers have dropped what a query "
                    f"there sees; it can go on at {least} or later",
                )
        elif before or begin <= 0 < end:
            self._drop_tree(sequence)
        self._sequences[sequence] = left
        self._settle()

    def seq_keep(self, sequence: int) -> None:
        """Removes every sequence but one."""
        self._refuse_in_step("remove sequences")
        sequence = self._number(sequence)
        for other in self.sequences():
            if other != sequence:
                self.seq_rm(other)

    def rewind(self, length: int) -> None:
        """Removes the positions from ``length`` on, of the only sequence; 0 removes all of them.

        Raises :class:`StatusError` with ``INVALID_ARGUMENT`` if there are several sequences, and with ``POSITION`` for
        a length at which the sequence cannot go on.
        """
        self._refuse_in_step("rewind the cache")
        length = integer("length", length)
        sequence = self._only_sequence("seq_rm shortens one of them")
        if not 0 <= length <= self._next(sequence):
            raise status_error(
                Status.POSITION,
                f"cannot rewind to length {length}: the sequence goes on at position {self._next(sequence)}",
            )
        # Otherwise the sequence would go on at another position than `length`.
        if length > 0 and length - 1 not in self._tokens(sequence):
            raise status_error(
                Status.POSITION,
                f"cannot rewind to length {length}: position {length - 1} was removed; "
                f"{self.seq_rewindable_to(sequence)} is the least length, and 0 removes all",
            )
        self.seq_rm(sequence, length)

    def compact(self) -> None:
        """Does nothing: the reference has no cells."""
        self._refuse_in_step("compact the cache")

    # ---- A step ----------------------------------------------------------

    def _plan(self, positions: list[int]) -> Step:
        self._check_floats(len(positions), self.length + len(positions))
        owners = self._owners(len(positions))
        refuse_empty(positions)
        if len(owners) != len(positions):
            raise invalid(f"the step has {len(positions)} tokens, but begin_step declared {len(owners)}")
        for token, (position, members) in enumerate(zip(positions, owners, strict=True)):
            for sequence in members:
                expected = self._expected(owners, token, sequence)
                if position != expected:
                    raise status_error(
                        Status.POSITION,
                        f"expected position {expected} for token {token} of the step, the next of sequence {sequence}, "
                        f"got {position}",
                    )
        for sequence in dict.fromkeys(member for members in owners for member in members):
            self._check_tokens(sequence, sum(sequence in members for members in owners))
        free = self.capacity - self.length
        if len(positions) > free:
            raise status_error(
                Status.CAPACITY,
                f"a step of {len(positions)} tokens does not fit: {free} of {self.capacity} cells are free",
            )
        tokens = self._new_tokens(len(positions))
        seen = [
            set().union(*(self._seen(owners, tokens, query, sequence) for sequence in members))
            for query, members in enumerate(owners)
        ]

        def commit() -> None:
            for position, members, token in zip(positions, owners, tokens, strict=True):
                for sequence in members:
                    self._append(sequence, position, token)
            self._end_step(owners)

        return Step(positions, tokens, self._held(), seen, commit)

    def _owners(self, n_tokens: int) -> list[Members]:
        """Returns the sequences of the next step's tokens."""
        if self._declared is not None:
            return self._declared
        return [(self._only_sequence("begin_step names those of a step"),)] * n_tokens

    def _expected(self, owners: list[Members], token: int, sequence: int) -> int:
        """Returns the position that a token of a step must have for one of its sequences."""
        return self._next(sequence) + _before(owners, token, sequence)

    def _check_tokens(self, sequence: int, n_tokens: int) -> None:
        """Checks the number of tokens of a sequence in one step."""
        self._check_count(n_tokens)

    def _seen(self, owners: list[Members], tokens: list[int], query: int, sequence: int) -> set[int]:
        """Returns the tokens of a sequence that are the text of a query of a step."""
        fresh = (token for token, members in zip(tokens, owners, strict=True) if sequence in members)
        return {*self._tokens(sequence).values(), *fresh}

    def _append(self, sequence: int, position: int, token: int) -> None:
        """Adds a token of a finished step to a sequence."""
        self._sequences.setdefault(sequence, {})[position] = token
        for group in self._groups.values():
            group.append(sequence, [position])

    def _end_step(self, owners: list[Members]) -> None:
        self._declared = None
        for sequence in {member for members in owners for member in members}:
            self._trim(sequence)

    def _trim(self, sequence: int) -> None:
        for group in self._groups.values():
            group.trim(sequence, self._next(sequence))

    # ---- Inside ----------------------------------------------------------

    def _declare(self, owners: list[Members]) -> None:
        self._refuse_in_step("declare the sequences of the next")
        if not owners:
            raise invalid("expected the sequences of at least 1 token, got none")
        for token, members in enumerate(owners):
            if not members:
                raise invalid(f"token {token} of the step belongs to no sequence; name one")
            for sequence in members:
                self._number(sequence)
                if members.count(sequence) > 1:
                    raise invalid(f"token {token} of the step belongs to sequence {sequence} twice")
        self._declared = owners

    def _number(self, sequence: int) -> int:
        if not 0 <= integer("a sequence", sequence) < MAX_SEQUENCES:
            raise invalid(f"expected a sequence from 0 to {MAX_SEQUENCES - 1}, got {sequence}")
        return sequence

    def _tokens(self, sequence: int) -> dict[int, int]:
        return self._sequences.get(sequence, {})

    def _next(self, sequence: int) -> int:
        return max(self._tokens(sequence), default=-1) + 1

    def _only_sequence(self, otherwise: str) -> int:
        live = self.sequences()
        if len(live) > 1:
            raise invalid(f"the cache holds {len(live)} sequences; {otherwise}")
        return live[0] if live else 0

    def _held(self) -> list[int]:
        return sorted({token for tokens in self._sequences.values() for token in tokens.values()})

    def _settle(self) -> None:
        self._sequences = {number: tokens for number, tokens in self._sequences.items() if tokens}
        for group in self._groups.values():
            for number in list(group.held):
                group.keep(number, self._tokens(number))
        super()._settle()

    def _forget_all(self) -> None:
        self._sequences.clear()
        self._declared = None

    def _refuse_under_tree(self, sequence: int, what: str) -> None:
        """Raises :class:`StatusError` if the sequence carries a tree. Sequences of this kind carry none."""

    def _drop_tree(self, sequence: int) -> None:
        """Removes the tree of a sequence. Sequences of this kind carry none."""


def _before(owners: list[Members], token: int, sequence: int) -> int:
    """Returns the number of tokens of ``sequence`` in a step before the token ``token``."""
    return sum(sequence in members for members in owners[:token])


def _range(begin: int, end: int | None) -> tuple[int, int]:
    """Returns a range of positions. ``end`` None means all that follow.

    Raises :class:`StatusError` with ``INVALID_ARGUMENT`` for a negative begin, or an end before it.
    """
    begin = integer("begin", begin)
    last = 2**31 - 1 if end is None else integer("end", end)
    if begin < 0 or last < begin:
        raise invalid(f"expected a range of positions that starts at 0 or later, got {begin} to {last}")
    return begin, last
