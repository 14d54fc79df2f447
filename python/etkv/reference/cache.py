"""The base of the reference caches: forwards as transactions, admission, formats."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from etkv.config import CacheConfig
from etkv.errors import Status, StatusError, status_error
from etkv.reference.attention import attention, check_dtypes, check_queries
from etkv.reference.errors import at_least, integer, invalid
from etkv.reference.limits import limits_of
from etkv.reference.rows import RowStore, TokenKv, stack
from etkv.reference.window import Sight, WindowLayerGroup

Given = tuple[Tensor, Tensor, Tensor]
"""The keys and values that queries attend to, and the mask."""


@dataclass
class Call:
    """The call of a layer in a forward."""

    k: Tensor
    v: Tensor
    """The rows as passed."""
    rows: list[TokenKv]
    """The rows as stored."""
    given: Given


@dataclass
class Step:
    """An open forward. It changes nothing before every layer is called."""

    positions: list[int]
    tokens: list[int]
    """The numbers of the tokens."""
    history: list[int]
    """Tokens that the queries may see, besides the step's own."""
    seen: list[set[int]]
    """For each query the tokens that it may see. Its position and the window restrict them."""
    commit: Callable[[], None]
    """Adds the tokens to the cache."""
    calls: dict[int, Call] = field(default_factory=dict)
    """The calls by layer, in their order."""
    again: set[int] = field(default_factory=set)
    """The layers called again, from the first layer on. They may belong to a new forward with the same positions."""
    masks: dict[Sight, Tensor] = field(default_factory=dict)

    def answer(self, layer: int, k: Tensor, v: Tensor) -> Given | None:
        """Returns the result of a layer that is called again with the same rows.

        Returns None if the layer was not called yet, or had other rows.
        """
        call = self.calls.get(layer)
        if call is None or not (_same(call.k, k) and _same(call.v, v)):
            return None
        if layer == next(iter(self.calls)):
            self.again = {layer}
        elif self.again:
            self.again.add(layer)
        return call.given


