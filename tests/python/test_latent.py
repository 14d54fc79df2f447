"""Latent attention: programs that cache latents return the same ids as transformers, although transformers expands
latents.
"""

from __future__ import annotations

import functools

import pytest
import torch

from etkv import CacheConfig, DecodeSession, SeqSession, estimate, read_kv_cache_metadata
from etkv.export import latent, values_in_keys
from reference import EVERYTHING
from tiny_programs import TOLERANCE, TinyProgram, decode, error, ids, is_greedy, model, run

PROMPT, DECODED = 300, 32

MODELS = {
    "minicpm3": {},
    # Experts in groups, and interleaved rotary embeddings.
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    # Rotary embeddings with complex numbers.
    "deepseek_v2": {},
    "glm4_moe_lite": {},
    "youtu": {},
}
"""Family of transformers -> changes to the settings of its tiny model."""

CASES = [(name, backend) for name in MODELS for backend in ("cpu", "mlx")]
CASES = CASES if EVERYTHING else [("minicpm3", "cpu")]


@functools.cache
def _program(family: str, backend: str, quantize: str | None = None) -> TinyProgram:
    return TinyProgram(f"latent-{family}", family, MODELS[family], backend, quantize).export()


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def program(request) -> TinyProgram:
    return _program(*request.param)


@pytest.mark.parametrize("kind", [DecodeSession, SeqSession])
def test_ids_are_those_of_transformers(program, kind):
    """A prompt runs in chunks, and greedy ids follow."""
    text = ids(PROMPT)
    with program.session(kind) as session, program.load(session) as loaded:
        found = decode(loaded, text, PROMPT, DECODED)
    expected = program.expected(text)
    assert error(found, expected) < TOLERANCE
    assert is_greedy(expected[PROMPT - 1 : -1], text[PROMPT:])


def test_branches_and_batches(program):
    """Three sequences decode in the same steps. Two of them share a prefix."""
    prompt, steps = 70, 20
    texts = [ids(prompt) + ids(steps, 37), ids(prompt) + ids(steps, 41), ids(prompt + steps, 43)]
    with program.session(SeqSession) as session, program.load(session) as loaded:
        first = run(loaded, texts[0], 0, prompt, 0)
        session.seq_cp(0, 1)
        rows = [[first], [first], [run(loaded, texts[2], 0, prompt, 2)]]
        for position in range(prompt, prompt + steps):
            session.begin_step([0, 1, 2])
            tokens = torch.tensor([text[position] for text in texts])
            together = loaded.forward(tokens, torch.full((3,), position))
            for row, of_sequence in zip(together, rows, strict=True):
                of_sequence.append(row[None])
    for text, of_sequence in zip(texts, rows, strict=True):
        assert error(torch.cat(of_sequence), program.expected(text)) < TOLERANCE


def test_a_token_has_one_row_of_latents(program):
    config = program.transformers.config
    rank, rotary = config.kv_lora_rank, config.qk_rope_head_dim
    layers = read_kv_cache_metadata(program.request.output).layers
    assert [(layer.n_kv_heads, layer.k_head_dim, layer.v_head_dim) for layer in layers] == [
        (1, rank + rotary, rank)
    ] * config.num_hidden_layers
    assert all(layer.values_in_keys for layer in layers)
    memory = estimate(CacheConfig(layers, 100, growth="exact"), 100)
    assert memory.used == 100 * 4 * (rank + rotary) * config.num_hidden_layers


@pytest.mark.long
def test_the_weight_of_latents_is_not_quantized():
    """The export compares the quantized program with the quantized model, and transformers loads the kept folder."""
    quantized = _program("minicpm3", "cpu", "8da4w")
    assert quantized.request.keep_hf is not None
    kept = type(quantized.transformers).from_pretrained(quantized.request.keep_hf)
    own, other = (made.state_dict() for made in (quantized.transformers, kept))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert torch.equal(own[name], other[name].to(own[name].dtype))
    assert own.keys() == other.keys()


def test_a_model_that_was_taken_answers_as_before_outside_of_programs():
    plain = model("minicpm3")
    tokens = torch.tensor([ids(20)])
    with torch.no_grad():
        expected = plain(tokens, use_cache=False).logits
        names = set(plain.state_dict())
        latent.take(plain)
        latent.take(plain)
        assert torch.equal(plain(tokens, use_cache=False).logits, expected)
    assert set(plain.state_dict()) == names


@pytest.mark.parametrize("form", ["a bias", "values before keys"])
def test_latents_that_are_expanded_in_another_form_are_refused(form):
    plain = model("minicpm3")
    attention = plain.model.layers[1].self_attn
    if form == "a bias":
        attention.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(1))
    else:
        sizes = [attention.v_head_dim, attention.qk_nope_head_dim]

        def expand(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            by_head = attention.kv_b_proj(latent[0]).unflatten(-1, (-1, sum(sizes))).transpose(1, 2)
            values, keys = by_head.split(sizes, dim=-1)
            return torch.cat((keys, rotary.expand(-1, keys.shape[1], -1, -1)), dim=-1), values

        attention.expand_kv = expand
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn: its latents are expanded in a way"):
        latent.take(plain)


class _Calls(torch.nn.Module):
    """Calls of the op, one for each cache, with the given pairs of keys and values."""

    def __init__(self, forms: list[str]) -> None:
        super().__init__()
        self.forms = forms

    def forward(self, latent: torch.Tensor, rotary: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        joined = torch.cat((latent, rotary), dim=-1)
        rank = latent.shape[-1]
        pairs = {
            "joined": (joined, latent),
            "sliced": (joined, joined[..., :rank]),
            "last": (torch.cat((rotary, latent), dim=-1), latent),
            "sliced from 1": (joined, joined[..., 1 : rank + 1]),
            "every second": (joined, joined[..., : 2 * (joined.shape[-1] // 2) : 2]),
            "by tokens": (torch.cat((latent, latent), dim=2)[:, :, : latent.shape[2]], latent),
            "equal": (joined, latent * 1.0),
        }
        out = joined.new_zeros(())
        for cache, form in enumerate(self.forms):
            key, value = pairs[form]
            query = torch.cat((key, key), dim=1)
            call = torch.ops.kvcache.update_and_attend(query, key, value, position, cache, 1.0, torch.float32)
            out = out + call.sum()
        return out


def test_values_in_keys_are_proved_from_the_graph():
    from etkv.export import attention

    attention.register()
    forms = {"joined": True, "sliced": True, "last": False, "sliced from 1": False, "every second": False}
    forms |= {"by tokens": False, "equal": False}
    inputs = (torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 4), torch.arange(3).reshape(3, 1))
    traced = torch.export.export(_Calls(list(forms)), inputs, strict=True)
    assert values_in_keys.of(traced, len(forms) + 1) == [*forms.values(), False]
