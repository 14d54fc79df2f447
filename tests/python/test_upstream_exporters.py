"""Programs of the exporters in ExecuTorch's wheel run through the delegate.

A cache in the graph is a buffer that the program keeps. Such programs have no session, and a new load starts from
zeros. Ids are compared with transformers in float32. For quantized programs, the exporter's own function quantizes
the weights, torch dequantizes them, and transformers computes the expected logits.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import etkv
import reference
import upstream_models
import upstream_programs
from etkv import _mlx_serialization
from reference import EVERYTHING
from upstream_programs import IN_GRAPH, OFF_GRAPH, OPTIMUM, Export, dflash, llm, whisper
from upstream_runs import DECODE, PROMPT, STEP, greedy, loaded, prompt, read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RING = 127
"""Number of slots of a window's ring: a window of 64 plus a step of 64, minus one. The exporters' programs are wrong
beyond it.

Most tests use fewer tokens, see :data:`upstream_runs.PROMPT`.
"""

FLOAT = [
    llm("tiny-llama", *IN_GRAPH),
    llm("tiny-gemma3", *IN_GRAPH),
    llm("tiny-gemma3", *OFF_GRAPH),
    llm("tiny-gemma4", *OFF_GRAPH),
    llm("tiny-llama", IN_GRAPH[0]),
    llm("tiny-llama", IN_GRAPH[1]),
    llm("tiny-llama", *OFF_GRAPH),
    llm("tiny-qwen3", *IN_GRAPH),
    llm("tiny-qwen3", *OFF_GRAPH),
    llm("tiny-mistral-window", *IN_GRAPH),
    llm("tiny-mistral-window", *OFF_GRAPH),
]
PLAIN = [llm("tiny-llama"), llm("tiny-qwen3"), llm("tiny-gemma3")] if OPTIMUM else []
QUANTIZED = [
    llm("tiny-llama", *IN_GRAPH, "--qlinear", "4w"),
    llm("tiny-llama", *IN_GRAPH, "--qlinear", "nvfp4"),
    llm("tiny-llama", *IN_GRAPH, "--qlinear", "8w"),
    *(llm("tiny-llama", *OFF_GRAPH, "--qlinear", name) for name in ("4w", "8w", "nvfp4")),
    *(llm("tiny-llama", *IN_GRAPH, "--qlinear", name, "--qembedding", name) for name in ("4w", "8w", "nvfp4")),
    llm("tiny-gemma4", *OFF_GRAPH, "--qlinear", "4w"),
]
HALF = [llm("tiny-llama", *IN_GRAPH, dtype="bf16")]
WHISPER = [whisper(), *(whisper("--qlinear", name) for name in ("4w", "8w", "nvfp4"))]
DFLASH = dflash()
TAPPED = llm("tiny-llama", *IN_GRAPH, "--tap-layers", "0,1", hooks=True)

REFUSED = {
    llm(
        "tiny-gemma4", *IN_GRAPH
    ): "`num_head` was provided as a list of length 2, but the Cache currently has 4 layers",
    llm("tiny-gemma4-wide", *OFF_GRAPH): "'head_dim' is a per-layer attribute",
    llm("tiny-llama", *IN_GRAPH, "--tap-layers", "0,1"): "Dynamo does not know how to enter a `lock` context manager",
    llm("tiny-gemma3", IN_GRAPH[1]): "The size of tensor a (127) must match the size of tensor b (64)",
}
"""Exports that fail with the installed transformers -> their errors."""

SHORT = [FLOAT[0]]
"""The export of `make test`."""
RAN = [*FLOAT, *PLAIN, *QUANTIZED, *HALF, *WHISPER, DFLASH, TAPPED, *REFUSED] if EVERYTHING else SHORT


@pytest.fixture(scope="module", autouse=True)
def ended() -> dict[Export, str | None]:
    """Return the error of each export, None if it succeeded."""
    _mlx_serialization.ensure_available()
    return upstream_programs.export(RAN)


def each(exports: Sequence[Export]):
    return pytest.mark.parametrize(
        "made", [pytest.param(made, marks=() if made in SHORT else pytest.mark.long, id=str(made)) for made in exports]
    )


# ---- Language models ------------------------------------------------------------------------------------------------


@functools.cache
def quantized(folder: Path, *options: str) -> PreTrainedModel:
    """Return transformers' model with linear layers and embeddings that are quantized as by an exporter with
    ``options``.
    """
    from executorch.backends.mlx.llm.quantization import quantize_model_

    given = dict(zip(options[::2], options[1::2], strict=True))
    model = reference.load_hf(folder)
    quantize_model_(
        model,
        qlinear_config=given.get("--qlinear"),
        qembedding_config=given.get("--qembedding"),
        tie_word_embeddings=model.config.get_text_config().tie_word_embeddings,
    )
    return model


@each([*FLOAT, *PLAIN])
def test_ids_are_those_of_transformers(made, ended):
    assert ended[made] is None
    with loaded(made) as program:
        # For models with windows, programs of the plain pipeline run one token a step.
        step = min(STEP, program.max_step_tokens)
        ids, rows = greedy(program, prompt(), DECODE, step)
    assert ids == reference.greedy(made.weights, {"": prompt()}, DECODE)[""].ids
    expected = reference.logits(reference.load_hf(made.weights), prompt() + ids[:-1])
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-4)
    reference.note(f"{made}: largest error {abs(rows - expected).max():.1e}, spread {reference.spread(expected):.2f}")


@each(QUANTIZED)
def test_quantized_logits_are_those_of_the_dequantized_weights(made, ended):
    assert ended[made] is None
    with loaded(made) as program:
        ids, rows = greedy(program, prompt(), DECODE)
    options = made.options[made.options.index("--qlinear") :]
    expected = reference.logits(quantized(made.weights, *options), prompt() + ids[:-1])
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-4)
    assert ids == expected[PROMPT - 1 :].argmax(axis=1).tolist()
    float32 = reference.logits(reference.load_hf(made.weights), prompt() + ids[:-1])
    assert reference.rms(rows - float32) > 10 * reference.rms(rows - expected), "it is quantized"
    reference.note(f"{made}: largest error {abs(rows - expected).max():.1e}, spread {reference.spread(expected):.2f}")


@each(HALF)
def test_bfloat16_is_as_near_as_transformers(made, ended):
    assert ended[made] is None
    with loaded(made) as program:
        ids, rows = greedy(program, prompt(), DECODE)
    # The exporter has rounded the weights to bfloat16.
    rounded = reference.load_hf(made.weights, "bf16").float()
    expected = reference.logits(rounded, prompt() + ids[:-1])
    error = reference.rms(rows - expected)
    usual = reference.rms(reference.logits(rounded, prompt() + ids[:-1], "bf16") - expected)
    reference.note(f"{made}: rms error {error:.1e}, that of transformers {usual:.1e}")
    assert error < 1.5 * usual


@pytest.mark.parametrize("passes", ["none", "gpu"])
@each([FLOAT[0], FLOAT[1], QUANTIZED[0]])
def test_passes_change_no_logits(made, passes):
    with loaded(made) as program:
        expected = read(program, prompt())[0]
    with etkv.load(made.path, None, passes=passes) as program:
        np.testing.assert_allclose(read(program, prompt())[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("passes", ["default", "none", "gpu"])
@each([made for made in [*FLOAT, QUANTIZED[0]] if "--use-custom-sdpa" in made.options])
def test_the_last_row_only(made, passes, ended):
    """``logits=last`` returns the last row of each step even if the cache is in the graph."""
    assert ended[made] is None
    text = prompt()
    with loaded(made) as program:
        rows = read(program, text)[0]
    if made in FLOAT:
        rows = torch.as_tensor(reference.logits(reference.load_hf(made.weights), text))
    with etkv.load(made.path, None, logits="last", passes=passes) as program:
        at = 0
        # A prompt in two steps, single tokens, and then several tokens in a step.
        for length in (40, 10, 1, 1, 8):
            step = text[at : at + length]
            logits = program.execute(torch.tensor([step]), torch.arange(at, at + length))[0]
            at += length
            assert logits.shape[:2] == (1, 1)
            np.testing.assert_allclose(logits[0, 0], rows[at - 1], rtol=1e-4, atol=2e-4)


def test_each_load_has_buffers_of_its_own():
    """Two loaded programs do not see each other's rows, and a new load starts from zeros."""
    made, text = FLOAT[0], prompt()
    expected = reference.logits(reference.load_hf(made.weights), text)
    with loaded(made) as first, loaded(made) as second:
        rows = [read(first, text[:30])[0], read(second, text[:20])[0]]
        rows += [read(first, text[30:], 30)[0], read(second, text[20:], 20)[0]]
    np.testing.assert_allclose(torch.cat(rows[::2]), expected, atol=2e-4)
    np.testing.assert_allclose(torch.cat(rows[1::2]), expected, atol=2e-4)
    with loaded(made) as program:
        np.testing.assert_allclose(read(program, text)[0], expected, atol=2e-4)


