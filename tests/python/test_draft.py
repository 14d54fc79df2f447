"""Drafts that read hidden states: the last layers of a model, with known or predicted input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import etkv
import reference
import sinks_models
from etkv import inspection, pte
from etkv.constants import read_constants
from etkv.errors import EtkvError
from etkv.export import ExportRequest, export_program
from reference import STORY

IDS = list(STORY.encode())[:90]


@pytest.fixture(scope="module")
def few_texts():
    """Reduce the number of texts on which predictors are fitted."""
    from etkv import _mlx_serialization

    _mlx_serialization.ensure_available()
    from etkv.export import draft

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_TEXTS", 4), ("_TOKENS", 40), ("_AT_ONCE", 4)):
            patch.setattr(draft, name, value)
        yield


@pytest.fixture(scope="module")
def draft(tiny, tmp_path_factory, few_texts):
    """Return the folder of a tiny model of two layers, and the program of the second layer."""
    output = tmp_path_factory.mktemp("draft") / "model.pte"
    export_program(ExportRequest(tiny("tiny-gemma3"), output, prefill_chunk=64, draft=1))
    return tiny("tiny-gemma3"), output


def hidden_states(model, ids) -> torch.Tensor:
    """Return the output of transformers' first layer, ``[1, T, hidden]``."""
    kept = []
    hook = model.get_decoder().layers[0].register_forward_hook(lambda module, inputs, output: kept.append(output))
    reference.logits(model, ids)
    hook.remove()
    return kept[0]


def run(path, ids, given, known, step=40) -> list[torch.Tensor]:
    config = etkv.CacheConfig(etkv.read_kv_cache_metadata(path).layers, 128, k_format="f32", v_format="f32")
    made = []
    with etkv.DecodeSession(config) as session, etkv.load(path, session) as program:
        for start in range(0, len(ids), step):
            part = slice(start, min(start + step, len(ids)))
            tokens, at = torch.tensor([ids[part]]), torch.arange(part.start, part.stop)
            made.append(program.execute(tokens, at, given[:, part].contiguous(), known[:, part].contiguous()))
    return [torch.cat(outputs, dim=1) for outputs in zip(*made, strict=True)]


def test_a_draft_describes_itself(draft):
    folder, path = draft
    config = json.loads((folder / "config.json").read_text())
    methods = pte.constant_methods(path)
    assert methods["get_draft_tap"] == 0
    assert methods["kv_cache.n_layers"] == 1
    assert methods["kv_cache.window"] == 0, "the second layer sees everything"
    assert config["num_hidden_layers"] == 2, "the model is as it was"
    said = list(inspection.lines(inspection.report(path)))
    assert "a draft, which reads the hidden states of its model's layer 0" in said


def test_a_draft_on_known_hidden_states_is_the_model(draft):
    folder, path = draft
    model = reference.load_hf(folder)
    given = hidden_states(model, IDS)
    made, handed_on = run(path, IDS, given, torch.ones(1, len(IDS), 1))
    np.testing.assert_allclose(made[0], reference.logits(model, IDS), atol=2e-4)
    np.testing.assert_allclose(handed_on, given, atol=1e-5)


def test_unknown_hidden_states_are_predicted(draft):
    """The last tokens of a text, after known ones, are predicted from the embedding and the previous hidden states."""
    folder, path = draft
    model = reference.load_hf(folder)
    own, known = hidden_states(model, IDS), torch.ones(1, len(IDS), 1)
    known[:, -5:] = 0
    given = torch.where(known == 1, own, own.roll(1, dims=1))

    constants = read_constants(path)
    weight, bias = constants["predictor.linear.weight"], constants["predictor.linear.bias"]
    with torch.inference_mode():
        embedding = model.get_input_embeddings()(torch.tensor([IDS]))
        norm = [x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in (embedding, given)]
        expected = torch.where(known == 1, own, torch.cat(norm, dim=-1) @ weight.T + bias)
        model.get_decoder().layers[0].register_forward_hook(lambda module, inputs, output: expected)
    logits, handed_on = run(path, IDS, given, known)
    np.testing.assert_allclose(handed_on, expected, atol=1e-4)
    np.testing.assert_allclose(logits[0], reference.logits(model, IDS), atol=5e-4)


@pytest.mark.parametrize("name", ["granite-swa", pytest.param("gemma2", marks=pytest.mark.long)])
def test_a_draft_has_the_sinks_and_the_softcap_of_its_model(name, tmp_path, few_texts):
    folder = sinks_models.write(name, tmp_path / "model")
    output = tmp_path / "out/model.pte"
    output.parent.mkdir()
    export_program(ExportRequest(folder, output, prefill_chunk=64, draft=1))
    model = sinks_models.model(name)
    given = hidden_states(model, IDS)
    made, _ = run(output, IDS, given, torch.ones(1, len(IDS), 1))
    expected = reference.logits(model, IDS)
    np.testing.assert_allclose(made[0], expected, atol=1e-3 * expected.std())


def test_the_predictor_is_the_best_linear_one(tiny, monkeypatch):
    """Another solver finds the same least-squares solution, over all tokens except the first four of each text."""
    from etkv.export import draft, source
    from etkv.export.progress import Progress

    origin = source.find(tiny("tiny-llama"))
    model = source.read_model(origin, source.read_config(origin), "float32")
    made = []

    def texts_of(*arguments):
        made.append(texts(*arguments))
        return made[-1]

    texts = draft._texts
    for name, value in (("_TEXTS", 30), ("_TOKENS", 60), ("_AT_ONCE", 10), ("_texts", texts_of)):
        monkeypatch.setattr(draft, name, value)
    predictor = draft.fit(model, 0, [[256], [256, 65, 66]], Progress())
    assert [text[0, :3].tolist() == [256, 65, 66] for text, _ in made] == [False, True, True]

    plain = reference.load_hf(tiny("tiny-llama"))
    inputs, outputs = [], []
    for text in [row for batch, _ in made for row in batch.tolist()]:
        own = hidden_states(plain, text)[0].double().numpy()
        embedding = plain.get_input_embeddings().weight[text].detach().double().numpy()
        sides = [x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) for x in (embedding[4:], own[3:-1])]
        inputs.append(np.concatenate([*sides, np.ones((len(own) - 4, 1))], axis=1))
        outputs.append(own[4:])
    x, y = np.concatenate(inputs), np.concatenate(outputs)
    ridge = np.sqrt(1e-3 * np.square(x).sum(0).mean()) * np.eye(x.shape[1])
    expected = np.linalg.lstsq(np.concatenate([x, ridge]), np.concatenate([y, 0 * y[: len(ridge)]]), rcond=None)[0]
    np.testing.assert_allclose(predictor.linear.weight.detach(), expected[:-1].T, atol=1e-3)
    np.testing.assert_allclose(predictor.linear.bias.detach(), expected[-1], atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"draft": 2}, "draft 2 is above 1, the number of layers after the first"),
        ({"draft": 0}, "draft 0 is below the minimum of 1"),
        ({"draft": 1, "layers": 1}, "draft and layers do not go together"),
        ({"draft": 1, "tap_layers": (0,)}, "draft and tap-layers do not go together"),
    ],
)
def test_bad_values(tiny, tmp_path, arguments, said):
    with pytest.raises(EtkvError) as caught:
        export_program(ExportRequest(tiny("tiny-llama"), tmp_path / "x.pte", **arguments))
    assert str(caught.value) == said
