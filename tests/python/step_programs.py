"""Random programs of steps, and a runner that applies one to a cache.

A *program* is a list of :class:`Operation`. Each is an *action*, and the status that a cache refuses it with, or None
where it works. An action is one of two:

``Call(name, arguments)``
    The method of that name of the cache's face, called with these positional arguments: ``rewind(length)``,
    ``clear()``, ``seq_cp(source, target, begin, end)``, ``seq_rm(sequence, begin, end)``, ``seq_keep(sequence)``,
    ``propose(parents, sequence)``, ``commit(accepted, sequence)``. ``end`` is None for all positions that follow.

``Step(positions, owners, seed)``
    One forward over every layer, with a token for each position. Where ``owners`` is not None, it has the sequences of
    each token, and ``begin_step`` is called with them before the forward, or ``begin_step_shared`` where a token has
    several. Where that call is refused, there is no forward, and the step is refused. The queries, keys and values of a
    layer are those of :func:`step_rows`, made from ``seed``.

An operation that is refused leaves the cache as it was, but for one thing: what ``begin_step`` said holds until a step
has worked. Programs use that: a step after a refused one may take up its owners without saying them again.

:func:`generate` makes a program from a kind, a config and a seed, and nothing else. It asks a reference cache of its
own for lengths and the like to find operations that work, and takes that cache's word for whether an operation does.
:func:`run` applies a program to a cache, and returns an :class:`Outcome` for each operation: the status that it was
refused with, the outputs of every layer, and what the cache answers afterwards. Two caches agree if their outcomes do:
``refused`` and ``answers`` are equal, ``outputs`` are close. For a cache whose program runs all layers at once, do what
:func:`run` does with :func:`declare`, :func:`step_rows` and :func:`answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import step_generator
from etkv.config import CacheConfig
from etkv.errors import EtkvError
from step_generator import SEQUENCES, Call, Operation, Step

__all__ = [
    "SEQUENCES",
    "Call",
    "Operation",
    "Outcome",
    "Step",
    "answers",
    "declare",
    "generate",
    "one_thread",
    "run",
    "step_rows",
]

Attend = Callable[[int, Tensor, Tensor, Tensor, Sequence[int]], Tensor]
"""Layer, queries, keys, values and positions to the attention: ``[1, n_heads, T, v_head_dim]``."""


@dataclass
class Outcome:
    """What became of an operation."""

    refused: int | None
    """The status of the error, or None."""
    message: str
    outputs: list[Tensor]
    """Of each layer, for a step that worked."""
    answers: dict[str, Any]
    """What the cache says afterwards: see :func:`answers`."""


def generate(kind: str, config: CacheConfig, seed: int, n_operations: int, most_tokens: int = 6) -> list[Operation]:
    """A program for a cache of this kind and config: the same for the same arguments, on every machine.

    A quarter to a third of the operations are refused. No step has more than ``most_tokens`` tokens, but for some that
    are refused, which have at most one more than the capacity.
    """
    return step_generator.Generator(kind, config, seed, most_tokens).program(n_operations)


def run(program: Sequence[Operation], cache: Any, attend: Attend, group: int = 2) -> list[Outcome]:
    """Applies a program to a cache that has the methods of its kind's face, and ``config``.

    Steps call ``attend`` once a layer, in order. It raises what the cache refuses, an :class:`EtkvError` with a
    ``status``; the layers that follow are not called then. There are ``group`` query heads for each KV head.
    """
    with one_thread():
        return [_outcome(operation.action, cache, attend, group) for operation in program]


def _outcome(action: Call | Step, cache: Any, attend: Attend, group: int) -> Outcome:
    outputs, refused, message = [], None, ""
    try:
        if isinstance(action, Call):
            getattr(cache, action.name)(*action.arguments)
        else:
            declare(cache, action)
            for layer in range(len(cache.config.layers)):
                rows = step_rows(cache.config, action, layer, group)
                outputs.append(attend(layer, *rows, action.positions))
    except EtkvError as error:
        refused, message, outputs = int(error.status), str(error), []
    return Outcome(refused, message, outputs, answers(cache))


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch on one thread: to hand it rows as small as these takes several times as long as the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def declare(cache: Any, step: Step) -> None:
    """Says whose the tokens of a step are, where the step does."""
    if step.owners is None:
        return
    if all(len(members) == 1 for members in step.owners):
        cache.begin_step([members[0] for members in step.owners])
    else:
        cache.begin_step_shared([list(members) for members in step.owners])


def step_rows(
    config: CacheConfig, step: Step, layer: int, group: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries ``[1, group * n_kv_heads, T, k_head_dim]``, keys and values that a step brings to a layer."""
    random = torch.Generator().manual_seed(step.seed * 1000 + layer)
    facts, n_tokens = config.layers[layer], len(step.positions)

    def normal(heads: int, head_dim: int) -> Tensor:
        return torch.randn(1, heads, n_tokens, head_dim, generator=random).to(dtype)

    return (
        normal(group * facts.n_kv_heads, facts.k_head_dim),
        normal(facts.n_kv_heads, facts.k_head_dim),
        normal(facts.n_kv_heads, facts.value_dim),
    )


def answers(cache: Any) -> dict[str, Any]:
    """What a cache says of itself, by question."""
    length, capacity = cache.length, cache.capacity
    found = {
        "length": length,
        "can_extend": [cache.can_extend(n) for n in (0, 1, capacity - length, capacity - length + 1)],
        "formats": tuple(cache.formats),
    }
    if not hasattr(cache, "seq_len"):
        return {**found, "rewindable_to": cache.rewindable_to()}
    found["sequences"] = list(cache.sequences())
    for sequence in SEQUENCES:
        found[f"sequence {sequence}"] = (
            cache.seq_len(sequence),
            cache.seq_next(sequence),
            cache.seq_rewindable_to(sequence),
            cache.seq_positions(sequence),
            cache.tree_len(sequence) if hasattr(cache, "tree_len") else 0,
        )
    return found