def test_the_runner_of_executorch_gives_the_same_text(monkeypatch):
    etkv.register_backend()
    from executorch.backends.mlx.examples.llm import run_llm_hf
    from transformers import AutoTokenizer

    made, text = FLOAT[0], "The quick brown fox"
    tokenizer = AutoTokenizer.from_pretrained(made.weights)
    ids = tokenizer(text).input_ids
    # The chat template produces the padding token. In a random model its embedding is zero, and so are its keys in the
    # first layer. The exporter's program mistakes them for an empty slot, and every later position is off by one.
    monkeypatch.setattr(run_llm_hf, "apply_chat_template", lambda *_: torch.tensor([ids]))
    answer = run_llm_hf.run_inference(str(made.path), str(made.weights), None, text, max_new_tokens=24)
    expected = reference.greedy(made.weights, {"": ids}, 24)[""].ids
    ends = [index + 1 for index, one in enumerate(expected) if one == tokenizer.eos_token_id]
    assert answer == tokenizer.decode(expected[: min([*ends, 24])], skip_special_tokens=True)


@pytest.mark.long
def test_a_ring_goes_round_as_in_torch():
    """Beyond the ring's slots the exporter's program is wrong, and the delegate computes the same as torch.

    With the installed transformers, a program derives positions from the number of nonzero key rows in the first layer,
    which cannot exceed the ring's slots.
    """
    from executorch.backends.mlx.examples.llm.export_llm_hf import build_hf_exported_program

    made = llm("tiny-mistral-window", *IN_GRAPH)
    sizes = {"max_ctx_len": upstream_programs.CONTEXT, "prefill_chunk_size": upstream_programs.CHUNK}
    traced, _ = build_hf_exported_program(
        str(made.weights), None, dtype="fp32", qlinear=None, qembedding=None, use_custom_sdpa=True,
        use_custom_kv_cache=True, **sizes,
    )  # fmt: skip
    module = traced.module()
    in_torch = SimpleNamespace(execute=lambda ids, at: [module(input_ids=ids, cache_position=at).detach()])
    text = prompt(200)
    with loaded(made) as program:
        rows = read(program, text)[0]
    np.testing.assert_allclose(rows, read(in_torch, text)[0], rtol=1e-4, atol=2e-4)
    wrong = abs(rows - reference.logits(reference.load_hf(made.weights), text)).amax(dim=1) > 1e-2
    assert not wrong[: RING + 1].any()
    assert wrong[RING + 1 :].any()


