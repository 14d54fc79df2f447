"""CPU programs: XNNPACK and ExecuTorch's kernels compute the model, and etkv computes attention with its cache."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import cpu_programs
import etkv
import reference
import test_families
import test_outputs
import tiny_models
from etkv import pte
from etkv.errors import EtkvError
from etkv.export import ExportRequest
from etkv.packed_weights import WeightFormat
from etkv.pte import PteFile
from reference import STORY, Variant
from test_draft import hidden_states as first_hidden_states

FAMILIES = [
    variant.on("cpu")
    for variant in test_families.VARIANTS
    if variant.dtype == "f32" and not variant.quantize and variant.model not in tiny_models.MIXTURES
]
LLAMA = Variant("tiny-llama", backend="cpu")
QUANTIZED = Variant("tiny-llama", quantize="8da4w", backend="cpu")
BFLOAT16 = Variant("tiny-llama", "bf16", backend="cpu")
LAST_ROW = test_outputs.LAST_ROW.on("cpu")
DRAFT = Variant("tiny-gemma3", draft=1, backend="cpu")
VARIANTS = [*FAMILIES, LAST_ROW, QUANTIZED, BFLOAT16, DRAFT]
PROMPT, DECODE = 70, 32
IDS = list(STORY.encode())


@pytest.fixture(scope="module")
def programs():
    return reference.programs(VARIANTS)


@pytest.fixture(scope="module")
def draft(programs):
    """Return the program of a tiny model's second layer, which reads the first layer's hidden states."""
    return programs[DRAFT].path


# ---- Answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", FAMILIES, ids=str)
def test_ids_equal_those_of_transformers(programs, variant):
    """A prompt runs in chunks, and then one token a step."""
    program = programs[variant]
    prompt = IDS[:PROMPT]
    ids, rows = cpu_programs.greedy(program.path, prompt, DECODE)
    assert ids == reference.greedy(program.hf, {"story": prompt}, DECODE)["story"].ids
    expected = reference.logits(reference.load_hf(program.hf), prompt + ids[:-1])
    np.testing.assert_allclose(rows, expected, atol=1e-4)


@pytest.mark.parametrize("model", ["tiny-mistral-window", "tiny-gemma3"])
def test_windows(programs, model):
    """Texts are much longer than the windows of 64. Every layer has a window, or only the first layer."""
    program = programs[Variant(model, backend="cpu")]
    prompt = IDS[:150]
    ids, rows = cpu_programs.greedy(program.path, prompt, 60)
    expected = reference.logits(reference.load_hf(program.hf), prompt + ids[:-1])
    np.testing.assert_allclose(rows, expected, atol=2e-4)
    assert ids == expected[149:].argmax(axis=1).tolist()


@pytest.mark.parametrize("step", [1, 64])
def test_steps_of_any_length(programs, step):
    """Steps have one token, or the program's maximum of 64 tokens and then the rest."""
    program = programs[LLAMA]
    (rows,) = cpu_programs.run(program.path, IDS[:100], step=step)
    np.testing.assert_allclose(rows, reference.logits(reference.load_hf(program.hf), IDS[:100]), atol=1e-4)


def test_quantized(programs, tiny, tmp_path):
    """8da4w against the same model in PyTorch, with weights in 4 bits and activations in 8 bits.

    Both round the same activations, but sums in another order round some activations to an adjacent value of 255. So
    the two differ, but by less than the error of rounding activations. That error is the difference between PyTorch's
    logits and float32 logits with the same weights. It is less than the error of rounding the weights.
    """
    from etkv.export.cpu import linears
    from etkv.export.packing import Packing
    from etkv.export.scratch import Scratch

    program = programs[QUANTIZED]
    ids, rows = cpu_programs.greedy(program.path, IDS[:PROMPT], DECODE)
    text = IDS[:PROMPT] + ids[:-1]
    exact = reference.logits(reference.load_hf(program.hf), text)
    model = reference.load_hf(tiny("tiny-llama"))
    before = reference.logits(model, text)
    scratch = Scratch(tmp_path)
    Packing(linears.Packer("int4", 32, scratch), scratch).finish(model)
    theirs = reference.logits(model, text)

    rounding = reference.rms(theirs - exact)
    error, apart = reference.rms(rows.numpy() - exact), reference.rms(rows.numpy() - theirs)
    of_weights = reference.rms(exact - before)
    reference.note(f"rms error {error:.3f}, PyTorch's {rounding:.3f}, apart {apart:.3f}, of weights {of_weights:.3f}")
    assert 0 < error < 1.5 * rounding
    assert apart < rounding < of_weights


