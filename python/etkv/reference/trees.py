"""Trees of candidates behind sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from etkv.config import CacheConfig
from etkv.errors import Status, status_error
from etkv.reference.errors import integer, invalid
from etkv.reference.sequences import Members, SeqCache, _before

ROOT = -1
"""The parent of a node that follows the sequence itself."""


@dataclass
class Tree:
    """Candidates behind one sequence, numbered in the order of their proposal. A parent comes before its children."""

    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """The tokens of the nodes that have run: of all nodes, or of all before the last frontier."""

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def n_pending(self) -> int:
        """Returns the number of nodes that the next step runs."""
        return len(self.parents) - len(self.tokens)

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the child of the sequence down to ``node``, including both."""
        path = [node]
        while self.parents[path[0]] != ROOT:
            path.insert(0, self.parents[path[0]])
        return path


class TreeCache(SeqCache):
    """Sequences with a tree of candidates behind each, which grows by a frontier a step until it is committed."""

    kind = "tree"

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._trees: dict[int, Tree] = {}

    def sequences(self) -> list[int]:
        """Returns the numbers of the sequences that hold tokens or carry a tree, in order."""
        return sorted(self._sequences.keys() | self._trees.keys())

    def tree_len(self, sequence: int = 0) -> int:
        """Returns the number of nodes of the tree behind a sequence, or 0 without a tree."""
        return len(self._trees.get(self._number(sequence), ()))

    def propose(self, parents: Sequence[int], sequence: int = 0) -> None:
        """Appends a frontier of candidates to the tree behind a sequence: the queries of its next step.

        A candidate sees the sequence, its ancestors and itself. A parent is the number of an earlier node of the tree,
        over all its frontiers, or -1 for the sequence itself. A node's position is the sequence's next plus its depth.

        Raises :class:`StatusError`: with ``CAPACITY`` if the frontier does not fit, with ``STEP`` if the last frontier
        has not run, and with ``INVALID_ARGUMENT`` for no candidates or a wrong parent.
        """
        self._refuse_in_step("propose a tree")
        sequence = self._number(sequence)
        parents = [integer("a parent", parent) for parent in parents]
        waiting = sum(tree.n_pending for tree in self._trees.values())
        room = self.capacity - self.length
        if waiting + len(parents) > room:
            raise status_error(
                Status.CAPACITY,
                f"a frontier of {len(parents)} nodes does not fit: {room} of {self.capacity} cells are free, "
                f"{waiting} of them for other frontiers",
            )
        tree = self._trees.get(sequence, Tree())
        if not parents:
            raise invalid("expected a frontier of at least 1 node, got none")
        if tree.n_pending:
            raise status_error(
                Status.STEP, f"the last frontier, of {tree.n_pending} nodes, has not run; run a step first"
            )
        for node, parent in enumerate(parents, start=len(tree)):
            if not ROOT <= parent < node:
                raise invalid(f"expected a parent of node {node} from {ROOT} to {node - 1}, got {parent}")
        tree.parents += parents
        self._trees[sequence] = tree

    def commit(self, accepted: Sequence[int], sequence: int = 0) -> None:
        """Adds a chain of candidates to the sequence, from its child down, and removes the rest of the tree.

        An empty chain removes the whole tree.

        Raises :class:`StatusError` with ``INVALID_ARGUMENT`` if the sequence has no tree, or if ``accepted`` is not a
        chain of nodes that have run.
        """
        self._refuse_in_step("commit a tree")
        sequence = self._number(sequence)
        accepted = [integer("a node", node) for node in accepted]
        tree = self._trees.get(sequence)
        if tree is None:
            raise invalid(f"sequence {sequence} carries no tree; propose one first")
        before = ROOT
        for node in accepted:
            if not 0 <= node < len(tree.tokens):
                raise invalid(f"node {node} is accepted, but {len(tree.tokens)} nodes of the tree have run")
            if tree.parents[node] != before:
                raise invalid(
                    f"node {node} is accepted after {before}, but its parent is {tree.parents[node]}; accept a chain"
                )
            before = node
        del self._trees[sequence]
        for node in accepted:
            self._append(sequence, self._next(sequence), tree.tokens[node])
        self._trim(sequence)
        self._settle()

    # ---- A step ----------------------------------------------------------

    def _owners(self, n_tokens: int) -> list[Members]:
        waiting: list[Members] = [
            (sequence,) for sequence, tree in sorted(self._trees.items()) for _ in range(tree.n_pending)
        ]
        if self._declared is None and waiting:
            return waiting
        return super()._owners(n_tokens)

    def _expected(self, owners: list[Members], token: int, sequence: int) -> int:
        tree = self._trees.get(sequence)
        if tree is None:
            return super()._expected(owners, token, sequence)
        node = self._node(owners, token, sequence)
        if len(owners[token]) > 1 or node >= len(tree):
            raise status_error(
                Status.STEP,
                f"sequence {sequence} carries a tree of {len(tree)} nodes, {tree.n_pending} of them for this step; it "
                "takes no other tokens before the tree is committed",
            )
        return self._next(sequence) + len(tree.path(node)) - 1

    def _check_tokens(self, sequence: int, n_tokens: int) -> None:
        tree = self._trees.get(sequence)
        if tree is not None and n_tokens != tree.n_pending:
            raise invalid(
                f"expected all {tree.n_pending} candidates of sequence {sequence} in the step, got {n_tokens}"
            )
        super()._check_tokens(sequence, n_tokens)

    def _seen(self, owners: list[Members], tokens: list[int], query: int, sequence: int) -> set[int]:
        tree = self._trees.get(sequence)
        if tree is None:
            return super()._seen(owners, tokens, query, sequence)
        fresh = [token for token, members in zip(tokens, owners, strict=True) if sequence in members]
        nodes = [*tree.tokens, *fresh]
        path = tree.path(self._node(owners, query, sequence))
        return {*self._tokens(sequence).values(), *(nodes[node] for node in path)}

    def _append(self, sequence: int, position: int, token: int) -> None:
        tree = self._trees.get(sequence)
        if tree is None:
            super()._append(sequence, position, token)
        else:
            tree.tokens.append(token)

    def _trim(self, sequence: int) -> None:
        if sequence not in self._trees:
            super()._trim(sequence)

    # ---- Inside ----------------------------------------------------------

    def _node(self, owners: list[Members], token: int, sequence: int) -> int:
        """Returns the node that a token of a step runs, in the tree behind a sequence."""
        return len(self._trees[sequence].tokens) + _before(owners, token, sequence)

    def _held(self) -> list[int]:
        return sorted({*super()._held(), *(token for tree in self._trees.values() for token in tree.tokens)})

    def _committed(self) -> int:
        return len(super()._held())

    def _forget_all(self) -> None:
        super()._forget_all()
        self._trees.clear()

    def _refuse_under_tree(self, sequence: int, what: str) -> None:
        if sequence in self._trees:
            raise status_error(
                Status.STEP,
                f"sequence {sequence} carries a tree of {self.tree_len(sequence)} nodes: commit it before you {what}",
            )

    def _drop_tree(self, sequence: int) -> None:
        self._trees.pop(sequence, None)
