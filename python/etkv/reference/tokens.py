"""Tokens, the sequences and trees that hold them, and the positions that a query sees."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from etkv.config import LayerConfig

ROOT = -1  # the parent of a node that follows the sequence itself


@dataclass(eq=False)
class Token:
    """A token that a cache holds. Forks share it."""

    position: int
    rows: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Layer -> key ``[n_kv_heads, k_head_dim]`` and value ``[n_kv_heads, v_head_dim]``, float32, rounded as stored."""


@dataclass(frozen=True)
class Window:
    """The positions that a layer's queries see, and the positions that a native cache holds.

    The reference drops no rows. It tracks which positions a native cache holds, to raise the same error: a sequence
    cannot continue at a position where a query would see dropped positions.
    """

    size: int  # number of positions, the query's own included; 0 for all
    sinks: int  # number of first positions of the sequence, which every query sees
    step: int  # the maximum tokens of one sequence in a step
    is_chunk: bool = False  # whether a query sees its chunk of ``size`` positions instead of a window

    @classmethod
    def of(cls, layer: LayerConfig, step: int) -> Window:
        """Returns the window of ``layer``. A step has at most ``step`` tokens of a sequence."""
        return cls(layer.chunk or layer.window, layer.sinks, step, is_chunk=layer.chunk > 0)

    def sees(self, query: int, position: int) -> bool:
        """Returns whether a query at position ``query`` sees an earlier position of its own sequence."""
        if self.is_chunk:
            return position // self.size == query // self.size
        return self.size == 0 or position > query - self.size or position < self.sinks

    @property
    def slots(self) -> int:
        """Returns the maximum number of positions that a native window layer holds for a sequence."""
        return self.sinks + self.size - 1 + 2 * self.step + max(self.step, self.size // 4)

    def left(self, held: set[int], following: int) -> set[int]:
        """Returns the positions of ``held`` that stay after a step. ``following`` is the sequence's next position.

        Nothing is dropped while another step of ``step`` tokens fits. Otherwise three sets of positions stay: the
        sinks, the window of the next query, and the window of the query ``step`` positions earlier. So a step of any
        allowed size can be rolled back.
        """
        earliest = max(following - self.step, 0)
        fits = len(held) <= self.slots - self.step
        return {at for at in held if fits or at < self.sinks or at > earliest or self.sees(earliest, at)}

    def exact_after(self, position: int) -> int:
        """Returns the first later position whose query does not see ``position``, which must not be a sink."""
        return position + self.size - (position % self.size if self.is_chunk else 0)


@dataclass(frozen=True)
class Tree:
    """Candidates after a sequence, numbered in the order of their proposal. A sequence with an empty tree counts as one
    without a tree."""

    parents: tuple[int, ...] = ()  # the parent of each node; a parent comes before its children
    tokens: tuple[Token, ...] = ()  # the tokens of nodes that have run: all, or all before the last frontier

    @property
    def n_pending(self) -> int:
        """Returns the number of nodes that the next step runs."""
        return len(self.parents) - len(self.tokens)

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the child of the sequence down to ``node``, including both."""
        path: list[int] = []
        while node != ROOT:
            path.insert(0, node)
            node = self.parents[node]
        return path


@dataclass
class TokenSequence:
    """A sequence: its tokens by position, and a tree of candidates, which may be empty. While the tree is not empty,
    new tokens are added to the tree.
    """

    held: dict[Window, set[int]]  # for each window that drops positions, the positions that a native cache holds
    tokens: dict[int, Token] = field(default_factory=dict)  # position -> token, in the order of positions
    tree: Tree = Tree()

    @property
    def following(self) -> int:
        """Returns the position after the last token."""
        return next(reversed(self.tokens), -1) + 1

    @property
    def expected(self) -> int:
        """Returns the position of the next token, or if there is a tree, the position of the next candidate."""
        return self.following + (len(self.tree.path(len(self.tree.tokens))) - 1 if self.tree.parents else 0)

    def append(self, token: Token) -> None:
        """Adds the next token, or if there is a tree, the token of the next candidate."""
        if self.tree.parents:
            self.tree = Tree(self.tree.parents, (*self.tree.tokens, token))
            return
        self.tokens[token.position] = token
        for held in self.held.values():
            held.add(token.position)

    def text(self, query: Token) -> set[Token]:
        """Returns the tokens that a query may see without a window: the sequence up to the query, or the sequence and
        the query's path in the tree.
        """
        if query in self.tree.tokens:
            path = self.tree.path(self.tree.tokens.index(query))
            return {*self.tokens.values(), *(self.tree.tokens[node] for node in path)}
        return {token for position, token in self.tokens.items() if position <= query.position}

    def drop(self) -> None:
        """Drops the positions that a native cache drops after a step."""
        self.held = {window: window.left(held, self.following) for window, held in self.held.items()}

    def part(self, positions: Container[int]) -> TokenSequence:
        """Returns a copy with these positions only, and with the tree."""
        held = {window: {at for at in held if at in positions} for window, held in self.held.items()}
        return TokenSequence(held, {at: one for at, one in self.tokens.items() if at in positions}, self.tree)

    @property
    def exact_from(self) -> int:
        """Returns the first position whose query sees no dropped position."""
        gone = ((window, at) for window, held in self.held.items() for at in self.tokens.keys() - held)
        return max((window.exact_after(at) for window, at in gone), default=0)


def distinct(sequences: Iterable[TokenSequence]) -> list[Token]:
    """Returns the tokens of sequences and their trees without duplicates."""
    return list(dict.fromkeys(token for one in sequences for token in (*one.tokens.values(), *one.tree.tokens)))
