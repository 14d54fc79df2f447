"""Programs of mixtures of experts on the CPU: ids and logits are those of transformers."""

from __future__ import annotations

import functools

import pytest
import torch

import etkv
import reference
from etkv import DecodeSession, SeqSession
from reference import EVERYTHING
from tiny_programs import CHUNK, TOLERANCE, TinyProgram, decode, error, ids, is_greedy, run

PROMPT, DECODED = 300, 32

_MIX = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
_MANY = {"num_experts": 12, "num_experts_per_tok": 3}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}

MODELS = {
    "qwen3": ("qwen3_moe", _MANY),
    # Gated shared experts.
    "qwen2": ("qwen2_moe", _MANY),
    # Experts in groups: the router first chooses groups.
    "glm4": ("glm4_moe", _GROUPS),
    # A squared ReLU without a gate, and Mamba-2 layers.
    "nemotron-h": (
        "nemotron_h",
        {**_GROUPS, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 6}),
    "olmoe": ("olmoe", _MANY),
    "granite": ("granitemoe", {"num_local_experts": 6}),
    "granite-hybrid": ("granitemoehybrid", {**_MIX, "num_local_experts": 6}),
    "qwen3.5": ("qwen3_5_moe_text", {**_MIX, **_MANY}),
    "qwen3-next": ("qwen3_next", {**_MIX, **_MANY}),
    "ernie": ("ernie4_5_moe", {}),
    "hunyuan": ("hunyuan_v1_moe", {"num_experts": 6}),
    "minimax": ("minimax_m2", {"num_local_experts": 6}),
    # Interleaved gates, limits, biases, and learned sinks in attention.
    "gpt-oss": ("gpt_oss", {"num_local_experts": 6, "sliding_window": CHUNK}),
    # Latent attention.
    "deepseek": ("deepseek_v3", _GROUPS),
}
"""Name -> family of transformers, and changes to the settings of its tiny model."""

NAMES = list(MODELS) if EVERYTHING else ["qwen3"]
QUANTIZED = [(name, "8da4w") for name in ("qwen3", "nemotron-h", "glm4", "gpt-oss")]
QUANTIZED += [(name, "8da8w") for name in ("qwen3", "nemotron-h")]


@functools.cache
def _program(name: str, quantize: str | None = None) -> TinyProgram:
    family, changes = MODELS[name]
    return TinyProgram(f"experts-{name}", family, changes, quantize=quantize).export()


@pytest.fixture(scope="module", params=NAMES)
def model(request) -> TinyProgram:
    return _program(request.param)


@pytest.fixture(
    scope="module",
    params=[pytest.param(made, marks=pytest.mark.long, id="-".join(made)) for made in QUANTIZED],
)
def quantized(request) -> TinyProgram:
    return _program(*request.param)


@pytest.mark.parametrize("kind", [DecodeSession, SeqSession])
def test_ids_are_those_of_transformers(model, kind):
    """A prompt runs in chunks, and greedy ids follow."""
    text = ids(PROMPT)
    with model.session(kind) as session, model.load(session) as program:
        found = decode(program, text, PROMPT, DECODED)
    expected = model.expected(text)
    assert error(found, expected) < TOLERANCE
    assert is_greedy(expected[PROMPT - 1 : -1], text[PROMPT:])


def test_a_batch_of_sequences(model):
    """Three prompts of different lengths are decoded in the same steps."""
    lengths, steps = (150, 64, 7), 20
    texts = [ids(length + steps, factor) for length, factor in zip(lengths, (37, 41, 43), strict=True)]
    with model.session(SeqSession) as session, model.load(session) as program:
        rows = [
            [run(program, text, 0, n, sequence)] for sequence, (text, n) in enumerate(zip(texts, lengths, strict=True))
        ]
        for step in range(steps):
            session.begin_step([0, 1, 2])
            at = [n + step for n in lengths]
            together = program.forward(
                torch.tensor([text[position] for text, position in zip(texts, at, strict=True)]), torch.tensor(at)
            )
            for row, of_sequence in zip(together, rows, strict=True):
                of_sequence.append(row[None])
    for text, of_sequence in zip(texts, rows, strict=True):
        assert error(torch.cat(of_sequence), model.expected(text)) < TOLERANCE


def test_branches_of_a_fork(model):
    prompt = 70
    texts = [ids(prompt) + ids(20, factor) for factor in (37, 41)]
    with model.session(SeqSession) as session, model.load(session) as program:
        first = run(program, texts[0], 0, prompt, 0)
        session.seq_cp(0, 1)
        rows = [torch.cat([first, run(program, text, prompt, prompt + 20, at)]) for at, text in enumerate(texts)]
    for text, found in zip(texts, rows, strict=True):
        assert error(found, model.expected(text)) < TOLERANCE


def test_quantized_programs_compute_with_the_weights_that_they_keep(quantized):
    """The reference has the dequantized weights. A program also rounds activations to 8 bits, so most rows are close.
    In a few rows the router chooses the other of two experts with nearly equal scores.
    """
    text = ids(PROMPT)
    plain = reference.load_hf(quantized.request.keep_hf)
    with torch.no_grad():
        expected = plain(torch.tensor([text]), use_cache=False).logits[0]
    found = quantized.alone(text, PROMPT - DECODED)
    errors = (found - expected).square().mean(dim=1).sqrt() / expected.std()
    assert float(errors.median()) < 0.1, errors
    if quantized.quantize == "8da8w":
        # Rounding weights to 8 bits changes logits about as much as rounding activations.
        assert float(errors.median()) < 0.03
        return
    # The logits of the weights before quantization are farther away.
    from_float = (quantized.expected(text) - expected).square().mean(dim=1).sqrt() / expected.std()
    assert float(errors.median()) < float(from_float.median())


def test_quantized_steps_of_any_length(quantized):
    """The experts' outputs of a token do not depend on other tokens of its step."""
    text = ids(120)
    with quantized.session() as session, quantized.load(session) as program:
        chunks = run(program, text, 0, 120)
    with quantized.session() as session, quantized.load(session) as program:
        short = run(program, text, 0, 120, chunk=7)
    errors = (chunks - short).square().mean(dim=1).sqrt() / chunks.std()
    assert float(errors.median()) < 0.05


def test_generated_ids(quantized):
    prompt = ids(40)
    with quantized.session() as session, quantized.load(session) as program:
        first = list(etkv.generate_tokens(program, prompt, max_tokens=8))
    with quantized.session() as session, quantized.load(session) as program:
        assert list(etkv.generate_tokens(program, prompt, max_tokens=8)) == first
