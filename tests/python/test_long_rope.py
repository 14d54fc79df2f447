"""Long RoPE: the capacity of the cache selects a program's frequencies, for short texts or for long texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import etkv
import tiny_models
from etkv.export import ExportRequest, export_program

LIMIT = 16
"""The original context length of the model, in positions."""

SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 4.0, 8.0]
"""Factors of the frequencies for texts up to the limit, and for longer texts."""

TEXT = [tiny_models.IM_START, *b"user\nhow far is it, and how long does it take?"]


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """Return a model of the Phi-3 family with both sets of frequencies."""
    from transformers import AutoModelForCausalLM, Phi3Config

    folder = tmp_path_factory.mktemp("long-rope") / "hf"
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    parameters |= {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": LIMIT}
    config = Phi3Config(**tiny_models.SHAPE, rope_parameters=parameters)
    config.original_max_position_embeddings = LIMIT
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["mlx", pytest.param("cpu", marks=pytest.mark.long)])
def program(request, hf, tmp_path_factory):
    """Return the path of the model's program for each backend. The export compares it with the model for both sets of
    frequencies.
    """
    output = tmp_path_factory.mktemp(request.param) / "model.pte"
    return export_program(ExportRequest(hf, output, backend=request.param, prefill_chunk=LIMIT, verify=True))


def transformers_logits(folder, ids: list[int], **parameters: Any) -> np.ndarray:
    """Return transformers' logits [T, vocabulary] for the text. ``parameters`` replace rotary settings."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters |= parameters
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def session_for(program, capacity: int) -> etkv.DecodeSession:
    facts = etkv.read_kv_cache_metadata(program)
    return etkv.DecodeSession(etkv.CacheConfig(facts.layers, capacity), backend=facts.backend)


def run(loaded: etkv.Program, ids: list[int], start: int = 0) -> np.ndarray:
    """Return logits [T, vocabulary] of a text, run in steps of 7 tokens."""
    rows = [
        loaded.forward(ids[at : at + 7], list(range(start + at, start + min(at + 7, len(ids)))))
        for at in range(0, len(ids), 7)
    ]
    return np.concatenate([np.asarray(row).reshape(-1, row.shape[-1]) for row in rows])


@pytest.mark.parametrize(
    ("capacity", "length", "parameters"),
    [
        pytest.param(LIMIT, LIMIT, {}, id="short"),
        pytest.param(256, len(TEXT), {}, id="long"),
        # transformers uses the short set here. In a growing text, it would rotate the keys by two sets.
        pytest.param(LIMIT + 1, 10, {"short_factor": LONG}, id="short-text-in-a-long-cache"),
    ],
)
def test_logits_are_those_of_transformers(program, hf, capacity, length, parameters):
    ids = TEXT[:length]
    expected = transformers_logits(hf, ids, **parameters)
    with session_for(program, capacity) as session, etkv.load(program, session) as loaded:
        np.testing.assert_allclose(run(loaded, ids), expected, rtol=1e-3, atol=1e-3)
    other = {"short_factor": LONG, "long_factor": LONG} if capacity == LIMIT else {"long_factor": SHORT}
    if not parameters:
        assert np.abs(transformers_logits(hf, ids, **other) - expected).max() > 0.01, "the sets differ"


@pytest.fixture(scope="module")
def phimoe(tmp_path_factory):
    """Return a model of the Phi-MoE family, whose rotary embeddings have an output factor for each set."""
    from transformers import AutoModelForCausalLM, PhimoeConfig

    folder = tmp_path_factory.mktemp("long-rope-moe") / "hf"
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.1, "long_mscale": 1.3}
    parameters |= {"short_factor": SHORT * 2, "long_factor": LONG * 2, "original_max_position_embeddings": LIMIT}
    shape = {**tiny_models.SHAPE, "head_dim": 16, "num_local_experts": 4}
    AutoModelForCausalLM.from_config(PhimoeConfig(**shape, rope_parameters=parameters)).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("backend", ["mlx", "cpu"])
def test_phi_moe_has_frequencies_and_factors_of_the_capacity(phimoe, tmp_path, backend):
    program = export_program(
        ExportRequest(phimoe, tmp_path / "model.pte", backend=backend, prefill_chunk=LIMIT, verify=True)
    )
    # For this family transformers never uses the frequencies for long texts.
    long = {"short_factor": LONG * 2}
    cases = [(LIMIT, TEXT[:LIMIT], {}), (256, TEXT, long), (LIMIT + 1, TEXT[:10], {**long, "short_mscale": 1.3})]
    for capacity, ids, parameters in cases:
        expected = transformers_logits(phimoe, ids, **parameters)
        with session_for(program, capacity) as session, etkv.load(program, session) as loaded:
            np.testing.assert_allclose(run(loaded, ids), expected, rtol=1e-3, atol=1e-3)


def test_rows_of_one_set_are_not_loaded_into_a_cache_with_the_other(program, tmp_path):
    model, ids = etkv.fingerprint(program), TEXT[:10]
    files = {capacity: tmp_path / f"{capacity}.safetensors" for capacity in (LIMIT, 256)}
    prefixes = etkv.PrefixCache(max_bytes=1 << 24)
    for capacity, file in files.items():
        with session_for(program, capacity) as session, etkv.load(program, session) as loaded:
            run(loaded, ids)
            session.save(file, tokens=ids, fingerprint=model)
            assert prefixes.keep(session, ids, fingerprint=model)
            session.clear()
            assert session.load(file, fingerprint=model) == ids
    for capacity, other in ((LIMIT, 256), (256, LIMIT)):
        with session_for(program, capacity) as session, etkv.load(program, session):
            with pytest.raises(etkv.CacheFileError, match=f"with a capacity over {LIMIT}"):
                session.load(files[other], fingerprint=model)
            assert session.length == 0
            assert prefixes.attach(session, ids, fingerprint=model) == len(ids)
    prefixes.clear()
    with session_for(program, 256) as session, etkv.load(program, session) as loaded:
        run(loaded, ids)
        assert prefixes.keep(session, ids, fingerprint=model)
    with session_for(program, LIMIT) as session, etkv.load(program, session):
        assert prefixes.find(session, ids, fingerprint=model) == 0
        assert prefixes.attach(session, ids, fingerprint=model) == 0


def test_a_program_refuses_earlier_rows(program, tmp_path):
    file, ids = tmp_path / "short.safetensors", TEXT[:10]
    with session_for(program, LIMIT) as session, etkv.load(program, session) as loaded:
        run(loaded, ids)
        session.save(file, tokens=ids)
    with session_for(program, 256) as session:
        session.load(file)
        with pytest.raises(etkv.EtkvError, match="load the program before the cache is filled"):
            etkv.load(program, session)
        session.clear()
        with etkv.load(program, session) as loaded:
            run(loaded, ids)
