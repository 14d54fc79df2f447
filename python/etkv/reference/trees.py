"""A cache of sequences with trees of candidates."""

from __future__ import annotations

from collections.abc import Sequence

from etkv.errors import CapacityError, StepError
from etkv.reference.errors import integer, invalid
from etkv.reference.sequences import SeqCache
from etkv.reference.tokens import ROOT, Tree


class TreeCache(SeqCache):
    """Sequences, each with a tree of candidates. A tree grows by one frontier in each step, until it is committed.

    A step runs the frontiers of all sequences, unless ``begin_step`` selects some of them. A sequence with a tree
    accepts no other tokens.
    """

    kind = "tree"

    def tree_len(self, sequence: int = 0) -> int:
        """Returns the number of nodes in the tree of a sequence; 0 without a tree."""
        return len(self._sequence(sequence).tree.parents)

    def propose(self, parents: Sequence[int], sequence: int = 0) -> None:
        """Appends a frontier of candidates to the tree of a sequence: the queries of its next step.

        A candidate sees the sequence, its ancestors and itself. A parent is the number of an earlier node, counted over
        all frontiers of the tree; -1 is the sequence itself. A node's position is the next position of the sequence
        plus the node's depth.
        """
        self._refuse_in_step("propose a tree")
        bearer = self._sequence(sequence)
        tree = bearer.tree
        parents = [integer("a parent", parent) for parent in parents]
        waiting = sum(one.tree.n_pending for one in self._sequences)
        room = self.capacity - self.length
        if waiting + len(parents) > room:
            told = f"{room} of {self.capacity} cells are free, {waiting} of them for other frontiers"
            raise CapacityError(f"a frontier of {len(parents)} nodes does not fit: {told}")
        if not parents:
            raise invalid("expected a frontier of at least 1 node, got none")
        if tree.n_pending:
            raise StepError(f"the last frontier, of {tree.n_pending} nodes, has not run; run a step first")
        for node, parent in enumerate(parents, start=len(tree.parents)):
            if not ROOT <= parent < node:
                raise invalid(f"expected a parent of node {node} from {ROOT} to {node - 1}, got {parent}")
        bearer.tree = Tree((*tree.parents, *parents), tree.tokens)

    def commit(self, accepted: Sequence[int], sequence: int = 0) -> None:
        """Adds a chain of candidates to the sequence, and removes the tree.

        The chain begins at a child of the root. All its nodes must have run.
        """
        self._refuse_in_step("commit a tree")
        bearer = self._sequence(sequence)
        tree = bearer.tree
        if not tree.parents:
            raise invalid(f"sequence {sequence} carries no tree; propose one first")
        before = ROOT
        for node in accepted:
            if not 0 <= integer("a node", node) < len(tree.tokens):
                raise invalid(f"cannot accept node {node}: {len(tree.tokens)} nodes of the tree have run")
            if tree.parents[node] != before:
                raise invalid(f"cannot accept node {node} after {before}: its parent is {tree.parents[node]}")
            before = node
        bearer.tree = Tree()
        for node in accepted:
            bearer.append(tree.tokens[node])
        self._put({sequence: bearer})
