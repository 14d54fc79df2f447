"""The layers of a model that keep a state: convolutions and recurrences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KINDS = ("convolution", "recurrence")
"""The kinds of recurrent layers. In the metadata of a program, the number of a kind is its index here plus 1."""

BLOCK = 64
"""Anchors and checkpoints lie at multiples of this many positions."""


@dataclass(frozen=True, eq=False)
class RecurrentLayer:
    """The facts about a recurrent layer that its cache needs: a :class:`Convolution` or a :class:`Recurrence`.

    The sizes that only the other kind has are 0. Layers with equal facts are equal.

    For each sequence, a convolution keeps the ``channels`` inputs of the last ``width`` - 1 tokens. A recurrence keeps
    a state of ``k_dim`` times ``v_dim`` elements for each of ``heads`` heads. Several heads share one of ``k_heads``
    heads of queries and keys. With ``channel_decay`` each channel of a key has a decay, otherwise each head has one.
    """

    kind: Literal["convolution", "recurrence"]
    channels: int = 0
    width: int = 0
    k_heads: int = 0
    heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    channel_decay: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecurrentLayer) and self.facts() == other.facts()

    def __hash__(self) -> int:
        return hash(tuple(self.facts()))

    def facts(self) -> list[int]:
        """Return the 8 integers that describe the layer in the metadata: the kind, and the fields in order."""
        sizes = (self.channels, self.width, self.k_heads, self.heads, self.k_dim, self.v_dim)
        return [KINDS.index(self.kind) + 1, *sizes, int(self.channel_decay)]


class Convolution(RecurrentLayer):
    """A causal depthwise convolution."""

    def __init__(self, channels: int, width: int) -> None:
        """``channels`` is at least 1. ``width`` is the number of positions that an output reads, its own included: 1
        to 64.

        The native library checks the limits.
        """
        super().__init__("convolution", channels, width)

    def __repr__(self) -> str:
        return f"Convolution(channels={self.channels}, width={self.width})"


class Recurrence(RecurrentLayer):
    """A linear recurrence: each head keeps a state of ``k_dim`` times ``v_dim`` elements."""

    def __init__(self, k_heads: int, heads: int, k_dim: int, v_dim: int, *, channel_decay: bool = False) -> None:
        """``k_heads`` are the heads of queries and keys, ``heads`` the heads of values, a multiple of ``k_heads``.

        ``k_dim`` and ``v_dim`` are the elements of a key and of a value. All sizes are at least 1. With
        ``channel_decay`` each channel of a key has a decay, otherwise each head has one. The native library checks the
        limits.
        """
        super().__init__("recurrence", 0, 0, k_heads, heads, k_dim, v_dim, channel_decay)

    def __repr__(self) -> str:
        sizes = f"k_heads={self.k_heads}, heads={self.heads}, k_dim={self.k_dim}, v_dim={self.v_dim}"
        return f"Recurrence({sizes}, channel_decay={self.channel_decay})"
