"""Voxtral, from ExecuTorch's exporter: audio to features, features to embeddings, and a text model with a cache.

The exporter needs optimum-executorch: see docs/programs.md.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import Tensor

import etkv
import reference
import upstream_models
import upstream_programs
from etkv import _mlx_serialization
from reference import EVERYTHING
from upstream_models import AUDIO
from upstream_programs import OPTIMUM, Export, voxtral
from upstream_runs import DECODE, prompt

if not OPTIMUM:
    pytest.skip("ETKV_TEST_OPTIMUM names no folder with optimum-executorch", allow_module_level=True)

FLOAT, AS_IT_IS = voxtral(), voxtral(older_names=False)
RAN = [FLOAT, *(voxtral("--qlinear", name) for name in ("4w", "8w") if EVERYTHING)]

SECONDS, PLACES = 40, 150
"""The length of a recording in seconds, and the number of its tokens: 75 for each piece of 30 seconds."""


@pytest.fixture(scope="module", autouse=True)
def ended() -> dict[Export, str | None]:
    _mlx_serialization.ensure_available()
    return upstream_programs.export([*RAN, AS_IT_IS])


@pytest.fixture(scope="module")
def features(ended) -> Tensor:
    """Return the recording's features ``[pieces, 128, 3000]``, from the exporter's preprocessor."""
    assert ended[FLOAT] is None
    with etkv.load(FLOAT.folder / "preprocessor.pte", None) as program:
        return program.execute(torch.from_numpy(upstream_models.sound(SECONDS)))[0].clone()


def test_features_are_those_of_transformers(features):
    from transformers import WhisperFeatureExtractor

    how = {"truncation": False, "padding": "longest", "pad_to_multiple_of": 480_000, "sampling_rate": 16_000}
    made = WhisperFeatureExtractor(feature_size=128)(upstream_models.sound(SECONDS), return_tensors="pt", **how)
    expected = made.input_features.reshape(128, -1, 3000).transpose(0, 1)
    np.testing.assert_allclose(features, expected, atol=2e-4)
    reference.note(f"features: largest error {abs(features - expected).max():.1e}, spread {expected.std():.2f}")


@pytest.mark.parametrize("made", RAN, ids=str)
def test_answers_are_those_of_transformers(made, ended, features):
    """Text, audio and text again, followed by greedy ids, run as in ExecuTorch's runner of such models."""
    assert ended[made] is None
    before, after = prompt(20), prompt(45)[20:]
    with contextlib.ExitStack() as stack:
        methods = ("audio_encoder", "token_embedding", "text_decoder")
        encoder, embedding, decoder = (
            stack.enter_context(etkv.load(made.path, None, method=method)) for method in methods
        )
        assert decoder.constant("audio_token_id") == AUDIO
        (encoded,) = encoder.execute(features)
        assert encoded.shape[:2] == (1, PLACES)
        ids, rows, start = [], [], 0

        def read(embedded: Tensor) -> None:
            nonlocal start
            end = start + embedded.shape[1]
            rows.append(decoder.execute(embedded, torch.arange(start, end))[0][0].clone())
            start = end

        read(embedding.execute(torch.tensor([before]))[0])
        read(encoded)
        read(embedding.execute(torch.tensor([after]))[0])
        while True:
            ids.append(int(text_only(rows[-1][-1]).argmax()))
            if len(ids) == DECODE:
                break
            read(embedding.execute(torch.tensor([ids[-1:]]))[0])
    model = in_transformers(made)
    text = torch.tensor([before + PLACES * [AUDIO] + after + ids[:-1]])
    with torch.inference_mode():
        sound = model.get_audio_features(features).pooler_output
        # The model replaces the embeddings of audio tokens itself.
        expected = model(input_ids=text, input_features=features).logits[0].numpy()
    np.testing.assert_allclose(encoded[0], sound, rtol=1e-4, atol=2e-4)
    logits = torch.cat(rows).numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=5e-4)
    assert ids == text_only(torch.from_numpy(expected[-DECODE:])).argmax(dim=1).tolist()
    assert len(set(ids)) > DECODE // 4
    reference.note(f"{made}: largest error {abs(logits - expected).max():.1e}, spread {reference.spread(expected):.2f}")


def text_only(logits: Tensor) -> Tensor:
    """Return logits without the id of audio tokens, which an answer must not have."""
    return logits.index_fill(-1, torch.tensor(AUDIO), -torch.inf)


def in_transformers(made: Export):
    from executorch.backends.mlx.llm.quantization import quantize_model_
    from transformers import VoxtralForConditionalGeneration

    model = VoxtralForConditionalGeneration.from_pretrained(made.weights, dtype=torch.float32).eval()
    if "--qlinear" in made.options:
        quantize_model_(model, qlinear_config=made.options[-1], qembedding_config=None)
    return model


def test_the_exporter_needs_a_method_of_an_older_transformers(ended):
    """docs/programs.md documents this error. If the export succeeds after an update, remove the stand-in method."""
    assert "'BaseModelOutputWithPooling' object has no attribute 'unsqueeze'" in (ended[AS_IT_IS] or "")