# ---- Hidden states and drafts ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_hidden_states_of_a_step(ended):
    """Only the first step is compared: with the installed transformers, tapped programs write every step to
    position 0.
    """
    assert ended[TAPPED] is None
    text = prompt(STEP)
    with loaded(TAPPED) as program:
        rows, hidden = read(program, text)
    logits, expected = with_hidden_states(reference.load_hf(TAPPED.weights), text, (0, 1))
    np.testing.assert_allclose(rows, logits, rtol=1e-4, atol=2e-4)
    # transformers returns the last layer's states after the final norm.
    np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=2e-4)


def with_hidden_states(model: PreTrainedModel, ids: list[int], layers: Sequence[int]):
    with torch.inference_mode():
        made = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return made.logits[0], torch.cat([made.hidden_states[layer + 1] for layer in layers], dim=-1)[0]


@pytest.mark.long
def test_a_draft_over_rounds(ended):
    """The test runs both methods of a DFlash program. The draft reads the context of each round as ExecuTorch's runner
    passes it.
    """
    assert ended[DFLASH] is None
    text = prompt(STEP)
    target, draft = in_torch_dflash()
    with loaded(DFLASH, "target") as model, loaded(DFLASH, "draft") as drafter:
        assert drafter.constant("get_max_block_len") == 5
        assert drafter.constant("get_mask_token_id") == upstream_models.MASK
        rows, hidden = read(model, text)
        logits, expected = with_hidden_states(target, text, upstream_models.TAPPED)
        np.testing.assert_allclose(rows, logits, rtol=1e-4, atol=2e-4)
        np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=2e-4)
        known = 0
        for block, length in ((5, 20), (5, 1), (3, 7), (2, 12)):
            tokens = torch.tensor([[text[known + length - 1]] + [upstream_models.MASK] * (block - 1)])
            at = torch.arange(known, known + length)
            (proposed,) = drafter.execute(tokens, hidden[None, known : known + length].contiguous(), at)
            known += length
            with torch.inference_mode():
                in_one_pass = draft(tokens, hidden[None, :known])
            np.testing.assert_allclose(proposed, in_one_pass, rtol=1e-4, atol=2e-4)