def test_weights_in_bfloat16(programs):
    """Logits equal those of transformers in float32 with weights that are rounded to bfloat16."""
    program = programs[BFLOAT16]
    ids, rows = cpu_programs.greedy(program.path, IDS[:PROMPT], DECODE)
    model = reference.load_hf(program.hf)
    expected = reference.logits(model, IDS[:PROMPT] + ids[:-1])
    np.testing.assert_allclose(rows, expected, atol=1e-4)
    assert ids == reference.greedy(program.hf, {"story": IDS[:PROMPT]}, DECODE)["story"].ids
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    assert matrices
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in matrices)


@pytest.mark.parametrize(
    ("variant", "fmt"), [(QUANTIZED, WeightFormat("int4", 32)), (BFLOAT16, WeightFormat("bfloat16"))], ids=str
)
def test_a_tied_head_has_the_weights_of_the_embedding(programs, tiny, variant, fmt):
    """The weights are in the file once, and the calls of the head and of the embedding read them."""
    path = programs[variant].path
    model = reference.load_hf(tiny("tiny-llama"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    packed = fmt.pack(model.lm_head.weight.detach()).view(torch.uint8)
    assert path.read_bytes().count(packed.numpy().tobytes()) == 1
    calls = list(map(json.loads, PteFile(path).cpu_payloads()))
    rows = model.config.vocab_size
    assert [call["rows"] for call in calls if call["op"] == "embedding"] == [rows]
    assert [call["rows"] for call in calls if call["op"] == "linear"].count([rows]) == 1


# ---- Outputs --------------------------------------------------------------------------------------------------------


def test_the_last_row_only(programs):
    """A program of all rows that is loaded for the last row returns one row a step. This row equals the last of all
    rows.
    """
    path = programs[LLAMA].path
    (every,) = cpu_programs.run(path, IDS[:90])
    (last,) = cpu_programs.run(path, IDS[:90], logits="last")
    assert (len(every), len(last)) == (90, 3)
    np.testing.assert_allclose(last, every[[39, 79, 89]], rtol=1e-5, atol=1e-5)


def test_a_draft_on_hidden_states_of_the_model_is_the_model(draft, tiny):
    model = reference.load_hf(tiny("tiny-gemma3"))
    ids = IDS[:90]
    given = first_hidden_states(model, ids)
    made, handed_on = cpu_programs.run(draft, ids, given, torch.ones(1, len(ids), 1))
    np.testing.assert_allclose(made, reference.logits(model, ids), atol=2e-4)
    np.testing.assert_allclose(handed_on, given[0], atol=1e-5)


def test_a_draft_predicts_unknown_hidden_states(draft, tiny):
    """A draft returns the predicted hidden states of the last tokens, and continues from them."""
    model = reference.load_hf(tiny("tiny-gemma3"))
    ids = IDS[:90]
    own, known = first_hidden_states(model, ids), torch.ones(1, len(ids), 1)
    known[:, -5:] = 0
    given = torch.where(known == 1, own, own.roll(1, dims=1))
    logits, handed_on = cpu_programs.run(draft, ids, given, known)
    np.testing.assert_allclose(handed_on[:-5], own[0, :-5], atol=1e-5)
    assert (handed_on[-5:] - given[0, -5:]).abs().amax(dim=1).min() > 0.1

    with torch.inference_mode():
        model.get_decoder().layers[0].register_forward_hook(lambda module, inputs, output: handed_on[None])
    np.testing.assert_allclose(logits, reference.logits(model, ids), atol=5e-4)


# ---- The file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "scale"), [(LLAMA, 16**-0.5), (LAST_ROW, 24**-0.5)], ids=str)
def test_payloads_of_calls(programs, variant, scale):
    """There is a payload for each layer, in order, and one for the rows of logits unless the export selects them."""
    payloads = list(map(json.loads, PteFile(programs[variant].path).cpu_payloads()))
    calls = [payload for payload in payloads if payload["op"] == "update_and_attend"]
    others = [payload for payload in payloads if payload["op"] != "update_and_attend"]
    assert [(call["call"], call["layer"], call["n_calls"]) for call in calls] == [(0, 0, 2), (1, 1, 2)]
    for call in calls:
        assert call["scale"] == pytest.approx(scale)
        assert sorted(call["inputs"]) == [0, 1, 2, 3]
        assert call["version"] == 1
    assert {call["logits"] for call in calls} == {"last" if variant is LAST_ROW else "selected"}
    assert others == ([] if variant is LAST_ROW else [{"op": "select_rows", "version": 1}])


def test_all_calls_of_a_program_have_its_name(programs):
    names = []
    for variant in (LLAMA, QUANTIZED, LAST_ROW):
        payloads = map(json.loads, PteFile(programs[variant].path).cpu_payloads())
        (name,) = {payload["program"] for payload in payloads if "program" in payload}
        names.append(name)
    assert len(set(names)) == 3


@pytest.mark.parametrize("variant", [*FAMILIES, QUANTIZED], ids=str)
def test_nodes_between_two_calls_are_one_delegate(programs, variant):
    """The rotary angles are before the first call, where a kernel concatenates two halves. The head is after the last
    call.
    """
    file = PteFile(programs[variant].path)
    n_layers = pte.constant_methods(programs[variant].path)["kv_cache.n_layers"]
    count = file.delegates["forward"].count("XnnpackBackend")
    if variant.model == "tiny-phi3":
        # Kernels split the joint products: queries, keys and values, and gate and up.
        assert count == 4 * n_layers
    elif variant.quantize:
        # Products are calls too. Between the calls of a layer there are five delegates: a norm, the rotation, the
        # transposed heads, a norm, and the activation.
        assert count == 5 * n_layers + 1
    else:
        assert count == n_layers + 3
        assert not [name for name in file.operators("forward") if "slice" in name]


@pytest.mark.long
@pytest.mark.parametrize("variant", [LLAMA, QUANTIZED], ids=str)
def test_omitted_passes_would_change_nothing(programs, variant, tmp_path, monkeypatch):
    from etkv.export import export_program
    from etkv.export.cpu import partitioner

    monkeypatch.setattr(partitioner, "_AS_THEY_ARE", set())
    request = replace(reference.request(variant), output=tmp_path / "model.pte", keep_hf=None)
    export_program(request)
    ours, theirs = PteFile(programs[variant].path), PteFile(request.output)
    kept = [ours._payload(delegate) for delegate in ours._delegates("XnnpackBackend")]
    assert kept
    assert kept == [theirs._payload(delegate) for delegate in theirs._delegates("XnnpackBackend")]


# ---- Wrong use ------------------------------------------------------------------------------------------------------


def test_a_session_of_another_backend(programs):
    for_cpu, for_mlx = programs[LLAMA].path, reference.program(LLAMA.on("mlx")).path
    layers = etkv.read_kv_cache_metadata(for_cpu).layers
    config = etkv.CacheConfig(layers, cpu_programs.CAPACITY)
    for backend, path, own in (("MLXBackend", for_cpu, "cpu"), ("cpu", for_mlx, "MLXBackend")):
        with etkv.DecodeSession(config, backend=backend) as session, pytest.raises(EtkvError) as caught:
            etkv.load(path, session)
        assert f"`{backend}`" in str(caught.value)
        assert f"`{own}`" in str(caught.value)


def test_a_program_without_a_session(programs):
    with etkv.load(programs[LLAMA].path, None) as loaded, pytest.raises(EtkvError) as caught:
        loaded.forward([1, 2], [0, 1])
    assert "was loaded without one; pass `cache_key` when loading it" in str(caught.value)


def test_a_cache_with_too_few_layers(programs):
    path = programs[LLAMA].path
    config = etkv.CacheConfig(etkv.read_kv_cache_metadata(path).layers[:1], cpu_programs.CAPACITY)
    with etkv.DecodeSession(config, backend="cpu") as session:
        with pytest.raises(EtkvError) as caught:
            etkv.load(path, session)
        assert str(caught.value) == f"the program attends in 2 layers, the cache `{session.key}` has 1"


@pytest.mark.parametrize(("backend", "quantize"), [("cpu", "4w"), ("mlx", "8da4w")])
def test_a_quantization_of_the_other_backend_is_refused(tiny, tmp_path, backend, quantize):
    with pytest.raises(EtkvError, match=f"quantize '{quantize}' .*{backend}"):
        ExportRequest(tiny("tiny-llama"), tmp_path / "x.pte", backend=backend, quantize=quantize).validated()
