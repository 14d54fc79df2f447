"""The exporter refuses graphs in which a token depends on other tokens, or on its index in the step, outside of the
cache's ops."""

from __future__ import annotations

import pytest
import torch

import tiny_families
from etkv.errors import EtkvError
from etkv.export import attention, forward, lowering, recurrent, tokens
from etkv.export.forward import Forward


def _step(family: str = "llama", last_logits: bool = False, dtype: torch.dtype = torch.float32) -> Forward:
    from transformers import AutoModelForCausalLM

    attention.register()
    torch.manual_seed(0)
    config = tiny_families.config(family)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME).eval()
    recurrent.take(model)
    step = Forward(model, last_logits=last_logits)
    attention.survey(step, step.inputs(3), 256)
    return step


def _check(step: Forward) -> None:
    tokens.check(lowering._trace(step, 16), forward.samples(step, 3), 256, step.model.config.model_type)


def _shift(x):
    """Mix a token with the one before it, as RWKV does."""
    return x + 0.01 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, : x.shape[1]]


def _convolution(x):
    weight = torch.full((x.shape[2], 1, 2), 0.01)
    return x + torch.nn.functional.conv1d(x.transpose(1, 2), weight, padding=1, groups=x.shape[2])[
        :, :, : x.shape[1]
    ].transpose(1, 2)


def _attention(x):
    """Attend without transformers' attention functions."""
    mask = torch.full((x.shape[1], x.shape[1]), -1e4, dtype=x.dtype).triu(1)
    return x + 0.1 * torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x


def _value_mask(x):
    """Keep the tokens whose value is large compared with other tokens."""
    size = x.square().mean(-1, keepdim=True)
    return x * (size >= size.mean(1, keepdim=True))


READ_OTHERS = {
    "shift": _shift,
    "shift by two": lambda x: x + 0.01 * torch.nn.functional.pad(x, (0, 0, 2, 0))[:, : x.shape[1]],
    "convolution": _convolution,
    "attention": _attention,
    "mask of values": _value_mask,
    "sum over tokens": lambda x: x + 0.01 * x.cumsum(1),
    "mean over tokens": lambda x: x - 0.01 * x.mean(1, keepdim=True),
    "norm over tokens": lambda x: x / x.square().mean((1, 2), keepdim=True).sqrt(),
    "largest of all": lambda x: x / x.abs().max(),
    "next token": lambda x: x + 0.01 * x.roll(-1, 1),
}
READ_PLACES = {
    "place": lambda x: x + 0.01 * torch.arange(x.shape[1])[:, None],
    "distance to the end": lambda x: x * torch.arange(x.shape[1], 0, -1)[:, None],
    "number of tokens": lambda x: x / x.shape[1],
}


SHORT = ("shift", "attention", "place")
"""The changes of `make test`: a token reads the one before it, all tokens, or its index."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, torch.float32, marks=() if name in SHORT else pytest.mark.long)
            for name in [*READ_OTHERS, *READ_PLACES]
        ),
        *(
            pytest.param(name, torch.bfloat16, marks=pytest.mark.long)
            for name in ("attention", "mask of values", "place")
        ),
    ],
    ids=str,
)
def test_a_module_that_reads_other_tokens_or_places(name, dtype):
    step = _step(dtype=dtype)
    change = (READ_OTHERS | READ_PLACES)[name]
    step.model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: change(output).to(output.dtype))
    with pytest.raises(EtkvError) as caught:
        _check(step)
    place = "reads the index of a token in its step, or the number of tokens"
    what = "reads other tokens" if name in READ_OTHERS else place
    assert str(caught.value).startswith(f"model family 'llama' cannot be exported: model.layers.1.mlp {what}")


def test_a_program_of_the_last_row_is_checked_too():
    step = _step(last_logits=True)
    _check(step)
    step.model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: _shift(output))
    with pytest.raises(EtkvError, match=r"model\.layers\.0\.mlp reads other tokens"):
        _check(step)


def test_an_op_with_positions_of_its_own():
    step = _step()
    run = attention.run

    def shifted(model, cache_position, **arguments):
        return run(model, cache_position + 1, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "run", shifted)
        traced = lowering._trace(step, 16)
    with pytest.raises(ValueError, match=r"^an op of the cache gets the positions \[5, 256, 2\], not the step's$"):
        tokens.check(traced, forward.samples(step, 3), 256, "llama")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma4_text", torch.float32),
        ("qwen3_5_text", torch.bfloat16),
        *(pytest.param(family, torch.float32, marks=pytest.mark.long) for family in ("opt", "phi")),
        *(pytest.param(family, torch.bfloat16, marks=pytest.mark.long) for family in ("falcon_h1", "mixtral")),
        pytest.param("llama", torch.float16, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_models_whose_tokens_meet_in_the_cache(family, dtype):
    """Rounding in half precision does not cause a refusal, because the check computes in float32."""
    _check(_step(family, dtype=dtype))


def test_a_context_beyond_the_positions_of_a_model():
    step = _step("opt")
    with pytest.raises(
        EtkvError, match=r"^max-context 1000 is above the positions of the model: index .* smaller --max-c"
    ):
        tokens.check(lowering._trace(step, 16), forward.samples(step, 3), 1000, "opt")


def test_outputs_of_which_some_are_infinite_are_compared():
    """A model may exclude ids with logits of minus infinity."""
    step = _step()
    head = step.model.lm_head.forward
    step.model.lm_head.forward = lambda x: head(x).index_fill(-1, torch.tensor([3]), -torch.inf)
    _check(step)
    mlp = step.model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: _shift(own(x))
    with pytest.raises(EtkvError, match=r"layers\.1"):
        _check(step)
