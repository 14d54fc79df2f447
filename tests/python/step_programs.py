"""Random programs of cache operations, and what a cache answers after each of them.

A *program* is a list of :class:`Operation`. An operation is an *action*, and the status of its refusal, or None. There
are two kinds of actions:

``Call(name, arguments)``
    A call of this method of the cache, with these positional arguments: ``rewind(length)``, ``clear()``,
    ``seq_cp(source, target, begin, end)``, ``seq_rm(sequence, begin, end)``, ``seq_keep(sequence)``, ``propose(parents,
    sequence)``, ``commit(accepted, sequence)``. If ``end`` is None, the range has no upper end.

``Step(positions, owners, seed)``
    One forward over every layer, with a token for each position. ``owners`` are the sequences of each token, or None
    without a declaration. Before the forward, ``begin_step`` declares the owners, or ``begin_step_shared`` if a token
    has several sequences. If the declaration is refused, the step is refused without a forward. :func:`step_rows`
    computes the queries, keys and values of a layer from ``seed``.

A refused operation does not change the cache, with one exception: a declaration holds until a step commits. So a step
after a refused step may use its declaration again.

:func:`generate` creates a program from a kind, a config and a seed. It applies operations to a reference cache. From
the cache's lengths it derives valid operations, and the cache decides whether an operation is refused. :func:`run`
applies a program to a cache, and returns an :class:`Outcome` for each operation: the status of a refusal, the outputs
of every layer, and the answers of the cache afterwards. Two caches agree if their outcomes have equal ``refused``,
equal ``answers`` and close ``outputs``.
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
    "all_rows",
    "answers",
    "declare",
    "generate",
    "one_thread",
    "run",
    "step_rows",
]

Forward = Callable[[Tensor, list[Tensor]], list[Tensor]]
"""A function of the positions and of the queries, keys and values of every layer that returns the attention of every
layer, ``[1, n_heads, T, v_head_dim]``.
"""


@dataclass
class Outcome:
    """The outcome of an operation."""

    refused: int | None
    """The status of the error, or None."""
    message: str
    outputs: list[Tensor]
    """The output of each layer, for a committed step."""
    answers: dict[str, Any]
    """The answers of the cache afterwards: see :func:`answers`."""


def generate(kind: str, config: CacheConfig, seed: int, n_operations: int, most_tokens: int = 6) -> list[Operation]:
    """Return a program for a cache of this kind and config. Equal arguments give equal programs on every machine.

    A quarter to a third of the operations are refused. No step has more than ``most_tokens`` tokens. Some refused
    steps are exceptions: they have at most one token more than the capacity.
    """
    return step_generator.Generator(kind, config, seed, most_tokens).program(n_operations)


def run(program: Sequence[Operation], cache: Any, forward: Forward, group: int = 2) -> list[Outcome]:
    """Apply a program to ``cache``, which has a ``config`` and the methods of its kind.

    A step calls ``forward``, which raises an :class:`EtkvError` with a ``status`` to refuse the step. There are
    ``group`` query heads for each KV head.
    """
    with one_thread():
        return [_outcome(operation.action, cache, forward, group) for operation in program]


def _outcome(action: Call | Step, cache: Any, forward: Forward, group: int) -> Outcome:
    outputs, refused, message = [], None, ""
    try:
        if isinstance(action, Call):
            getattr(cache, action.name)(*action.arguments)
        else:
            declare(cache, action)
            outputs = forward(torch.tensor(action.positions), all_rows(cache.config, action, group))
    except EtkvError as error:
        refused, message = int(getattr(error, "status", -1)), str(error)
    return Outcome(refused, message, outputs, answers(cache))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: for small rows, threads cost several times as much as the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def declare(cache: Any, step: Step) -> None:
    """Declare the sequences of a step's tokens, if the step has ``owners``."""
    if step.owners is None:
        return
    if all(len(members) == 1 for members in step.owners):
        cache.begin_step([members[0] for members in step.owners])
    else:
        cache.begin_step_shared([list(members) for members in step.owners])


def step_rows(
    config: CacheConfig, step: Step, layer: int, group: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's queries ``[1, group * n_kv_heads, T, k_head_dim]``, keys and values for a layer."""
    random = torch.Generator().manual_seed(step.seed * 1000 + layer)
    facts, n_tokens = config.layers[layer], len(step.positions)

    def normal(heads: int, head_dim: int) -> Tensor:
        return torch.randn(1, heads, n_tokens, head_dim, generator=random).to(dtype)

    query, key, value = (
        normal(group * facts.n_kv_heads, facts.k_head_dim),
        normal(facts.n_kv_heads, facts.k_head_dim),
        normal(facts.n_kv_heads, facts.value_dim),
    )
    return query, key, key[..., : facts.value_dim].clone() if facts.values_in_keys else value


def all_rows(config: CacheConfig, step: Step, group: int = 2) -> list[Tensor]:
    """Return a step's queries, keys and values for every layer."""
    return [rows for layer in range(len(config.layers)) for rows in step_rows(config, step, layer, group)]


def answers(cache: Any) -> dict[str, Any]:
    """Return the results of the cache's queries, such as lengths, by name."""
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
