"""MLX programs of models with recurrent layers: how they decode, formats of weights, and caches of other layers."""

from __future__ import annotations

import pytest
import torch

import etkv
import recurrent_models
import reference
from etkv import DecodeSession
from etkv.export import ExportRequest, export_program
from etkv.pte import PteFile
from test_recurrent_programs import Model, recurrent_program
from tiny_programs import CHUNK, ids, is_greedy, run


@pytest.fixture(
    scope="module", params=["qwen3.5", *(pytest.param(name, marks=pytest.mark.long) for name in ("lfm2", "granite-4"))]
)
def model(request) -> Model:
    return recurrent_program(request.param, "mlx")


def test_the_host_chooses_how_it_decodes(model):
    """The ids are the same with only the last row, with ids that the device chooses, and with interpreted steps."""
    prompt, answers = ids(70), []
    for options in ({}, {"logits": "last"}, {"logits": "proposed"}, {"passes": "none"}, {"passes": "interpreted"}):
        with model.session() as session, etkv.load(model.request.output, session, **options) as program:
            answers.append(list(etkv.generate_tokens(program, prompt, max_tokens=40)))
    assert answers == answers[:1] * len(answers)
    assert is_greedy(model.expected(prompt + answers[0])[len(prompt) - 1 : -1], answers[0])


def _exported(name, folder, **changes) -> tuple:
    """Return the path of a program of ``name``, and transformers' model."""
    reference.speed_up_exports()
    source = recurrent_models.write(name, folder / "model")
    request = ExportRequest(source, folder / "model.pte", prefill_chunk=CHUNK, verify=False, **changes)
    return export_program(request), recurrent_models.model(name)


def _logits(path, text, chunk) -> torch.Tensor:
    params = etkv.read_kv_cache_metadata(path)
    config = etkv.CacheConfig(params.layers, 256, k_format="f32", v_format="f32")
    with DecodeSession(config, backend=params.backend) as session, etkv.load(path, session) as program:
        return run(program, text, 0, len(text), chunk=chunk).float()


def _expected(model, text) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([text]), use_cache=False).logits[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend", "quantize"),
    [("lfm2", "mlx", "8w"), ("lfm2", "cpu", "8da8w"), ("mamba-2", "mlx", "8w")],
)
def test_quantized_weights(name, backend, quantize, tmp_path):
    """With weights of 8 bits, answers are the same in chunks and token by token, and close to those of the model."""
    path, model = _exported(name, tmp_path, backend=backend, quantize=quantize)
    text = ids(80)
    rows = [_logits(path, text, chunk) for chunk in (80, 1)]
    whole = _expected(model, text)
    assert (rows[0] - rows[1]).abs().max() < 1e-3 * whole.std()
    assert (rows[0] - whole).abs().max() < 0.5 * whole.std()


@pytest.mark.long
def test_half_precision(tmp_path):
    """States are float32, although the program computes in half precision. transformers' error in bfloat16 is 0.09."""
    path, model = _exported("mamba-2", tmp_path, dtype="bfloat16")
    text = ids(100)
    whole = _expected(model, text)
    assert (_logits(path, text, 50) - whole).abs().max() < 0.15 * whole.std()


def test_delegates_have_a_name_of_their_own(model):
    """The backend id is not MLXBackend: ExecuTorch's own backend has that id, and lacks the nodes."""
    assert PteFile(model.request.output).delegates["forward"] == ["EtkvForMLX"]


def test_caches_of_other_layers_are_refused():
    model = recurrent_program("qwen3.5", "mlx")
    layers = model.facts.recurrent_layers
    words = "the program calls 4 recurrent layers, the cache `.*` has 2"
    few = model.session(recurrent_layers=layers[:2])
    with few as session, pytest.raises(etkv.EtkvError, match=words):
        model.load(session)
    swapped = (layers[1], layers[0], *layers[2:])
    words = "recurrent layer 0 is a convolution of .* in the program, and a recurrence of .* in the cache"
    other = model.session(recurrent_layers=swapped)
    with other as session, pytest.raises(etkv.EtkvError, match=words):
        model.load(session)
