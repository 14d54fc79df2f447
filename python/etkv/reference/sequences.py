"""A cache of several sequences that share tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from etkv.errors import PositionError, StepError
from etkv.reference.cache import Members, ReferenceCache, Step
from etkv.reference.errors import integer, invalid
from etkv.reference.tokens import TokenSequence

MAX_SEQUENCES = 256  # numbered from 0


class SeqCache(ReferenceCache):
    """Up to 256 sequences. They need no creation: a sequence without positions is empty.

    A fork shares the tokens of its source, and each token counts once.
    """

    kind = "seq"
    max_sequences = MAX_SEQUENCES

    def seq_len(self, sequence: int) -> int:
        """Returns the number of positions that a sequence holds."""
        return len(self._sequence(sequence).tokens)

    def seq_next(self, sequence: int) -> int:
        """Returns the position of a sequence's next token: one more than the position of its last token."""
        return self._sequence(sequence).following

    def seq_positions(self, sequence: int) -> list[range]:
        """Returns the positions that a sequence holds, as ranges in order."""
        ranges: list[range] = []
        for position in self._sequence(sequence).tokens:
            begin = ranges.pop().start if ranges and ranges[-1].stop == position else position
            ranges.append(range(begin, position + 1))
        return ranges

    def sequences(self) -> list[int]:
        """Returns the numbers of the sequences that hold tokens or carry a tree, in order."""
        return [number for number, one in enumerate(self._sequences) if one.tokens or one.tree.parents]

    def seq_rewindable_to(self, sequence: int) -> int:
        """Returns the smallest length other than 0 that a sequence can be rewound to.

        At this length, the sequence holds the last position, and every layer holds all positions that the next query
        sees.
        """
        one = self._sequence(sequence)
        if one.exact_from == 0 and 0 in one.tokens:
            return 0
        return min((at + 1 for at in one.tokens if at + 1 >= one.exact_from), default=0)

    def rewindable_to(self) -> int:
        return self.seq_rewindable_to(self._only_sequence("call seq_rewindable_to for one of them"))

    def begin_step(self, sequences: Sequence[int]) -> None:
        """Declares the sequence of each token of the next step. Undeclared tokens belong to the only sequence.

        The declaration holds until a step commits or another declaration replaces it.
        """
        self.begin_step_shared([(sequence,) for sequence in sequences])

    def begin_step_shared(self, sequences: Sequence[Iterable[int]]) -> None:
        """Declares the sequences of each token of the next step. A token may belong to several sequences."""
        self._refuse_in_step("declare the sequences of the next")
        owners = [tuple(integer("a sequence", number) for number in members) for members in sequences]
        if not owners:
            raise invalid("expected the sequences of at least 1 token, got none")
        for token, members in enumerate(owners):
            if not members:
                raise invalid(f"token {token} of the step belongs to no sequence; name one")
            for sequence in members:
                self._sequence(sequence)
                if members.count(sequence) > 1:
                    raise invalid(f"token {token} of the step belongs to sequence {sequence} twice")
        self._declared = owners

    def cancel_step(self) -> None:
        """Removes the declaration of ``begin_step`` or ``begin_step_shared``, for a step that will not run."""
        self._refuse_in_step("cancel the declaration of the next")
        self._declared = None

    def seq_cp(self, source: int, target: int, begin: int = 0, end: int | None = None) -> None:
        """Makes ``target`` share the positions of ``source`` from ``begin`` up to ``end``."""
        self._refuse_in_step("copy a sequence")
        copied, onto = self._sequence(source).part(_span(begin, end)), self._sequence(target)
        self._refuse_tree(target, "copy onto it")
        if source == target or not copied.tokens:
            return
        for at, token in copied.tokens.items():
            if onto.tokens.get(at, token) is not token:
                raise PositionError(f"sequences {source} and {target} hold different tokens at position {at}")
        self._check_exact(max(onto.following, copied.following), onto, copied)
        onto.tokens = dict(sorted({**onto.tokens, **copied.tokens}.items()))
        for window, held in copied.held.items():
            onto.held[window] |= held

    def seq_rm(self, sequence: int, begin: int = 0, end: int | None = None) -> None:
        """Removes the positions from ``begin`` up to ``end`` from a sequence. An empty sequence begins at 0 again."""
        self._refuse_in_step("remove from a sequence")
        before, span = self._sequence(sequence), _span(begin, end)
        left = before.part({at for at in before.tokens if at not in span})
        if left.tokens:
            self._refuse_tree(sequence, "remove a part of it")
            self._check_exact(left.following, before)
        elif before.tokens or 0 in span:
            left = self._empty()
        self._sequences[sequence] = left

    def seq_keep(self, sequence: int) -> None:
        """Removes every sequence but one."""
        self._refuse_in_step("remove sequences")
        kept = self._sequence(sequence)
        self._sequences = [one if one is kept else self._empty() for one in self._sequences]

    def rewind(self, length: int) -> None:
        self._refuse_in_step("rewind the cache")
        only = self._only_sequence("call seq_rm to shorten one of them")
        if integer("length", length) != 0 and length - 1 not in self._sequences[only].tokens:
            possible = f"0, or {self.seq_rewindable_to(only)} to {self.seq_next(only)}"
            raise PositionError(f"cannot rewind to length {length}: position {length - 1} is not held; use {possible}")
        self.seq_rm(only, length)

    def compact(self) -> None:
        """Does nothing: the reference has no cells."""
        self._refuse_in_step("compact the cache")

    def _plan(self, positions: list[int]) -> Step:
        self._check_floats(self.length + len(positions))
        owners = self._owners(len(positions))
        numbers = dict.fromkeys(number for members in owners for number in members)
        copies = {number: self._sequences[number].part(self._sequences[number].tokens) for number in numbers}
        step = self._step_of(positions, owners, copies)
        for number, copied in copies.items():
            if missing := copied.tree.n_pending:
                raise invalid(f"expected all candidates of sequence {number} in the step, {missing} are missing")
            self._check_count(sum(number in members for members in owners))
        self._check_room(step)
        return step

    def _owners(self, n_tokens: int) -> list[Members]:
        """Returns the sequences of the next step's tokens: the declared sequences, else those of all frontiers, else
        the only sequence.
        """
        if self._declared is not None:
            return self._declared
        frontiers: list[Members] = [(at,) for at, one in enumerate(self._sequences) for _ in range(one.tree.n_pending)]
        return frontiers or [(self._only_sequence("call begin_step to assign tokens"),)] * n_tokens

    def _sequence(self, number: int) -> TokenSequence:
        if not 0 <= integer("a sequence", number) < MAX_SEQUENCES:
            raise invalid(f"expected a sequence from 0 to {MAX_SEQUENCES - 1}, got {number}")
        return self._sequences[number]

    def _only_sequence(self, otherwise: str) -> int:
        live = self.sequences()
        if len(live) > 1:
            raise invalid(f"the cache holds {len(live)} sequences; {otherwise}")
        return live[0] if live else 0

    def _refuse_tree(self, sequence: int, what: str) -> None:
        n_nodes = len(self._sequences[sequence].tree.parents)
        if n_nodes:
            raise StepError(f"sequence {sequence} carries a tree of {n_nodes} nodes: commit it before you {what}")


def _span(begin: int, end: int | None) -> range:
    """Returns a range of positions. An ``end`` of None is the end of the sequence."""
    begin, end = integer("begin", begin), 2**31 - 1 if end is None else integer("end", end)
    if begin < 0 or end < begin:
        raise invalid(f"expected a range of positions that starts at 0 or later, got {begin} to {end}")
    return range(begin, end)
