"""The comparison of families with transformers finds differences in rows of each kind of run, and in greedy ids."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import etkv.export
import family_comparison
import family_sweep
import reference
import tiny_families
from family_comparison import TOLERANCE, Rows, TransformersLogits

KINDS = (
    "a prompt",
    "tokens",
    "another text after a rewind",
    "the last token of a chunk",
    "greedy tokens",
    "a batch",
    "a fork",
    "the source of a fork",
    "a fork after a rewind",
)

SAID = "logits differ, as a fraction of their spread: "


@pytest.fixture(scope="module")
def found(llama) -> list[Rows]:
    """Return the rows that the program of tiny-llama computes."""
    return family_comparison.runs(llama.path)


@pytest.fixture(scope="module")
def expected(llama) -> TransformersLogits:
    return TransformersLogits(reference.load_hf(llama.hf))


def changed(found: list[Rows], what: str, **changes) -> list[Rows]:
    """Return ``found`` with changes in the last rows of the kind ``what``."""
    at = max(number for number, rows in enumerate(found) if rows.what == what)
    return [*found[:at], dataclasses.replace(found[at], **changes), *found[at + 1 :]]


def last(found: list[Rows], what: str) -> Rows:
    return [rows for rows in found if rows.what == what][-1]


def test_a_program_equals_its_model(found, expected):
    assert tuple(dict.fromkeys(rows.what for rows in found)) == KINDS
    assert family_comparison.difference(found, expected) == ""
    expected.check()


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("error", [2 * TOLERANCE, np.nan, np.inf])
def test_one_wrong_logit_is_found(found, expected, what, error):
    logits = last(found, what).logits.copy()
    logits[-1, 7] += error * expected.spread
    said = family_comparison.difference(changed(found, what, logits=logits), expected)
    assert said == f"{SAID}{error:.2g} in {what}"


@pytest.mark.parametrize("what", KINDS)
def test_a_row_after_another_token_is_found(found, expected, what):
    """The comparison finds a branch that continues after the tokens of another branch."""
    rows = last(found, what)
    text = list(rows.text)
    text[rows.begin - 1] += 1
    said = family_comparison.difference(changed(found, what, text=tuple(text)), expected)
    assert said.startswith(SAID)
    assert said.endswith(f" in {what}")


def test_another_greedy_id_is_found(found, expected):
    chosen = [rows for rows in found if rows.greedy is not None]
    assert len(chosen) == 32
    at = found.index(chosen[-1])
    wrong = dataclasses.replace(chosen[-1], greedy=chosen[-1].greedy + 1)
    said = family_comparison.difference([*found[:at], wrong, *found[at + 1 :]], expected)
    assert said.startswith(f"a greedy id is {wrong.greedy}, not {wrong.greedy - 1}, whose logit is ")


def test_a_model_that_has_changed_is_found(llama):
    model = reference.load_hf(llama.hf)
    expected = TransformersLogits(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(AssertionError, match="the export changed the model"):
        expected.check()


def test_logits_that_depend_on_one_token_are_found(llama):
    model = reference.load_hf(llama.hf)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    with pytest.raises(AssertionError, match="an earlier token changes logits by 0 of their spread"):
        TransformersLogits(model).check()


@pytest.mark.parametrize("family", ["bamba", "mamba2", "opt", "qwen3_5_text", "qwen3_next"])
def test_a_token_has_an_effect_ten_tokens_later(family, tmp_path):
    """The distance exceeds the width of convolutions. If states decayed at once, a wrong anchor would not be found."""
    family_sweep._write(tiny_families.config(family), tmp_path)
    assert TransformersLogits(family_sweep._eager(tmp_path)).effect(10) > 100 * TOLERANCE


def test_the_program_of_another_model_is_a_wrong_outcome(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(etkv.export, "export_program", lambda request: llama.path)
    outcome = family_sweep._outcome("llama", "mlx", tmp_path)
    assert outcome.kind == "wrong"
    assert all(f" in {what}" in outcome.reason for what in KINDS)
