"""The reference state of recurrent layers: all inputs so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from etkv.errors import PositionError, Status, StatusError, StepError
from etkv.reference.errors import invalid
from etkv.reference.recurrence import ACTIVATIONS, convolve, scan

Rows = tuple[Tensor | None, ...]
"""A layer's inputs for one token, or for several tokens."""

_TOKENS = 2
"""The axis of tokens, in all inputs and outputs."""


@dataclass
class _Step:
    """A forward: the sequence of each token, and the histories after the forward."""

    owners: list[int]
    positions: list[int]
    histories: dict[int, list[dict[int, Rows]]]
    called: set[int] = field(default_factory=set)


class RecurrentState:
    """The reference for the states of a model's recurrent layers, for any number of sequences.

    It keeps every input of every layer, and each call runs its layer from the beginning of the sequence. So a rewind
    only shortens a list of inputs, and a fork only copies it. A step that begins below the length of its sequence first
    rewinds the sequence to that position.
    """

    def __init__(self, n_layers: int) -> None:
        """Create an empty state of ``n_layers`` convolutions and recurrences."""
        self.n_layers = n_layers
        self._histories: dict[int, list[dict[int, Rows]]] = {}  # sequence -> for each token: layer -> rows
        self._declared: list[int] | None = None
        self._step: _Step | None = None

    def length(self, sequence: int = 0) -> int:
        """Return the number of tokens of ``sequence``."""
        return len(self._histories.get(sequence, []))

    def begin_step(self, sequences: Sequence[int]) -> None:
        """Declare the sequence of each token of the next step. Undeclared tokens belong to sequence 0."""
        self._refuse_in_step()
        self._declared = list(sequences)

    def rewind(self, length: int, sequence: int = 0) -> None:
        """Remove the tokens of ``sequence`` at or after position ``length``."""
        self._refuse_in_step()
        if not 0 <= length <= self.length(sequence):
            raise PositionError(f"cannot rewind to length {length}: the sequence has {self.length(sequence)} positions")
        self._histories[sequence] = self._histories.get(sequence, [])[:length]

    def fork(self, source: int, target: int) -> None:
        """Make ``target`` a copy of ``source``."""
        self._refuse_in_step()
        self._histories[target] = list(self._histories.get(source, []))

    def abort(self) -> None:
        """Roll back the open forward, if there is one."""
        self._step = None

    def update_and_convolve(
        self,
        layer: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        positions: list[int],
        activation: str,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Store the inputs of a convolution, and return its outputs for them."""
        if activation not in ACTIVATIONS:
            raise invalid(f"unknown activation {activation!r}; available: {', '.join(ACTIVATIONS)}")
        if x.dim() != 3 or x.shape[0] != 1 or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
            shapes = f"{list(x.shape)} and {list(weight.shape)}"
            raise _shape(f"expected x of shape [1, channels, T] and weight of [channels, W], got {shapes}")

        def run(rows: Rows) -> Tensor:
            (inputs,) = rows
            assert inputs is not None
            return convolve(inputs, weight, bias, activation)

        return self._run(layer, (x,), positions, run).to(out_dtype)

    def update_and_scan(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        positions: list[int],
        scale: float,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Store the inputs of a recurrence, and return its outputs for them."""
        heads = v.shape[1] if v.dim() == 4 else 0
        n_tokens = len(positions)
        of_head = [1, heads, n_tokens]
        good = (
            q.dim() == 4
            and q.shape == k.shape
            and [q.shape[0], q.shape[2]] == [1, n_tokens]
            and list(v.shape[:3]) == of_head
            and (heads % max(k.shape[1], 1)) == 0
            and list(g.shape) in (of_head, [*of_head, k.shape[3]])
            and (beta is None or list(beta.shape) == of_head)
        )
        if not good:
            shapes = ", ".join("none" if given is None else str(list(given.shape)) for given in (q, k, v, g, beta))
            raise _shape(
                "expected q and k of shape [1, Hk, T, k_dim], v of [1, H, T, v_dim], g of [1, H, T] or "
                f"[1, H, T, k_dim] and beta of [1, H, T] or none, for H a multiple of Hk, got {shapes}"
            )

        def run(rows: Rows) -> Tensor:
            q, k, v, g, beta = rows
            assert q is not None and k is not None and v is not None and g is not None
            return scan(q, k, v, g, beta, scale)

        return self._run(layer, (q, k, v, g, beta), positions, run).to(out_dtype)

    def _run(self, layer: int, inputs: Rows, positions: list[int], run: Callable[[Rows], Tensor]) -> Tensor:
        """Store ``inputs``, run ``layer`` from the beginning of each sequence, and return the step's outputs."""
        if not 0 <= layer < self.n_layers:
            self.abort()
            raise _shape(f"expected a layer from 0 to {self.n_layers - 1}, got {layer}")
        try:
            step = self._open(layer, positions)
        except StatusError:
            self.abort()
            raise
        outputs: list[Tensor] = [torch.empty(0)] * len(positions)
        for sequence in dict.fromkeys(step.owners):
            mine = [at for at, owner in enumerate(step.owners) if owner == sequence]
            history = step.histories[sequence]
            for at in mine:
                token = history[step.positions[at]]
                token[layer] = tuple(None if rows is None else rows.select(_TOKENS, at).clone() for rows in inputs)
            columns = zip(*(token[layer] for token in history), strict=True)
            whole = run(tuple(None if rows[0] is None else _stack(rows) for rows in columns))
            for at in mine:
                outputs[at] = whole.select(_TOKENS, step.positions[at])
        step.called.add(layer)
        if len(step.called) == self.n_layers:
            self._histories |= step.histories
            self._step = self._declared = None
        return torch.stack(outputs, dim=_TOKENS)

    def _open(self, layer: int, positions: list[int]) -> _Step:
        """Return the open forward. Open a new one if its positions differ, or if ``layer`` was called in it."""
        if self._step is not None and self._step.positions == positions and layer not in self._step.called:
            return self._step
        owners = self._declared or [0] * len(positions)
        if len(owners) != len(positions):
            raise invalid(f"the step has {len(positions)} tokens, but begin_step declared {len(owners)}")
        histories: dict[int, list[dict[int, Rows]]] = {}
        for owner, position in zip(owners, positions, strict=True):
            held = self._histories.get(owner, [])
            if owner not in histories and 0 <= position <= len(held):
                histories[owner] = held[:position]
            if owner not in histories or len(histories[owner]) != position:
                following = len(histories.get(owner, held))
                raise PositionError(f"expected position {following} for sequence {owner}, got {position}")
            histories[owner].append({})
        self._step = _Step(owners, positions, histories)
        return self._step

    def _refuse_in_step(self) -> None:
        if self._step is not None:
            raise StepError("cannot change the state in the middle of a step")


def _stack(rows: Sequence[Tensor | None]) -> Tensor:
    return torch.stack([row for row in rows if row is not None], dim=_TOKENS)


def _shape(message: str) -> StatusError:
    return StatusError(message, Status.SHAPE)
