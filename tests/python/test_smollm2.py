"""The published model of the demonstration, run by transformers with the weights and the tokenizer that this package
reads."""

from __future__ import annotations

import pytest

import read_models
from etkv import models
from etkv.errors import EtkvError
from etkv.export import source

pytestmark = [pytest.mark.long, pytest.mark.real_model]

_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def origin():
    try:
        return source.find(models.path("smollm2-135m"))
    except EtkvError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(origin):
    return source.read_tokenizer(origin)


def test_tokenizer(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    ids = tokenizer.apply_chat_template(_QUESTION, add_generation_prompt=True).input_ids
    assert ids.count(1) == 3, "system, user and assistant each begin with one token"
    assert ids.count(2) == 2
    assert tokenizer.decode(ids).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.tokenize("in  1969") == ["in", "ĠĠ", "1", "9", "6", "9"]


def test_greedy_answer(tokenizer):
    """The weights are right: transformers' own attention and generation loop, without the cache op, give the answer."""
    import torch

    model = read_models.plain(models.path("smollm2-135m"))
    model.set_attn_implementation("sdpa")
    inputs = tokenizer.apply_chat_template(_QUESTION, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = output[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