class ReferenceCache(ABC):
    """A KV cache in plain PyTorch. Tests compare the results and the errors of the native caches with it.

    Use it on one thread. It is slow: a step creates a Python object for each token of the history in each layer.
    """

    kind: ClassVar[str]
    shares_rows: ClassVar[bool] = False
    """True if queries read rows of other sequences, which the mask hides."""

    def __init__(self, config: CacheConfig) -> None:
        """Makes an empty cache. Raises :class:`StatusError` with ``INVALID_ARGUMENT`` for an invalid config."""
        self.config = config
        self._limits = limits_of(config)
        self._store = RowStore(config, self._limits)
        self._groups = {
            sight: WindowLayerGroup(sight, self._limits.max_step_tokens, config.capacity)
            for sight in dict.fromkeys(self._limits.sights)
            if sight.window
        }
        self._positions: dict[int, int] = {}
        """The position of each token that the cache holds."""
        self._numbers = itertools.count()
        self._step: Step | None = None
        self._last: Step | None = None
        """The last forward, until the next change: layers that share keys and values may be called again."""

    # ---- Queries of a runner ---------------------------------------------

    @property
    def capacity(self) -> int:
        """Returns the most positions that the cache can hold."""
        return self.config.capacity

    @property
    @abstractmethod
    def length(self) -> int:
        """Returns the number of positions held. One that several sequences share counts once."""

    def can_extend(self, n: int = 1) -> bool:
        """Returns whether ``n`` more positions fit."""
        n = integer("n", n)
        at_least(0, "n", n)
        return n <= self.capacity - self.length

    @property
    def formats(self) -> tuple[str, str]:
        """Returns the present formats of keys and values."""
        k_format, v_format = self._store.formats
        return k_format.name, v_format.name

    @abstractmethod
    def rewindable_to(self) -> int:
        """Returns the least length other than 0 that the only sequence can be rewound to."""

    # ---- Changes by a runner ---------------------------------------------

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Removes the positions from ``length`` on, of the only sequence."""

    def clear(self, *, release: bool = False) -> None:
        """Removes every position and restores the formats of the config. There are no buffers to ``release``."""
        self._refuse_in_step("clear the cache")
        self._forget_all()
        self._store.clear()
        self._positions.clear()
        for group in self._groups.values():
            group.clear()

    def convert(self, k_format: str, v_format: str) -> None:
        """Converts stored and future rows to other formats, until the cache is cleared."""
        self._refuse_in_step("convert the cache")
        self._store.convert(k_format, v_format)

    # ---- Steps of a program ----------------------------------------------

    def update_and_attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Sequence[int],
        scale: float,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Writes a layer's rows, and returns the attention of its queries to all rows that they see.

        ``q`` is ``[1, n_heads, T, k_head_dim]``, ``k`` ``[1, n_kv_heads, T, k_head_dim]`` and ``v``
        ``[1, n_kv_heads, T, v_head_dim]``; the result is ``[1, n_heads, T, v_head_dim]`` in ``out_dtype``.

        A forward begins with the call of the first layer. It commits once every layer is called with the same
        positions, in any order. A layer that is called again with the same rows only attends: layers that share keys
        and values do so. A layer that is called with other rows, or other positions, begins a new forward. So does the
        call after a refused one. An unfinished forward is rolled back.

        Raises :class:`StatusError` if the inputs do not fit or the cache refuses the step. The forward is rolled back.
        """
        try:
            check_dtypes(q=q.dtype, k=k.dtype, v=v.dtype, out_dtype=out_dtype)
            check_queries(q, k, v)
        except StatusError:
            self.abort()
            raise
        keys, values, mask = self.update_and_fetch(layer, k, v, positions)
        return attention(q, keys, values, mask, scale, out_dtype)

    def update_and_fetch(self, layer: int, k: Tensor, v: Tensor, positions: Sequence[int]) -> Given:
        """Writes a layer's rows, and returns the keys, the values and the mask for its queries.

        The keys ``[1, n_kv_heads, L, k_head_dim]`` and values ``[1, n_kv_heads, L, v_head_dim]`` are all that are
        stored, in float32, the new ones last. The mask ``[T, L]`` is true where a query sees a key. Layers of equal
        windows get the same mask.
        """
        try:
            positions = [integer("a position", position) for position in positions]
            had = self._step or self._last
            if had is None or had.positions != positions:
                self.abort()
                return self._in_step(layer, k, v, positions)
            given = had.answer(layer, k, v)
            if given is not None:
                return given
            if layer in had.calls or had is self._last:
                self._begin_anew(had, layer)
            return self._in_step(layer, k, v, positions)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Rolls the open forward back. Does nothing without one."""
        self._step = self._last = None

    def _begin_anew(self, had: Step, layer: int) -> None:
        """Begins a forward with the positions of the forward before it, ``had``.

        The layers in ``had.again`` were already called for the new forward. Their rows were the same as before, so they
        were treated as layers that share rows.
        """
        self.abort()
        if had.again and layer not in had.again:
            self._step = self._plan(had.positions)
            self._step.calls = {other: call for other, call in had.calls.items() if other in had.again}

    def _in_step(self, layer: int, k: Tensor, v: Tensor, positions: list[int]) -> Given:
        step = self._step
        if step is None:
            step = self._step = self._plan(positions)
        n_layers = len(self.config.layers)
        if not 0 <= integer("layer_id", layer) < n_layers:
            raise status_error(Status.SHAPE, f"expected a layer from 0 to {n_layers - 1}, got {layer}")
        fresh = self._store.encode(layer, k, v, len(positions))
        if self.shares_rows:
            self._store.check_values(layer, v)
        keys, values = stack([*self._store.get(layer, step.history), *fresh])
        given = keys, values, self._mask(step, self._limits.sights[layer])
        # The host may overwrite the tensors that it passed.
        step.calls[layer] = Call(k.detach().clone(), v.detach().clone(), fresh, given)
        if len(step.calls) == n_layers:
            self._finish(step)
        return given

    def _mask(self, step: Step, sight: Sight) -> Tensor:
        """Returns the mask ``[T, L]`` of a step: true where a query sees a token that is read."""
        if sight not in step.masks:
            at = {**self._positions, **dict(zip(step.tokens, step.positions, strict=True))}
            step.masks[sight] = torch.tensor(
                [
                    [token in seen and sight.sees(position, at[token]) for token in [*step.history, *step.tokens]]
                    for position, seen in zip(step.positions, step.seen, strict=True)
                ]
            )
        return step.masks[sight]

    def _finish(self, step: Step) -> None:
        for layer, call in step.calls.items():
            self._store.put(layer, step.tokens, call.rows)
        self._positions.update(zip(step.tokens, step.positions, strict=True))
        self._step, self._last = None, step
        step.commit()
        self._settle()

    def _settle(self) -> None:
        """Removes rows without an owner, and converts the others if ``quantized_kv_start`` is reached."""
        held = self._held()
        self._store.keep(held)
        self._positions = {token: self._positions[token] for token in held}
        self._store.convert_at(self._committed())

    # ---- Defined by each kind --------------------------------------------

    @abstractmethod
    def _plan(self, positions: list[int]) -> Step:
        """Returns a step for tokens at these positions. Raises :class:`StatusError` if the cache refuses it."""

    @abstractmethod
    def _held(self) -> list[int]:
        """Returns the tokens that the cache holds."""

    @abstractmethod
    def _forget_all(self) -> None:
        """Removes every token."""

    def _committed(self) -> int:
        """Returns the number of positions held, without candidates."""
        return self.length

    # ---- Shared by the kinds ---------------------------------------------

    def _new_tokens(self, n: int) -> list[int]:
        return list(itertools.islice(self._numbers, n))

    def _refuse_in_step(self, what: str) -> None:
        if self._step is not None:
            raise status_error(Status.STEP, f"cannot {what} in the middle of a step")
        self._last = None

    def _check_count(self, n_tokens: int) -> None:
        """Raises :class:`StatusError` with ``CAPACITY`` for more tokens of a sequence than windows can roll back."""
        for group in self._groups.values():
            if group.drops and n_tokens > group.max_step_tokens:
                raise status_error(
                    Status.CAPACITY,
                    f"a step of {n_tokens} tokens: the window layers take at most max_step_tokens, "
                    f"{group.max_step_tokens}",
                )

    def _check_floats(self, n_tokens: int, length: int) -> None:
        """Raises :class:`StatusError` with ``CAPACITY`` for more positions in float than the memory estimate allows."""
        most = self._limits.most_floats
        if self._store.awaits_conversion and length > most:
            raise status_error(
                Status.CAPACITY,
                f"a step of {n_tokens} tokens would store {length} positions in {self._limits.float_format.name}, the "
                f"most is {most}: quantized_kv_start - 1, and max_step_tokens {self._limits.max_step_tokens}; "
                "take smaller steps",
            )

    def _exact_from(self, sequence: int, positions: Sequence[int]) -> int:
        """Returns the least position at which a query sees none of these positions that windows have dropped."""
        return max((group.exact_from(sequence, positions) for group in self._groups.values()), default=0)


def _same(rows: Tensor, others: Tensor) -> bool:
    return bool(rows.dtype == others.dtype and rows.device == others.device and torch.equal(rows, others))


def refuse_empty(positions: Sequence[int]) -> None:
    if not positions:
        raise invalid("a step needs at least 1 token")
