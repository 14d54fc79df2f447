"""Logits of every family equal those of transformers: all rows of a prompt in chunks, and of 32 later steps."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import reference
import tiny_models
from etkv.description import describe_program
from reference import STORY, Program, Variant

# test_model_precision tests Qwen2, Llama and Qwen3 in other dtypes, and test_windows tests windows.
VARIANTS = reference.chosen(
    [
        Variant("tiny-llama"),
        Variant("tiny-qwen3"),
        Variant("tiny-mistral-window"),
        Variant("tiny-gemma3"),
        Variant("tiny-gemma3", "f32", "4w"),
        Variant("tiny-gemma3", "bf16"),
        Variant("tiny-phi"),
        Variant("tiny-phi3"),
        Variant("tiny-smollm3"),
        Variant("tiny-mixtral"),
        Variant("tiny-qwen3-moe"),
        Variant("tiny-qwen3-moe", "f32", "4w"),
        Variant("tiny-qwen3-moe", "f32", "8w"),
        Variant("tiny-qwen3-moe", "bf16"),
    ]
)
PROMPT, DECODE = 70, 32
CAPTURED = {"tiny-llama", "tiny-qwen3", "tiny-mistral-window", "tiny-gemma3", "tiny-phi3", "tiny-smollm3"}
"""The families whose steps of a few tokens run as CUDA graphs in half precision."""


@pytest.fixture(scope="module")
def programs() -> dict[Variant, Program]:
    return reference.programs(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_logits_equal_those_of_transformers(programs, variant):
    program = programs[variant]
    hf = reference.from_weights(program)
    prompt = reference.tokenize(program, STORY)[:PROMPT]
    for chunk in (0, 7):
        ran = reference.forward(program, prompt, decode=DECODE, chunk=chunk, rows="all")
        expected = reference.logits(hf, prompt + ran.ids[:-1])
        if variant.dtype == "f32":
            np.testing.assert_allclose(ran.logits, expected, rtol=1e-4, atol=2e-4)
            assert ran.ids == expected[PROMPT - 1 :].argmax(axis=1).tolist()
        error = _error(variant, ran.logits - expected)
        reference.note(f"{variant}, chunk {chunk}: rms error {error:.1e}, spread {reference.spread(expected):.1e}")
        if variant.dtype != "f32":
            usual = _error(variant, reference.logits(hf, prompt + ran.ids[:-1], variant.dtype) - expected)
            assert error < 1.5 * usual


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is for Linux")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_steps_on_cuda_are_those_of_known_decoders(programs, variant):
    steps = describe_program(programs[variant].path)["steps_on_cuda"]
    if variant.model not in CAPTURED:
        assert steps.startswith("instruction ")
    elif variant.dtype == "f32":
        assert steps == "it computes in float32, not in float16 or bfloat16"
    else:
        assert steps == "captured"


def _error(variant: Variant, difference: np.ndarray) -> float:
    """Return the error of all rows, or of the median row for a mixture of experts.

    If two experts have nearly equal scores for a token, a difference in the last bit decides which one is chosen.
    """
    if variant.model in tiny_models.MIXTURES:
        return float(np.median([reference.rms(row) for row in difference]))
    return reference.rms(difference)