def in_torch_dflash():
    """Return the target and the draft in torch, with the quantized weights of the exporter."""
    from executorch.backends.mlx.examples.llm.dflash.adapters import get_adapter
    from executorch.backends.mlx.examples.llm.dflash.model import DFlashDraftModel, load_dflash_config
    from executorch.backends.mlx.llm.hf_attention import register_mlx_attention
    from executorch.backends.mlx.llm.quantization import quantize_model_

    register_mlx_attention()
    folder = upstream_programs.model("tiny-dflash-draft")
    target = reference.load_hf(DFLASH.weights)
    draft = DFlashDraftModel(load_dflash_config(folder)).eval()
    get_adapter("qwen3").load_draft_weights(draft, folder, target.state_dict())
    # These are the exporter's group sizes.
    how = {"qlinear_config": "8w", "qembedding_config": "8w", "qlinear_group_size": 32, "qembedding_group_size": 32}
    quantize_model_(draft, **how)
    quantize_model_(target, **how, tie_word_embeddings=True)
    return target, draft


# ---- Whisper --------------------------------------------------------------------------------------------------------


@each(WHISPER)
def test_whisper(made, ended):
    """The encoder, the cross-attention's keys and values, and the decoder run as in ExecuTorch's runner."""
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    assert ended[made] is None
    processor = AutoProcessor.from_pretrained(made.folder / "processor")
    features = processor(
        upstream_models.sound(), return_tensors="pt", truncation=False, sampling_rate=16_000
    ).input_features
    features = features[:, :, : upstream_models.FRAMES].contiguous()
    layers = json.loads((made.folder / "metadata.json").read_text())["num_decoder_layers"]
    start = upstream_models.WHISPER_IDS["<|startoftranscript|>"]
    with (
        etkv.load(made.folder / "encoder.pte", None) as encoder,
        etkv.load(made.folder / "cross_kv.pte", None) as cross,
        etkv.load(made.folder / "decoder.pte", None) as decoder,
    ):
        (encoded,) = encoder.execute(features)
        keys_and_values = cross.execute(encoded)
        assert len(keys_and_values) == 2 * layers
        ids, rows = [start], []
        for position in range(DECODE):
            given = torch.tensor([ids[-1:]]), torch.tensor([position])
            rows.append(decoder.execute(*given, *keys_and_values)[0][0, -1])
            ids.append(int(rows[-1].argmax()))
    model = WhisperForConditionalGeneration.from_pretrained(made.weights, dtype=torch.float32).eval()
    if "--qlinear" in made.options:
        from executorch.extension.llm.export.quantize import quantize_model_

        quantize_model_(model, qlinear_config=made.options[-1], skip_incompatible_shapes=True)
    with torch.inference_mode():
        want = model.get_encoder()(input_features=features).last_hidden_state
        expected = model(input_features=features, decoder_input_ids=torch.tensor([ids[:-1]])).logits[0]
    np.testing.assert_allclose(encoded, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(torch.stack(rows), expected, rtol=1e-4, atol=2e-4)
    assert ids[1:] == expected.argmax(dim=1).tolist()
    assert len(set(ids)) > 4
    if "--qlinear" not in made.options:
        assert ids == generated(model, features, start)


def generated(model: PreTrainedModel, features: torch.Tensor, start: int) -> list[int]:
    """Return transformers' greedy ids, without the timestamp rules of its Whisper."""
    from transformers import GenerationConfig, GenerationMixin

    model = copy.deepcopy(model)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, decoder_start_token_id=start)
    first = torch.tensor([[start]])
    return GenerationMixin.generate(model, features, decoder_input_ids=first, max_new_tokens=DECODE)[0].tolist()


# ---- Failing exports ------------------------------------------------------------------------------------------------


@each(list(REFUSED))
def test_exports_that_fail(made, ended):
    """docs/programs.md lists these exports with their reasons. If one succeeds after an update, move it to the
    others.
    """
    assert ended[made] is not None, "it exports now"
    assert REFUSED[made] in ended[made]


@pytest.mark.skipif(importlib.util.find_spec("optimum") is not None, reason="optimum is installed")
def test_the_plain_pipeline_needs_optimum():
    made = llm("tiny-llama")
    if OPTIMUM:
        pytest.skip("ETKV_TEST_OPTIMUM is set")
    assert upstream_programs.export([made])[made] == "ModuleNotFoundError: No module named 'optimum'"
