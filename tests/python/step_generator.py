"""Generates the random programs of :mod:`step_programs`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from etkv.config import CacheConfig, LayerConfig
from etkv.errors import StatusError
from etkv.reference import make_cache

SEQUENCES = (0, 1, 2, 7, 255)
"""The numbers of sequences that programs use."""

Members = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A call of a method of the cache, with its arguments."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Step:
    """One forward over every layer."""

    positions: tuple[int, ...]
    owners: tuple[Members, ...] | None
    """The declared sequences of each token; None without a declaration."""
    seed: int
    """The seed of the queries, keys and values."""


@dataclass(frozen=True)
class Operation:
    action: Call | Step
    refused: int | None
    """The status if the operation is refused, or None."""


class Generator:
    """Draws operations, and applies each to a small cache of the same kind to find its outcome."""

    def __init__(self, kind: str, config: CacheConfig, seed: int, most_tokens: int) -> None:
        self.random = random.Random(f"{kind} {seed}")
        self.kind, self.most_tokens = kind, most_tokens
        self.cache: Any = make_cache(kind, _small(config))
        self.max_step_tokens = min(config.max_step_tokens or 512, config.capacity)
        self.trees: dict[int, list[int]] = {}
        """Sequence -> the parents of the nodes in its tree."""
        self.n_run: dict[int, int] = {}
        """Sequence -> the number of these nodes that have run."""
        self.left_over: tuple[Members, ...] | None = None
        """The declaration of a refused step, which is still in force."""
        self.seed = seed * 1_000_000

    def program(self, n_operations: int) -> list[Operation]:
        return [self._do(self._draw()) for _ in range(n_operations)]

    # ---- Applying --------------------------------------------------------

    def _do(self, action: Call | Step) -> Operation:
        refused = None
        try:
            if isinstance(action, Call):
                getattr(self.cache, action.name)(*action.arguments)
            else:
                self._do_step(action)
        except StatusError as error:
            refused = int(error.status)
        self._remember(action, refused)
        return Operation(action, refused)

    def _do_step(self, step: Step) -> None:
        if step.owners is not None:
            self.cache.begin_step_shared(step.owners)
            self.left_over = step.owners
        # Each step has rows that differ from those of the step before it. With equal rows and positions, it would only
        # attend again.
        rows = torch.full((1, 1, len(step.positions), 1), float(step.seed % 4096))
        for layer in range(len(self.cache.config.layers)):
            self.cache.update_and_fetch(layer, rows, rows, step.positions)

    def _remember(self, action: Call | Step, refused: int | None) -> None:
        if refused is None and isinstance(action, Step):
            owners, self.left_over = action.owners or self.left_over, None
            for sequence, parents in self.trees.items():
                if owners is None or (sequence,) in owners:
                    self.n_run[sequence] = len(parents)
        if refused is None and action == Call("clear", ()):
            self.left_over = None
        if refused is None and isinstance(action, Call) and action.name == "propose":
            parents, sequence = action.arguments
            self.trees.setdefault(sequence, []).extend(parents)
            self.n_run.setdefault(sequence, 0)
        for sequence in [sequence for sequence in self.trees if self.cache.tree_len(sequence) == 0]:
            del self.trees[sequence], self.n_run[sequence]

    # ---- Drawing ---------------------------------------------------------

    def _draw(self) -> Call | Step:
        """Return an action. Draws again if an action makes no sense in the present state."""
        common = [(self._rewind, 3), (self._clear, 1), (self._bad_rewind, 2)]
        table: dict[str, list[tuple[Callable[[], Call | Step | None], int]]] = {
            "contiguous": [(self._append, 24), (self._step_back, 5), (self._bad_run, 4), *common],
            "seq": [
                (self._own_step, 14),
                (self._batch, 18),
                (self._shared_step, 6),
                (self._cp, 10),
                (self._rm, 7),
                (self._keep, 1),
                (self._bad_step, 5),
                (self._bad_sequence_or_range, 3),
                *common,
            ],
        }
        table["tree"] = [
            *table["seq"],
            (self._propose, 12),
            (self._frontiers, 12),
            (self._commit, 12),
            (self._bad_tree, 6),
        ]
        choices, weights = zip(*table[self.kind], strict=True)
        while True:
            action = self.random.choices(choices, weights)[0]()
            if action is not None:
                return action

    def _step(self, positions: list[int], owners: list[Members] | None = None) -> Step:
        self.seed += 1
        return Step(tuple(positions), None if owners is None else tuple(owners), self.seed)

    def _n_tokens(self) -> int:
        """Return a number of tokens, which usually fits; 0 if no token fits."""
        room = self.cache.capacity - self.cache.length
        return self.random.randint(0, min(self.most_tokens, self.max_step_tokens, room))

    # ---- One sequence ----------------------------------------------------

    def _append(self) -> Step | None:
        start, n = self.cache.length, self._n_tokens()
        return self._step(list(range(start, start + n))) if n else None

    def _step_back(self) -> Step | None:
        length = self.cache.length
        least = min(self.cache.rewindable_to(), length)
        start = self.random.choice([0, self.random.randint(least, length), max(length - 1, 0)])
        n = min(self.random.randint(1, self.most_tokens), self.cache.capacity - start)
        return self._step(list(range(start, start + n))) if n > 0 else None

    def _bad_run(self) -> Step:
        length, n = self.cache.length, self.random.randint(2, self.most_tokens)
        run = list(range(length, length + n))
        return self._step(
            self.random.choice(
                [
                    [at + 1 for at in run],
                    [at - length - 1 for at in run],
                    [*run[:-1], run[-1] + 1],
                    [*run[:-1], run[0]],
                    list(range(length, self.cache.capacity + 1)),
                    list(range(max(length - self.max_step_tokens - 1, 0), length + 1)),
                ]
            )
        )

    def _rewind(self) -> Call | None:
        if self.kind != "contiguous" and len(self.cache.sequences()) > 1:
            return None
        length = self._next_of_only()
        return Call("rewind", (self.random.choice([length, max(length - 1, 0), self.random.randint(0, length)]),))

    def _bad_rewind(self) -> Call:
        return Call("rewind", (self.random.choice([-1, self._next_of_only() + 1]),))

    def _next_of_only(self) -> int:
        if self.kind == "contiguous":
            return self.cache.length
        return self.cache.seq_next(self.random.choice(self.cache.sequences() or [0]))

    def _clear(self) -> Call:
        return Call("clear", ())

    # ---- Several sequences -----------------------------------------------

    def _free_sequences(self) -> list[int]:
        """Return the sequences without a tree."""
        return [sequence for sequence in SEQUENCES if sequence not in self.trees]

    def _positions(self, owners: list[Members]) -> list[int]:
        """Return the positions that tokens of ``owners`` must have if the sequences have no trees."""
        following = {sequence: self.cache.seq_next(sequence) for members in owners for sequence in members}
        positions = []
        for members in owners:
            positions.append(following[members[0]])
            for sequence in members:
                following[sequence] += 1
        return positions

    def _own_step(self) -> Step | None:
        """Return a step of one sequence, declared or not."""
        if self.left_over is not None and not any(sequence in self.trees for (sequence, *_) in self.left_over):
            return self._step(self._positions(list(self.left_over)))
        live, n = self.cache.sequences(), self._n_tokens()
        if n == 0 or self.left_over is not None or self.trees:
            return None
        if len(live) > 1 or (live and self.random.random() < 0.3):
            owners = [(self.random.choice(live),)] * n
            return self._step(self._positions(owners), owners)
        return self._step(self._positions([(live[0] if live else 0,)] * n))

    def _batch(self) -> Step | None:
        free, n = self._free_sequences(), self._n_tokens()
        if n == 0 or not free:
            return None
        chosen = self.random.sample(free, self.random.randint(1, min(3, len(free))))
        owners = [(self.random.choice(chosen),) for _ in range(n)]
        if self.random.random() < 0.5:
            owners.sort()
        return self._step(self._positions(owners), owners)

    def _shared_step(self) -> Step | None:
        """Return a step with tokens that several sequences share, all at the same position."""
        free, n = self._free_sequences(), self._n_tokens()
        if n == 0 or not free:
            return None
        at = self.cache.seq_next(self.random.choice(free))
        together = [sequence for sequence in free if self.cache.seq_next(sequence) == at]
        if len(together) < 2:
            return None
        members = tuple(self.random.sample(together, self.random.randint(2, len(together))))
        owners = [members] * self.random.randint(1, n)
        owners += [(self.random.choice(members),) for _ in range(n - len(owners))]
        return self._step(self._positions(owners), owners)

    def _bad_step(self) -> Step:
        owners = [(self.random.choice(SEQUENCES),) for _ in range(self.random.randint(1, self.most_tokens))]
        positions, token = self._positions(owners), self.random.randrange(len(owners))
        wrong = positions[:]
        wrong[token] += self.random.choice([-1, 1, 5])
        many = [(owners[0][0],)] * (self.cache.capacity - self.cache.length + 1)
        return self.random.choice(
            [
                lambda: self._step(wrong, owners),
                lambda: self._step([*positions, positions[-1] + 1], owners),
                lambda: self._step(self._positions(many), many),
                lambda: self._step(positions),
                lambda: self._step(positions, [*owners[:-1], (256,)]),
                lambda: self._step(positions, [*owners[:-1], (3, 4, 3)]),
                lambda: self._step(positions, [*owners[:-1], ()]),
            ]
        )()

    def _range(self, sequence: int) -> tuple[int, int | None]:
        """Return a range of positions of a sequence: all, the beginning, the end, or the middle."""
        length = self.cache.seq_next(sequence)
        begin, end = sorted(self.random.randint(0, length) for _ in range(2))
        return self.random.choice([(0, None), (begin, None), (0, end), (begin, end)])

    def _cp(self) -> Call:
        source, target = self.random.choice(self.cache.sequences() or [0]), self.random.choice(SEQUENCES)
        return Call("seq_cp", (source, target, *self._range(source)))

    def _rm(self) -> Call:
        sequence = self.random.choice(SEQUENCES)
        return Call("seq_rm", (sequence, *self._range(sequence)))

    def _keep(self) -> Call:
        return Call("seq_keep", (self.random.choice(SEQUENCES),))

    def _bad_sequence_or_range(self) -> Call:
        bad = self.random.choice([-1, 256])
        return self.random.choice(
            [
                Call("seq_cp", (bad, 0, 0, None)),
                Call("seq_cp", (0, bad, 0, None)),
                Call("seq_cp", (0, 1, 3, 2)),
                Call("seq_rm", (bad, 0, None)),
                Call("seq_rm", (0, -1, 2)),
                Call("seq_keep", (bad,)),
            ]
        )

    # ---- Trees -----------------------------------------------------------

    def _depth(self, sequence: int, node: int) -> int:
        parent = self.trees[sequence][node]
        return 0 if parent < 0 else 1 + self._depth(sequence, parent)

    def _propose(self) -> Call:
        sequence = self.random.choice(SEQUENCES)
        known = len(self.trees.get(sequence, []))
        nodes = range(known, known + self.random.randint(1, self.most_tokens))
        parents = [self.random.randint(max(-1, node - 3), node - 1) for node in nodes]
        return Call("propose", (parents, sequence))

    def _frontiers(self) -> Step | None:
        """Return a step of every pending frontier, or of one declared frontier."""
        waiting = [sequence for sequence in sorted(self.trees) if self.n_run[sequence] < len(self.trees[sequence])]
        if not waiting:
            return None
        n_tokens = sum(len(self.trees[sequence]) - self.n_run[sequence] for sequence in waiting)
        said = self.left_over is not None or n_tokens > self.most_tokens or self.random.random() < 0.4
        chosen = [self.random.choice(waiting)] if said else waiting
        owners, positions = [], []
        for sequence in chosen:
            for node in range(self.n_run[sequence], len(self.trees[sequence])):
                owners.append((sequence,))
                positions.append(self.cache.seq_next(sequence) + self._depth(sequence, node))
        return self._step(positions, owners if said else None)

    def _commit(self) -> Call | None:
        if not self.trees:
            return None
        sequence = self.random.choice(sorted(self.trees))
        parents, accepted = self.trees[sequence], []
        while self.random.random() < 0.75:
            last = accepted[-1] if accepted else -1
            children = [node for node in range(self.n_run[sequence]) if parents[node] == last]
            if not children:
                break
            accepted.append(self.random.choice(children))
        return Call("commit", (accepted, sequence))

    def _bad_tree(self) -> Call:
        sequence = self.random.choice(SEQUENCES)
        nodes = len(self.trees.get(sequence, []))
        return self.random.choice(
            [
                Call("propose", ([], sequence)),
                Call("propose", ([-2], sequence)),
                Call("propose", ([-1, nodes + 1], sequence)),
                Call("propose", ([-1] * (self.cache.capacity + 1), sequence)),
                Call("propose", ([-1], 256)),
                Call("commit", ([nodes], sequence)),
                Call("commit", ([-1], sequence)),
                Call("commit", ([0, 0], sequence)),
                Call("commit", ([], 256)),
            ]
        )


def _small(config: CacheConfig) -> CacheConfig:
    """Return a config with one element in a row. Its caches return the same answers and refusals."""
    sights = dict.fromkeys((layer.window, layer.sinks, layer.chunk) for layer in config.layers)
    layers = [LayerConfig(1, 1, window=window, sinks=sinks, chunk=chunk) for window, sinks, chunk in sights]
    return replace(config, layers=tuple(layers), k_format="f32", v_format="f32", float_format="f32")
