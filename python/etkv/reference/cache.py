"""The base of all kinds of caches, and the cache of one sequence.

A forward is a transaction: its tokens are added to copies of the sequences. The copies replace the sequences once
every layer was called. A refused call raises :class:`StatusError` with the status of the native caches, and changes
nothing.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from etkv.config import DEFAULT_MAX_STEP_TOKENS, CacheConfig
from etkv.errors import CapacityError, PositionError, Status, StatusError, StepError
from etkv.reference.attention import attention
from etkv.reference.config import Formats, check_config, check_formats, formats_of
from etkv.reference.errors import check_range, integer, invalid
from etkv.reference.formats import FLOATS, Format, format_of
from etkv.reference.tokens import Token, TokenSequence, Window, distinct

Members = tuple[int, ...]  # the sequences that a token belongs to
Fetched = tuple[Tensor, Tensor, Tensor]  # the keys and values that queries attend to, and the mask


@dataclass
class Step:
    """A forward. It takes effect when every layer was called."""

    tokens: list[Token]  # the new tokens
    owners: list[Members]  # the sequences of each new token
    sequences: dict[int, TokenSequence]  # copies of the owners' sequences, with the new tokens
    history: list[Token]  # the earlier tokens that queries read
    calls: dict[int, tuple[Tensor, Tensor, Fetched]] = field(default_factory=dict)  # layer -> k, v and the result
    masks: dict[Window, Tensor] = field(default_factory=dict)

    def mask(self, window: Window) -> Tensor:
        """Returns the mask ``[T, L]`` of a layer with ``window``, true where a query sees a token."""
        if window not in self.masks:
            mask = []
            for query, members in zip(self.tokens, self.owners, strict=True):
                seen = {token for number in members for token in self.sequences[number].text(query)}
                seen = {token for token in seen if window.sees(query.position, token.position)}
                mask.append([token in seen for token in (*self.history, *self.tokens)])
            self.masks[window] = torch.tensor(mask)
        return self.masks[window]


class ReferenceCache(ABC):
    """A KV cache in plain PyTorch. Tests compare results and errors of the native caches with it.

    Use it on one thread. It is slow: it has a Python object for each token, and compares each query with each token.
    """

    kind: ClassVar[str]
    max_sequences: ClassVar[int]

    def __init__(self, config: CacheConfig) -> None:
        """Creates an empty cache. Refuses an invalid config."""
        check_config(config)
        self.config = config
        self._max_step_tokens = config.max_step_tokens or DEFAULT_MAX_STEP_TOKENS
        step = min(self._max_step_tokens, config.capacity)
        self._windows = [Window.of(layer, step) for layer in config.layers]
        self._dropping = [window for window in self._windows if window.size and window.slots < config.capacity]
        self._step: Step | None = None  # the open forward
        self._last: Step | None = None  # the last forward, whose layers may be called again until the next change
        self.clear()

    @property
    def capacity(self) -> int:
        """Returns the maximum number of positions in the cache."""
        return self.config.capacity

    @property
    def length(self) -> int:
        """Returns the present number of positions. A position that several sequences share counts once."""
        return len(distinct(self._sequences))

    def can_extend(self, n: int = 1) -> bool:
        """Returns whether ``n`` more positions fit."""
        n = integer("n", n)
        check_range("n", n, 0)
        return n <= self.capacity - self.length

    @property
    def formats(self) -> tuple[str, str]:
        """Returns the present formats of keys and values."""
        return self._formats[0].name, self._formats[1].name

    @abstractmethod
    def rewindable_to(self) -> int:
        """Returns the smallest length other than 0 that the only sequence can be rewound to."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Removes the only sequence's positions at or after ``length``."""

    def clear(self, *, release: bool = False) -> None:
        """Removes every position and restores the formats of the config. There are no buffers to ``release``."""
        self._refuse_in_step("clear the cache")
        formats, floats = formats_of(self.config)
        self._awaits_quantization = self.config.quantized_kv_start > 0
        self._formats = (floats, floats) if self._awaits_quantization else formats
        self._sequences = [self._empty() for _ in range(self.max_sequences)]
        self._declared: list[Members] | None = None  # the sequences of the next step's tokens

    def convert(self, k_format: str, v_format: str) -> None:
        """Converts stored and future rows to other formats, until the cache is cleared."""
        self._refuse_in_step("convert the cache")
        formats = format_of(k_format), format_of(v_format)
        check_formats(formats, self.config)
        self._convert(formats)

    def update_and_attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Sequence[int],
        scale: float,
        out_dtype: torch.dtype,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Writes a layer's rows, and returns the attention of its queries to the rows that they see.

        ``q`` is ``[1, n_heads, T, k_head_dim]``, ``k`` ``[1, n_kv_heads, T, k_head_dim]`` and ``v``
        ``[1, n_kv_heads, T, v_head_dim]``; the result is ``[1, n_heads, T, v_head_dim]`` in ``out_dtype``. ``sinks``
        ``[n_heads]`` add one score to each query, with a value of zeros. ``softcap`` bounds the scaled scores.

        A forward commits when every layer was called with the same positions, in any order. A repeated call of a layer
        with the same rows only attends: layers that share keys and values make such calls. A repeated call with other
        rows begins a new forward, in which the other layers keep their rows. A call with other positions, or after a
        refused call, begins a new forward without rows. An unfinished forward is rolled back.
        """
        try:
            self._check_inputs(layer, len(positions), q=q)
            _check_dtype("out_dtype", out_dtype)
            if sinks is not None and list(sinks.shape) != [q.shape[1]]:
                raise StatusError(f"expected sinks of shape [{q.shape[1]}], got {list(sinks.shape)}", Status.SHAPE)
        except StatusError:
            self.abort()
            raise
        fetched = self.update_and_fetch(layer, k, v, positions)
        return attention(q, *fetched, scale, out_dtype, sinks, softcap)

    def update_and_fetch(self, layer: int, k: Tensor, v: Tensor, positions: Sequence[int]) -> Fetched:
        """Writes a layer's rows, and returns the keys, the values and the mask for its queries.

        The keys ``[1, n_kv_heads, L, k_head_dim]`` and values ``[1, n_kv_heads, L, v_head_dim]`` are all stored rows in
        float32, with the new rows at the end. The mask ``[T, L]`` is true where a query sees a key.
        """
        try:
            positions = [integer("a position", position) for position in positions]
            self._check_inputs(layer, len(positions), k=k, v=v)
            step = self._step or self._last
            if step is None or positions != [token.position for token in step.tokens]:
                self.abort()
            elif layer in step.calls:
                old_k, old_v, fetched = step.calls[layer]
                if _same(k, old_k) and (self.config.layers[layer].values_in_keys or _same(v, old_v)):
                    return fetched
                self.abort()
                for other in itertools.takewhile(lambda called: called != layer, step.calls):
                    self._write(other, *step.calls[other][:2], positions)
            return self._write(layer, k, v, positions)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Rolls back the open forward, if there is one."""
        self._step = self._last = None

    def _write(self, layer: int, k: Tensor, v: Tensor, positions: list[int]) -> Fetched:
        step = self._step = self._step or self._plan(positions)
        keys = self._formats[0].stored(k[0])
        in_keys = self._in_keys(layer, keys)
        values = self._formats[1].stored(v[0]) if in_keys is None else in_keys
        if in_keys is None:
            self._check_values(layer, self._formats[1], values, v)
        else:
            self._check_values(layer, self._formats[0], keys, k)
        for index, token in enumerate(step.tokens):
            token.rows[layer] = keys[:, index], values[:, index]
        rows = [token.rows[layer] for token in (*step.history, *step.tokens)]
        keys, values = (torch.stack(one, dim=1).unsqueeze(0) for one in zip(*rows, strict=True))
        fetched = keys, values, step.mask(self._windows[layer])
        # The host may overwrite the tensors that it passed.
        step.calls[layer] = k.detach().clone(), v.detach().clone(), fetched
        if len(step.calls) == len(self.config.layers):
            self._step, self._last, self._declared = None, step, None
            self._put(step.sequences)
        return fetched

    @abstractmethod
    def _plan(self, positions: list[int]) -> Step:
        """Returns a step for tokens at these positions. Raises :class:`StatusError` if the cache refuses them."""

    def _step_of(self, positions: list[int], owners: list[Members], sequences: dict[int, TokenSequence]) -> Step:
        """Returns a step whose tokens belong to ``owners``. Adds the tokens to ``sequences``, which are copies."""
        if len(owners) != len(positions):
            raise invalid(f"the step has {len(positions)} tokens, but begin_step declared {len(owners)}")
        history = distinct(sequences.get(number, one) for number, one in enumerate(self._sequences))
        tokens = [Token(position) for position in positions]
        for index, (token, members) in enumerate(zip(tokens, owners, strict=True)):
            for number in members:
                sequence, tree = sequences[number], sequences[number].tree
                if tree.parents and (len(members) > 1 or not tree.n_pending):
                    told = f"a tree of {len(tree.parents)} nodes, {tree.n_pending} of them for this step"
                    raise StepError(f"sequence {number} carries {told}; it takes no other tokens before its commit")
                if token.position != sequence.expected:
                    place = f"token {index} of the step, the next of sequence {number}"
                    raise PositionError(f"expected position {sequence.expected} for {place}, got {token.position}")
                sequence.append(token)
        return Step(tokens, owners, sequences, history)

    def _check_room(self, step: Step) -> None:
        free, n_tokens = self.capacity - len(step.history), len(step.tokens)
        if n_tokens > free:
            raise CapacityError(f"a step of {n_tokens} tokens does not fit: {free} of {self.capacity} cells are free")

    def _check_count(self, n_tokens: int) -> None:
        """Refuses more tokens of one sequence than window layers can roll back."""
        for window in self._dropping:
            if n_tokens > window.step:
                most = f"window layers accept at most max_step_tokens, {window.step}"
                raise CapacityError(f"a step of {n_tokens} tokens is too long: {most}")

    def _check_floats(self, length: int) -> None:
        """Refuses more positions in float formats than the memory estimate includes."""
        most = min(max(self.config.quantized_kv_start - 1, 0) + self._max_step_tokens, self.capacity)
        if self._awaits_quantization and length > most:
            told = f"{length} positions in {self.formats[0]}, the maximum is {most}"
            raise CapacityError(f"{told}: quantized_kv_start - 1, and max_step_tokens {self._max_step_tokens}")

    def _check_values(self, layer: int, stored_as: Format, stored: Tensor, given: Tensor) -> None:
        """Refuses values that are not finite in a cache of several sequences: other sequences would get NaN from them.

        The native caches multiply masked rows by 0, and 0 times infinity is NaN. If values are in keys, all elements of
        the keys are checked.
        """
        rows = stored if stored_as.is_float else given
        if self.max_sequences > 1 and not torch.isfinite(rows).all():
            raise invalid(f"a value of layer {layer} is not finite as {stored_as.name}; other sequences would read it")

    def _in_keys(self, layer: int, key: Tensor) -> Tensor | None:
        """Returns the values that are in the keys of a layer; None if the layer has separate values."""
        config = self.config.layers[layer]
        return key[..., : config.value_dim] if config.values_in_keys else None

    def _check_exact(self, following: int, *sequences: TokenSequence) -> None:
        """Refuses to continue sequences at ``following`` if their next query would see dropped positions."""
        least = max(sequence.exact_from for sequence in sequences)
        if 0 < following < least:
            dropped = "the window layers have dropped what a query there sees"
            raise PositionError(f"cannot go on at {following}: {dropped}; a sequence can at 0, or at {least} or later")

    def _put(self, sequences: dict[int, TokenSequence]) -> None:
        """Replaces sequences by their new state. Quantizes all rows if ``quantized_kv_start`` is reached."""
        for number, sequence in sequences.items():
            if not sequence.tree.parents:
                sequence.drop()
            self._sequences[number] = sequence
        n_committed = len({token for one in self._sequences for token in one.tokens.values()})
        if self._awaits_quantization and n_committed >= self.config.quantized_kv_start:
            self._convert(formats_of(self.config)[0])

    def _convert(self, formats: Formats) -> None:
        for token in distinct(self._sequences):
            for layer, rows in token.rows.items():
                key = _converted(rows[0], self._formats[0], formats[0])
                value = self._in_keys(layer, key)
                token.rows[layer] = key, _converted(rows[1], self._formats[1], formats[1]) if value is None else value
        self._formats = formats
        # An explicit conversion also ends the wait for quantized_kv_start.
        self._awaits_quantization = False

    def _empty(self) -> TokenSequence:
        return TokenSequence({window: set() for window in self._dropping})

    def _refuse_in_step(self, what: str) -> None:
        if self._step:
            raise StepError(f"cannot {what} in the middle of a step")
        self._last = None

    def _check_inputs(self, layer: int, n_tokens: int, **tensors: Tensor) -> None:
        """Refuses ``q``, ``k`` or ``v`` whose dtype or shape does not fit the layer."""
        n_layers = len(self.config.layers)
        if not 0 <= integer("layer_id", layer) < n_layers:
            raise StatusError(f"expected a layer from 0 to {n_layers - 1}, got {layer}", Status.SHAPE)
        if n_tokens == 0:
            raise invalid("a step needs at least 1 token")
        config = self.config.layers[layer]
        for name, tensor in tensors.items():
            _check_dtype(name, tensor.dtype)
            shape, n_kv_heads = list(tensor.shape), config.n_kv_heads
            head_dim = config.value_dim if name == "v" else config.k_head_dim
            share = max(shape[1] // n_kv_heads, 1) if name == "q" and len(shape) == 4 else 1
            if shape != [1, n_kv_heads * share, n_tokens, head_dim]:
                heads = f"{n_kv_heads} or a multiple" if name == "q" else f"{n_kv_heads}"
                expected = f"{name} of shape [1, {heads}, {n_tokens}, {head_dim}] for layer {layer}"
                raise StatusError(f"expected {expected}, got {shape}", Status.SHAPE)


def _converted(row: Tensor, old: Format, new: Format) -> Tensor:
    return row if old.name == new.name else new.stored(row)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS.values():
        raise StatusError(f"expected {name} in float32, float16 or bfloat16, got {dtype}", Status.DTYPE)


def _same(rows: Tensor, others: Tensor) -> bool:
    return rows.dtype == others.dtype and rows.device == others.device and torch.equal(rows, others)


class ContiguousCache(ReferenceCache):
    """One sequence. A step that starts at its length appends. A step that starts below its length first rewinds."""

    kind = "contiguous"
    max_sequences = 1

    def rewindable_to(self) -> int:
        return self._sequences[0].exact_from

    def rewind(self, length: int) -> None:
        self._refuse_in_step("rewind the cache")
        if not 0 <= integer("length", length) <= self.length:
            raise PositionError(f"cannot rewind to length {length}: the sequence has {self.length} positions")
        self._check_exact(length, self._sequences[0])
        self._sequences[0] = self._sequences[0].part(range(length))

    def _plan(self, positions: list[int]) -> Step:
        start, n_tokens = positions[0], len(positions)
        if not 0 <= start <= self.length:
            raise PositionError(f"a step begins at position {start}; expected 0 to {self.length}, the next position")
        step = self._step_of(positions, [(0,)] * n_tokens, {0: self._sequences[0].part(range(start))})
        self._check_room(step)
        self._check_exact(start, self._sequences[0])
        self._check_count(n_tokens)
        self._check_floats(start + n_tokens)
        return step
