"""SmolLM2-135M-Instruct in float32, or its first layers, returns the same ids with etkv as in transformers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import reference
from reference import EVERYTHING, STORY, UNIT_ROUNDOFF

pytestmark = pytest.mark.real_model

NEW_TOKENS = 64 if EVERYTHING else 16
"""The number of ids in an answer."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: a chat under the model's template, or plain text if ``raw``. ``tokens`` limits its length."""

    text: str
    raw: bool = False
    system: str | None = None
    tokens: int | None = None

    def ids(self, tokenizer) -> list[int]:
        if self.raw:
            return tokenizer(self.text).input_ids[: self.tokens]
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.text})
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids


PROMPTS = {
    "capital": Prompt("What is the capital of France?"),
    "sky": Prompt("Explain why the sky is blue, in three short paragraphs."),
    "rhymes": Prompt("Tell me about the sea.", system="You are a poet who answers in rhymes."),
    "one token": Prompt("The", raw=True),
    "code": Prompt('def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n', raw=True),
    "accents": Prompt("Les élèves ont demandé : « Où est la bibliothèque ? » 図書館は 25 km 先です。 →", raw=True),
    "story": Prompt(STORY, raw=True),
    "half a story": Prompt(STORY, raw=True, tokens=100),
}
SHORT = ("capital", "half a story")
"""The prompts of `make test`: a chat, and a prompt of several chunks."""
NAMES = tuple(PROMPTS) if EVERYTHING else SHORT


@pytest.fixture(scope="module")
def program() -> reference.Program:
    return reference.program(reference.REAL_MODEL)


@pytest.fixture(scope="module")
def tokenizer(program):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(program.hf, local_files_only=True)


@pytest.fixture(scope="module")
def expected(program, tokenizer) -> dict[str, reference.Greedy]:
    ids = {name: PROMPTS[name].ids(tokenizer) for name in NAMES}
    return reference.greedy(program.hf, ids, NEW_TOKENS)


def assert_same(ids: list[int], expected: reference.Greedy) -> None:
    """Check that ``ids`` are the first of the expected ids. A failure reports the first difference and its margin."""
    assert ids
    for step, (got, want, margin) in enumerate(zip(ids, expected.ids, expected.margins, strict=False)):
        assert got == want, (
            f"id {step} is {got}, not {want}, whose logit is larger by {margin:.3g} in transformers; "
            f"another order of float32 sums changes logits of tens by about 1e-5"
        )


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_those_of_transformers(program, tokenizer, expected, name):
    ran = reference.forward(program, PROMPTS[name].ids(tokenizer), decode=NEW_TOKENS - 1)
    assert len(ran.ids) == NEW_TOKENS
    assert_same(ran.ids, expected[name])
    reference.note(f"{name}: {len(ran.ids)} ids equal, the closest decision by {min(expected[name].margins):.3g}")


CHUNKS = [("half a story", 7)]
OTHER_CHUNKS = [("capital", 1), ("sky", 1), ("sky", 7), ("sky", 64), ("half a story", 1), ("half a story", 64)]


@pytest.mark.parametrize(("name", "chunk"), CHUNKS + OTHER_CHUNKS if EVERYTHING else CHUNKS)
def test_prefill_in_chunks(program, tokenizer, expected, name, chunk):
    """Chunks change the steps, not the answer. The test compares the first half of the answer."""
    ran = reference.forward(program, PROMPTS[name].ids(tokenizer), decode=NEW_TOKENS // 2 - 1, chunk=chunk)
    assert_same(ran.ids, expected[name])


@pytest.mark.parametrize("name", ["capital", "rhymes", "accents"] if EVERYTHING else ["capital"])
def test_chat_reads_and_answers_the_same(program, tokenizer, expected, name):
    """The runner uses its own tokenizer, template, eos tokens and cache, from text to text."""
    prompt, most = PROMPTS[name], min(24, NEW_TOKENS)
    command = [reference.CHAT, "--model", program.path, "--ids", "--max-tokens", most, "--prompt", prompt.text]
    command += ["--raw"] if prompt.raw else []
    command += ["--system", prompt.system] if prompt.system else []
    done = reference.run(command)
    assert done.returncode == 0, done.stderr

    want = expected[name].ids[:most]
    if tokenizer.eos_token_id in want:
        want = want[: want.index(tokenizer.eos_token_id) + 1]
    text, _, ids = done.stdout.rpartition("ids: ")
    assert [int(word) for word in ids.split()] == want
    assert text.rstrip("\n") == tokenizer.decode(want, skip_special_tokens=True).rstrip("\n")
    assert f"prefill {len(prompt.ids(tokenizer))} tokens" in done.stderr


@pytest.mark.long
def test_kv_dtypes(program, tokenizer):
    """Keys and values in 16 bits take half the memory, with some loss of precision.

    Rounding changes the output of attention in every layer by about a unit roundoff, relative to its size. Later layers
    damp or amplify the change, and logits change by one to three units. A limit of eight leaves room for other prompts.
    """
    ids, decode = PROMPTS["sky"].ids(tokenizer), 16
    exact = reference.forward(program, ids, decode=decode, rows="all")
    errors = {}
    for dtype in ("f16", "bf16"):
        ran = reference.forward(program, ids, decode=decode, rows="all", kv_format=dtype)
        assert ran.ids == exact.ids
        assert ran.cache_bytes * 2 == exact.cache_bytes
        errors[dtype] = reference.rms(ran.logits - exact.logits) / reference.spread(exact.logits)
        reference.note(f"KV in {dtype}: rms error {errors[dtype]:.2e} of the spread of logits")
        assert errors[dtype] < 8 * UNIT_ROUNDOFF[dtype]
    assert 0 < errors["f16"] < errors["bf16"] / 4, "bfloat16 keeps 3 bits fewer"
