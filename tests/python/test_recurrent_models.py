"""Models with recurrent layers in plain PyTorch: the ops on their reference state return transformers' logits."""

from __future__ import annotations

import pytest
import torch

import recurrent_models
import tiny_families
from etkv import op
from etkv.config import CacheConfig, LayerConfig
from etkv.export import attention, recurrent
from etkv.export.forward import Forward
from etkv.recurrent_layer import RecurrentLayer
from etkv.reference import ContiguousCache, RecurrentState, SeqCache

ENDS = [7, 14, 30, 40]
"""The positions at which chunks of a prompt end."""

DECODED = 64

_TOLERANCE = {"zamba2": 1e-3}
"""Model -> tolerance of logits, as a fraction of their spread, if it exceeds 1e-4. This model has 54 layers."""

KINDS = {
    "qwen3.5": ["convolution", "recurrence"] * 2,
    "falcon-h1": ["convolution", "recurrence"] * 2,
    "nemotron-h": ["convolution", "recurrence"] * 2,
    "lfm2": ["convolution"] * 2,
}


def surveyed(name: str):
    """Return two things: a step of the model ``name`` that calls the ops, and the model's layers."""
    model = recurrent_models.model(name)
    recurrent.take(model)
    model.set_attn_implementation(attention.NAME)
    step = Forward(model)
    return step, attention.survey(step, step.inputs(3), 256)


def caches(layout):
    """Return an empty reference cache and an empty state for a model of ``layout``."""
    facts = zip(layout.kv_heads, layout.head_dims, layout.v_head_dims, layout.windows, strict=True)
    layers = [LayerConfig(heads, k, v, window=window) for heads, k, v, window in facts]
    cache = ContiguousCache(CacheConfig(layers, 256, k_format="f32", v_format="f32")) if layers else None
    return cache, RecurrentState(len(layout.recurrent))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in KINDS else pytest.mark.long) for name in recurrent_models.FAMILIES],
)
def test_logits_equal_those_of_transformers(name):
    """A prompt in chunks and greedy ids are compared with one forward of transformers over all tokens."""
    step, layout = surveyed(name)
    assert len(layout.recurrent) > 0
    ids, rows = [(number * 37 + 11) % 250 for number in range(ENDS[-1])], []
    with torch.no_grad(), op.active(*caches(layout)):
        begin = 0
        for end in [*ENDS, *range(ENDS[-1] + 1, ENDS[-1] + DECODED)]:
            rows.append(step(torch.tensor([ids[begin:end]]), torch.arange(begin, end))[0])
            begin = end
            if end >= ENDS[-1]:
                ids.append(int(rows[-1][-1].argmax()))
    found = torch.cat(rows)
    with torch.no_grad():
        expected = _logits(step, ids[:-1])
    assert (found - expected).abs().max() < _TOLERANCE.get(name, 1e-4) * expected.std()
    assert ids[ENDS[-1] :] == expected[ENDS[-1] - 1 :].argmax(dim=1).tolist()


@pytest.mark.parametrize("name", KINDS)
def test_a_text_goes_on_otherwise(name):
    """A step that begins below the length rewinds the cache and the state."""
    step, layout = surveyed(name)
    ids = [(number * 37 + 11) % 250 for number in range(30)]
    others = ids[:17] + [(number * 41 + 5) % 250 for number in range(20)]
    with torch.no_grad(), op.active(*caches(layout)):
        step(torch.tensor([ids]), torch.arange(30))
        rows = [
            step(torch.tensor([others[begin:end]]), torch.arange(begin, end))[0] for begin, end in ((17, 25), (25, 37))
        ]
        expected = _logits(step, others)[17:]
    assert (torch.cat(rows) - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", KINDS)
def test_two_texts_in_one_step(name):
    """After a fork at 9 tokens, both branches run in one step, with their tokens interleaved."""
    step, layout = surveyed(name)
    ids = [(number * 37 + 11) % 250 for number in range(15)]
    others = ids[:9] + [(number * 41 + 5) % 250 for number in range(6)]
    contiguous, state = caches(layout)
    cache = SeqCache(contiguous.config)
    with torch.no_grad(), op.active(cache, state):
        step(torch.tensor([ids[:9]]), torch.arange(9))
        cache.seq_cp(0, 1)
        state.fork(0, 1)
        for held in (cache, state):
            held.begin_step([0, 1] * 6)
        both = [token for pair in zip(ids[9:], others[9:], strict=True) for token in pair]
        rows = step(torch.tensor([both]), torch.arange(9, 15).repeat_interleave(2))[0]
        for number, text in enumerate((ids, others)):
            expected = _logits(step, text)[9:]
            assert (rows[number::2] - expected).abs().max() < 1e-4 * expected.std()


def _logits(step, ids):
    """Return transformers' logits of ``ids``, without changing ``step``."""
    step.model.set_attn_implementation("eager")
    try:
        return step.model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        step.model.set_attn_implementation(attention.NAME)


@pytest.mark.parametrize("name", KINDS)
def test_recurrent_layers_are_numbered_in_their_order(name):
    _, layout = surveyed(name)
    assert [layer.kind for layer in layout.recurrent] == KINDS[name]


def test_sizes_of_layers():
    _, layout = surveyed("qwen3.5")
    convolution, recurrence, *_ = layout.recurrent
    assert convolution == RecurrentLayer("convolution", channels=2 * 2 * 16 + 4 * 24, width=4)
    assert recurrence == RecurrentLayer("recurrence", k_heads=2, heads=4, k_dim=16, v_dim=24)
    _, layout = surveyed("kimi-linear")
    assert layout.recurrent[1].channel_decay


def test_without_a_step_they_are_those_of_transformers():
    """A model that calls the ops in steps still runs as before outside of a step, and within ``as_transformers``."""
    step, _ = surveyed("mamba-2")
    ids = torch.arange(9).reshape(1, -1)
    untouched = recurrent_models.model("mamba-2")
    with torch.no_grad():
        expected = untouched(ids, use_cache=False).logits
        assert torch.equal(step.model(ids, use_cache=False).logits, expected)
        with recurrent.as_transformers():
            assert torch.equal(step(ids, torch.arange(9)), expected)


@pytest.mark.parametrize("family", ["jamba", "mamba", "falcon_mamba", "recurrent_gemma", "zamba"])
def test_states_of_other_kinds_are_refused(family):
    assert not recurrent.is_supported(tiny_families.config(family))


def test_a_state_of_another_kind_is_named():
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_families.config("jamba"))
    with pytest.raises(ValueError, match=r"layers\.0\.mamba: the cache has no op for the state of JambaMambaMixer"):
        recurrent.take(model)
