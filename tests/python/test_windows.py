"""Models with windows: programs and their caches against transformers, with texts far longer than the window."""

from __future__ import annotations

import numpy as np
import pytest

import reference
from reference import STORY, Variant

FAMILIES = ("tiny-mistral-window", "tiny-qwen2-mixed", "tiny-gemma3", "tiny-phi3")
MODELS = [variant.model for variant in reference.chosen(map(Variant, FAMILIES))]
WINDOW, PROMPT, DECODE = 64, 150, 80


@pytest.fixture(scope="module")
def programs():
    return reference.programs([Variant(model) for model in MODELS])


@pytest.mark.parametrize("chunk", [0, 1, 7])
@pytest.mark.parametrize("model", MODELS)
def test_ids_and_logits_equal_those_of_transformers(programs, model, chunk):
    program = programs[Variant(model)]
    prompt = reference.tokenize(program, STORY)[:PROMPT]
    ran = reference.forward(program, prompt, decode=DECODE, chunk=chunk, rows="all", kv_format="f32")

    whole = reference.logits(reference.load_hf(program.hf), [*prompt, *ran.ids[:DECODE]])
    np.testing.assert_allclose(ran.logits, whole, atol=2e-4)
    assert ran.ids == whole[PROMPT - 1 :].argmax(axis=1).tolist()


@pytest.mark.parametrize("model", MODELS)
def test_the_window_makes_a_difference(programs, model):
    """Without the window the answers differ, so the comparison detects the window."""
    program = programs[Variant(model)]
    prompt = reference.tokenize(program, STORY)[:PROMPT]
    hf = reference.load_hf(program.hf)
    seen = reference.logits(hf, prompt)
    hf.config.sliding_window = 4 * PROMPT
    unlimited = reference.logits(hf, prompt)
    assert np.abs(seen[:WINDOW] - unlimited[:WINDOW]).max() < 1e-4
    assert np.abs(seen[-1] - unlimited[-1]).max() > 0.01
