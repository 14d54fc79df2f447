"""Outputs other than a row of logits for each token: only the last row, hidden states of tapped layers, drafts."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

import reference
from cpu_programs import run
from etkv import pte
from etkv.errors import EtkvError
from reference import EVERYTHING, STORY, Variant

TAPPED = Variant("tiny-llama", tap_layers=(1, 0))
LAST_ROW = Variant("tiny-gemma3", logits="last", tap_layers=(0,))
FIRST_LAYER = Variant("tiny-gemma3" if EVERYTHING else "tiny-qwen3", layers=1)
VARIANTS = [TAPPED, LAST_ROW.on("cpu"), FIRST_LAYER]
VARIANTS += [TAPPED.on("cpu"), LAST_ROW] if EVERYTHING else []

TOKENS = 90
"""Number of tokens of a text: more than the window of 64, and more than one step of the program."""


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return list(STORY.encode())[:TOKENS]


def hidden_states(folder, ids, count) -> list[torch.Tensor]:
    """Return the outputs of the first ``count`` layers of transformers' model, ``[T, hidden]`` each."""
    model = reference.load_hf(folder)
    kept = {}
    for index, layer in enumerate(model.get_decoder().layers):
        layer.register_forward_hook(lambda module, inputs, output, index=index: kept.update({index: output}))
    reference.logits(model, ids)
    return [kept[index][0] for index in range(count)]


@pytest.mark.parametrize("backend", ["mlx", pytest.param("cpu", marks=pytest.mark.long)])
def test_hidden_states_are_outputs_of_layers(ids, backend):
    """Hidden states are in the requested order, with every row for any ``logits``. The states of the last layer are
    before the final norm.
    """
    tapped = reference.program(TAPPED.on(backend))
    assert pte.constant_methods(tapped.path)["get_tap_layers"] == [1, 0]
    first, second = hidden_states(tapped.hf, ids, 2)
    expected = reference.logits(reference.load_hf(tapped.hf), ids)
    ends = [39, 79, 89]
    # Programs for the CPU do not select the rows of candidates.
    proposed = {"proposed": ends} if backend == "mlx" else {}
    for logits, rows in {"all": slice(None), "last": ends, **proposed}.items():
        made, states = run(tapped.path, ids, logits=logits)
        np.testing.assert_allclose(made, expected[rows], atol=2e-4)
        np.testing.assert_allclose(states, torch.cat([second, first], dim=-1), atol=1e-4)


@pytest.mark.parametrize("backend", [pytest.param("mlx", marks=pytest.mark.long), "cpu"])
def test_a_program_of_the_last_row_only(ids, backend):
    """With any load option, the program returns one row of logits a step, and hidden states of every token."""
    last_row = reference.program(LAST_ROW.on(backend))
    assert pte.constant_methods(last_row.path)["get_logits_rows"] == 1
    (expected,) = hidden_states(last_row.hf, ids, 1)
    whole = reference.logits(reference.load_hf(last_row.hf), ids)
    for logits in ("all", "last"):
        made, tapped = run(last_row.path, ids, logits=logits)
        np.testing.assert_allclose(made, whole[[39, 79, 89]], atol=2e-4)
        np.testing.assert_allclose(tapped, expected, atol=1e-4)


def test_a_family_that_computes_every_row():
    from etkv.export.forward import Forward

    class Model(torch.nn.Module):
        config = types.SimpleNamespace(model_type="wordy")

        def forward(self, input_ids, **others):
            """Accept and ignore further arguments."""

    with pytest.raises(EtkvError, match="logits last: model family 'wordy' cannot compute only the last row of logits"):
        Forward(Model(), last_logits=True)


def test_a_draft_is_the_first_layers_and_the_head(exported, ids):
    """The program has the caches of the first layers, and the kept folder is a complete model."""
    folder, whole = reference.program(FIRST_LAYER).path.parent, exported(FIRST_LAYER.model)
    methods = pte.constant_methods(folder / "model.pte")
    assert methods["kv_cache.n_layers"] == 1
    assert methods["kv_cache.window"] == (64 if FIRST_LAYER.model == "tiny-gemma3" else 0)
    model = reference.load_hf(whole / "hf")
    with torch.inference_mode():
        (first,) = hidden_states(whole / "hf", ids, 1)
        expected = model.lm_head(model.model.norm(first))
    (made,) = run(folder / "model.pte", ids)
    np.testing.assert_allclose(made, expected, atol=2e-4)
    np.testing.assert_allclose(made, reference.logits(reference.load_hf(folder / "hf"), ids), atol=2e-4)
