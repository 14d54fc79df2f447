"""A program of the MLX delegate returns the same logits with and without the passes.

``gpu`` selects the passes of a GPU, here on a CPU.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import etkv
import reference
from reference import STORY, Program, Variant

VARIANTS = reference.chosen(
    [
        Variant("tiny-llama"),
        Variant("tiny-llama", "f32", "4w"),
        Variant("tiny-llama", "f16"),
        Variant("tiny-llama-untied", "f32", "4w"),
        Variant("tiny-qwen2"),
        Variant("tiny-qwen2", "bf16", "4w"),
        Variant("tiny-qwen3"),
        Variant("tiny-mistral-window"),
        Variant("tiny-gemma3"),
        Variant("tiny-gemma3", "f32", "4w"),
        Variant("tiny-gemma3", "bf16"),
        Variant("tiny-phi"),
        Variant("tiny-phi3"),
        Variant("tiny-smollm3"),
        Variant("tiny-qwen3-moe"),
        Variant("tiny-qwen3-moe", "f32", "4w"),
    ]
)
PROMPT, DECODE = 40, 6
ENDS = [7, PROMPT, *range(PROMPT + 1, PROMPT + DECODE + 1)]
"""The positions at which steps end."""


@pytest.fixture(scope="module")
def programs() -> dict[Variant, Program]:
    return reference.programs(VARIANTS)


def logits(program: Program, ids: list[int], passes: str, rows: str = "all") -> np.ndarray:
    """Return the logits of a prompt in two steps, and of single tokens after it."""
    config = etkv.CacheConfig(
        etkv.read_kv_cache_metadata(program.path).layers, len(ids), k_format="f32", v_format="f32"
    )
    with (
        etkv.DecodeSession(config) as session,
        etkv.load(program.path, session, logits=rows, passes=passes) as loaded,
    ):
        steps = itertools.pairwise([0, *ENDS])
        made = [loaded.forward(ids[start:stop], list(range(start, stop))) for start, stop in steps]
    return np.concatenate(made)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_logits_are_the_same_with_and_without(programs, variant):
    program = programs[variant]
    ids = (reference.tokenize(program, STORY) * 2)[: PROMPT + DECODE]
    without = logits(program, ids, "none")
    for passes in ("default", "gpu"):
        found = logits(program, ids, passes)
        difference, spread = reference.rms(found - without), reference.spread(without)
        reference.note(f"{variant}, {passes}: rms difference {difference:.1e}, spread {spread:.1e}")
        if variant.dtype == "f32":
            np.testing.assert_allclose(found, without, rtol=1e-4, atol=5e-5)
        assert difference < 0.02 * spread
    # A program that returns the last row only drops the other rows after the last layer's attention.
    expected = without[[end - 1 for end in ENDS]]
    for passes in ("none", "default", "gpu"):
        last = logits(program, ids, passes, "last")
        if variant.dtype == "f32":
            np.testing.assert_allclose(last, expected, rtol=1e-4, atol=1e-4)
        assert reference.rms(last - expected) < 0.02 * spread
