"""An answer does not depend on the way by which its text got into the cache: on the CPU in float32, logits are
bitwise equal.

The tests generate texts for models with full history and with windows, for both backends, every kind of cache and
several formats. A text is read in steps, and then a question in one step and greedy tokens run. The ways are: an empty
cache, a used cache, a cache attached to a prefix of the same or a longer text, a fork, a cache that was compacted or
saved and loaded, and combinations of these. If the steps differ, rounding differs, but ids are the same.
``ETKV_ANSWER_SEEDS`` is the number of texts for each program, kind and format.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

import etkv
import reference
from reference import Program, Variant

SEEDS = int(os.environ.get("ETKV_ANSWER_SEEDS", "1"))
MODELS = ("tiny-llama", "tiny-mistral-window")
SESSIONS = {"contiguous": etkv.DecodeSession, "seq": etkv.SeqSession, "tree": etkv.TreeSession}
CAPACITY, MAX_STEP_LENGTH, DECODE = 256, 24, 5
Row = np.ndarray


@pytest.fixture(scope="module")
def programs() -> dict[tuple[str, str], Program]:
    variants = [Variant(model, backend=backend) for model in MODELS for backend in ("mlx", "cpu")]
    return {(variant.backend, variant.model): made for variant, made in reference.programs(variants).items()}


@dataclass
class Text:
    """A text in steps, and the question that follows it."""

    steps: list[list[int]]
    question: list[int]

    @property
    def length(self) -> int:
        return sum(map(len, self.steps))


def some_ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(5, 250) for _ in range(n)]


def some_text(rng: random.Random) -> Text:
    steps = [some_ids(rng, rng.randint(1, MAX_STEP_LENGTH)) for _ in range(rng.randint(2, 7))]
    return Text(steps, some_ids(rng, rng.randint(1, 9)))


class Reader:
    """A session and a program that is bound to it."""

    def __init__(self, program: Program, kind: str, format: str) -> None:
        facts = etkv.read_kv_cache_metadata(program.path)
        config = etkv.CacheConfig(
            facts.layers, CAPACITY, k_format=format, v_format=format, max_step_tokens=MAX_STEP_LENGTH
        )
        self.cache = SESSIONS[kind](config, backend=facts.backend)
        self.program = etkv.load(program.path, self.cache, warm_up=False)

    def close(self) -> None:
        self.program.close()
        self.cache.close()

    def step(self, ids: Sequence[int], sequence: int | None = None) -> Row:
        """Run a step of a sequence, and return its rows of logits."""
        if sequence is None:
            start = self.cache.length
        else:
            start = self.cache.seq_next(sequence)
            self.cache.begin_step([sequence] * len(ids))
        rows: Row = self.program.forward(list(ids), list(range(start, start + len(ids))))
        return rows

    def read(self, steps: Sequence[Sequence[int]], sequence: int | None = None) -> None:
        for ids in steps:
            self.step(ids, sequence)

    def answer(self, question: Sequence[int], sequence: int | None = None) -> Row:
        """Run the question and then greedy tokens, and return all rows."""
        rows = [self.step(question, sequence)]
        for _ in range(DECODE):
            rows.append(self.step([int(rows[-1][-1].argmax())], sequence))
        return np.concatenate(rows)


Make = Callable[[], Reader]


def ways(text: Text, make: Make, kind: str, rng: random.Random, tmp_path) -> dict[str, Row]:
    """Return the rows of the answer for each way by which the text gets into the cache."""
    made: dict[str, Row] = {}

    cold = make()
    cold.read(text.steps)
    made["cold"] = cold.answer(text.question)

    cold.cache.clear(release=rng.random() < 0.5)
    cold.read(text.steps)
    path = tmp_path / "text.safetensors"
    cold.cache.save(path, fingerprint="model")
    prefix = cold.cache.freeze()
    made["frozen"] = cold.answer(text.question)

    attached = make()
    attached.cache.attach(prefix, text.length)
    made["attached"] = attached.answer(text.question)
    # Rewind into the prefix and continue with another text. This must not change other caches. Windows may have
    # dropped positions to which the prefix could rewind.
    least = max(attached.cache.rewindable_to(), 1)
    attached.cache.rewind(rng.randint(least, max(least, text.length)))
    attached.read([some_ids(rng, rng.randint(1, 9))])
    attached.close()

    # Freeze a text whose first part is an attached prefix.
    chained = make()
    n = rng.randint(1, len(text.steps) - 1)
    chained.read(text.steps[:n])
    first = chained.cache.freeze()
    chained.close()
    chained = make()
    chained.cache.attach(first, first.length)
    del first
    chained.read(text.steps[n:])
    second = chained.cache.freeze()
    chained.close()
    again = make()
    again.cache.attach(second, text.length)
    del second
    made["attached to a prefix after a prefix"] = again.answer(text.question)
    again.close()

    # Attach to a part of a prefix that is longer than the text.
    longer = make()
    longer.read(text.steps)
    longer.read([some_ids(rng, rng.randint(1, 9))])
    more = longer.cache.freeze()
    longer.close()
    if more.rewindable_to <= text.length:
        shorter = make()
        shorter.cache.attach(more, text.length)
        made["attached to a part of a prefix"] = shorter.answer(text.question)
        shorter.close()

    loaded = make()
    assert loaded.cache.load(path, fingerprint="model") == []
    made["saved and loaded"] = loaded.answer(text.question)
    loaded.close()

    if kind != "contiguous":
        made |= among_others(text, make, prefix, rng)
    cold.close()
    made["attached when all others are gone"] = alone(text, make, prefix)
    return made


def alone(text: Text, make: Make, prefix: etkv.Prefix) -> Row:
    reader = make()
    reader.cache.attach(prefix, text.length)
    del prefix
    rows = reader.answer(text.question)
    reader.close()
    return rows


def among_others(text: Text, make: Make, prefix: etkv.Prefix, rng: random.Random) -> dict[str, Row]:
    """Return the rows of a sequence in a cache with other sequences, for each way by which it gets into the cache."""
    made: dict[str, Row] = {}
    reader = make()
    reader.cache.attach(prefix, text.length)
    reader.cache.seq_cp(0, 1)
    made["forked from a prefix"] = reader.answer(text.question, 1)
    reader.cache.seq_rm(1)
    reader.cache.seq_cp(0, 2)
    reader.answer(some_ids(rng, 3), 0)
    reader.cache.seq_rm(0)
    reader.cache.compact()
    made["compacted"] = reader.answer(text.question, 2)
    reader.close()
    return made


@pytest.mark.parametrize("format", ["f32", "nvfp4"])
@pytest.mark.parametrize("kind", SESSIONS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_every_way_into_a_cache_gives_the_same_answer(programs, backend, model, kind, format, tmp_path):
    program = programs[backend, model]

    def make() -> Reader:
        return Reader(program, kind, format)

    for seed in range(SEEDS):
        rng = random.Random(f"{backend} {model} {kind} {format} {seed}")
        text = some_text(rng)
        made = ways(text, make, kind, rng, tmp_path)
        cold = made["cold"]
        different = {way: float(np.abs(rows - cold).max()) for way, rows in made.items() if (rows != cold).any()}
        assert not different, f"seed {seed}: {text.length} tokens before {len(text.question)}"

        # With other steps rounding differs, but ids are the same.
        others = make()
        ids = [token for step in text.steps for token in step]
        others.read([ids[at : at + 11] for at in range(0, len(ids), 11)])
        rows = others.answer(text.question)
        others.close()
        assert (rows.argmax(axis=1) == cold.argmax(axis=1)).all(), f"seed {seed}"
        if format == "f32":
            np.testing.assert_allclose(rows, cold, atol=2e-4)
