"""Programs of ExecuTorch's own exporter with a KV cache in the graph, in ``etkv_chat`` and from Python."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import etkv
import reference
import upstream_programs
from etkv import inspection
from etkv.__main__ import main
from reference import PROMPT, Variant
from runners import FAILED, answers, refused, runner
from test_interruptions import Interruption
from upstream_programs import CHUNK, CONTEXT, IN_GRAPH, OPTIMUM, llm

MADE = llm("tiny-llama", *IN_GRAPH)
COUNT = 24
"""Maximum tokens of an answer."""

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template that does not produce the padding token, whose embedding is zero in a random model: see
docs/programs.md."""

SAID = ("What is a cache? " * 5, "And where is it?")
"""Two turns. The prompt of the first takes more than one step."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The program, with the tokenizer in the same folder."""
    assert upstream_programs.export([MADE])[MADE] is None
    folder = tmp_path_factory.mktemp("graph-cache")
    shutil.copy(MADE.path, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MADE.weights / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder / "model.pte"


@pytest.fixture(scope="module")
def tokenizer(model) -> etkv.Tokenizer:
    return etkv.Tokenizer.from_pretrained(model)


@pytest.fixture
def program(model):
    with etkv.load(model, None) as program:
        yield program


def expected(tokenizer: etkv.Tokenizer, prompt: list[int], count: int = COUNT) -> list[int]:
    """Return transformers' greedy ids, with the eos token id."""
    ids = reference.greedy(MADE.weights, {"": prompt}, count)[""].ids
    ends = [index + 1 for index, one in enumerate(ids) if one in tokenizer.eos_token_ids]
    return ids[: min([*ends, count])]


def turns(tokenizer: etkv.Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Return the prompt and the answer of each turn of a chat in transformers. Answers keep their ids in later
    prompts.
    """
    messages: list[dict[str, str]] = []
    answered: dict[int, list[int]] = {}
    made = []
    for said in SAID:
        messages.append({"role": "user", "content": said})
        prompt = tokenizer.conversation_ids(messages, answered)
        ids = expected(tokenizer, prompt)
        answered[len(messages)] = [one for one in ids if one not in tokenizer.eos_token_ids]
        messages.append({"role": "assistant", "content": tokenizer.decode(ids)})
        made.append((prompt, ids))
    assert len(made[0][0]) > CHUNK
    return made


def chat(model: Path, *options: object, lines: str = ""):
    words = [reference.CHAT, "--model", model, "--ids", "--max-tokens", COUNT, *options]
    done = reference.run(words, input=lines, stdin=None)
    assert done.returncode == 0, done.stderr
    return done


# ---- etkv_chat ------------------------------------------------------------------------------------------------------


def test_chat_answers_as_transformers_does(model, tokenizer):
    first, second = turns(tokenizer)
    done = chat(model, lines=f"{SAID[0]}\n{SAID[1]}\n/undo\n{SAID[1]}\n/reset\n{SAID[0]}\n/stats\n/stats json\n")
    assert answers(done.stdout) == [first[1], second[1], second[1], first[1]]
    assert len(re.findall(r"^the cache is part of the program: there is no session", done.stderr, re.M)) == 1
    assert "undid the last exchange; the cache holds 0 positions" in done.stderr
    assert f"of {CONTEXT} positions (in the program)" in done.stderr
    assert "there is no report of a cache that is part of the program" in done.stderr


def test_a_second_turn_runs_new_tokens_only(model, tokenizer):
    """With --raw a conversation is one text, and the second turn continues after the first answer."""
    first = tokenizer.encode(SAID[0])
    answer = expected(tokenizer, first)
    added = tokenizer.encode(SAID[1], add_special_tokens=False)
    done = chat(model, "--raw", lines=f"{SAID[0]}\n{SAID[1]}\n")
    assert answers(done.stdout) == [answer, expected(tokenizer, first + answer + added)]
    # The last token of the first answer has not run.
    held = len(first + answer) - 1
    assert f"prefill {len(added) + 1} tokens" in done.stderr
    assert f", {held} cached" in done.stderr


@pytest.mark.skipif(not OPTIMUM, reason="optimum-executorch exports it: ETKV_TEST_OPTIMUM")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3"])
def test_programs_of_the_plain_pipeline(name):
    """These programs have no limit of tokens in a step, except Gemma's, whose limit is one."""
    made = llm(name)
    assert upstream_programs.export([made])[made] is None
    tokenizer = etkv.Tokenizer.from_pretrained(made.weights)
    prompt = tokenizer.encode("Hello")
    greedy = reference.greedy(made.weights, {"": prompt}, COUNT)[""].ids
    done = chat(made.path, "--tokenizer", made.weights, "--raw", "--prompt", "Hello")
    (told,) = answers(done.stdout)
    assert told == greedy[: len(told)]
    with etkv.load(made.path, None) as program:
        assert list(etkv.generate_tokens(program, prompt, max_tokens=COUNT, eos_token_ids=[])) == greedy


def test_one_prompt_and_samples_are_those_of_python(model, tokenizer, program):
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": SAID[0]}], add_generation_prompt=True)
    sampling = {"temperature": 0.8, "top_k": 50, "seed": 3}
    options = [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = chat(model, "--prompt", SAID[0], *options)
    ids = etkv.generate_tokens(program, prompt, max_tokens=COUNT, eos_token_ids=tokenizer.eos_token_ids, **sampling)
    drawn = list(ids)
    (told,) = answers(done.stdout)
    assert told[: len(drawn)] == drawn
    assert set(told[len(drawn) :]) <= tokenizer.eos_token_ids
    assert drawn != expected(tokenizer, prompt)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--session", "contiguous"], "--session requires a cache that etkv makes"),
        (["--kv-format", "f16"], "--kv-format requires a cache that etkv makes"),
        (["--kv-dtype", "f16"], "--kv-format requires a cache that etkv makes"),
        (["--draft", "ngram"], "--draft requires a cache that etkv makes"),
        (["--capacity", CONTEXT + 1], f"--capacity {CONTEXT + 1} is above {CONTEXT}"),
    ],
)
def test_options_of_a_session_are_refused(model, options, told):
    refused([reference.CHAT, "--model", model, "--prompt", "Hi", *options], FAILED, told)


def test_other_runners_refuse_it(model):
    refused([runner("batch"), "--model", model], FAILED, "does not report `get_n_caches`", "off-graph")


def test_a_prompt_that_does_not_fit_is_refused_before_it_runs(model, tokenizer):
    prompt = "x" * CONTEXT
    n = len(tokenizer.encode(prompt))
    done = reference.run([reference.CHAT, "--model", model, "--raw", "--prompt", prompt + "y", "--ids"])
    assert (done.returncode, done.stdout) == (FAILED, "")
    assert f"the prompt is {n + 1} tokens long, and the cache holds {CONTEXT}" in done.stderr
    # The refused prompt does not change the conversation.
    done = chat(model, "--raw", lines=f"Hi\n{prompt}\nand\n")
    assert len(answers(done.stdout)) == 2
    assert ", 25 cached" in done.stderr


def test_a_full_cache_ends_an_answer(model, tokenizer):
    done = chat(model, "--raw", "--prompt", "x" * 20, "--capacity", 30)
    (ids,) = answers(done.stdout)
    assert ids == expected(tokenizer, tokenizer.encode("x" * 20))[: len(ids)]
    assert len(ids) == 11
    assert "stopped: the cache is full at 30 positions" in done.stderr


def test_a_program_without_a_cache_is_refused(tmp_path):
    """An off-graph program without metadata is not mistaken for a program with its cache in its graph."""
    made = reference.program(Variant("tiny-llama"))
    image = made.path.read_bytes()
    for name in (b"kv_cache.schema_version", b"get_n_caches"):
        assert name in image
        image = image.replace(name, name[:-1] + b"X")
    (tmp_path / "model.pte").write_bytes(image)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(made.path.parent / name, tmp_path)
    words = [reference.CHAT, "--model", tmp_path / "model.pte", "--prompt", "Hi"]
    refused(words, FAILED, "the program has no KV cache", "`get_n_caches`")
    with etkv.load(tmp_path / "model.pte", None) as program:
        assert program.cache is None
        with pytest.raises(etkv.EtkvError, match="without a session"):
            etkv.generate_tokens(program, [1])


# ---- Python ---------------------------------------------------------------------------------------------------------


def test_a_chat_answers_as_transformers_does(program, tokenizer):
    conversation = etkv.Chat(program, tokenizer)
    for said, (prompt, ids) in zip(SAID, turns(tokenizer), strict=True):
        assert "".join(conversation.send_message(said, max_tokens=COUNT)) == tokenizer.decode(ids)
        assert conversation.generation is not None
        assert conversation.generation.token_ids == [one for one in ids if one not in tokenizer.eos_token_ids]
        assert program.cache.length == len(prompt) + conversation.generation.cached_tokens


def test_an_answer_goes_on_after_a_break(program, tokenizer):
    prompt = tokenizer.encode(SAID[0])
    greedy = reference.greedy(MADE.weights, {"": prompt}, COUNT)[""].ids
    answer = etkv.generate_tokens(program, prompt, max_tokens=10, eos_token_ids=[])
    assert list(answer) == greedy[:10]
    assert (answer.cached_tokens, program.cache.length) == (9, len(prompt) + 9)
    rest = etkv.generate_tokens(program, answer.token_ids[9:], max_tokens=COUNT - 10, eos_token_ids=[])
    assert answer.token_ids + list(rest) == greedy
    assert rest.prompt_tokens == 1


def test_the_cache_of_a_program(program):
    cache = program.cache
    assert isinstance(cache, etkv.GraphCache)
    assert program.session is None
    assert (cache.length, cache.capacity, program.max_step_tokens) == (0, CONTEXT, CHUNK)
    program.forward([1, 2, 3], range(3))
    assert (cache.length, cache.rewindable_to()) == (3, 3)
    assert cache.can_extend(CONTEXT - 3)
    assert not cache.can_extend(CONTEXT - 2)
    assert "bound to <GraphCache: 3 of 256 positions in the program's graph>" in repr(program)
    cache.rewind(3)
    with pytest.raises(etkv.PositionError, match=r"length is 2, and .* holds 3 positions and cannot rewind"):
        cache.rewind(2)
    with pytest.raises(etkv.CapacityError, match="the prompt has 254 tokens, the cache has room for 253 of 256"):
        next(etkv.generate_tokens(program, [5] * 254))
    with pytest.raises(etkv.EtkvError, match="sequence is 1, but the cache has one sequence only"):
        etkv.generate_tokens(program, [5], sequence=1)
    assert cache.length == 3
    for clear in (program.reset_buffers, cache.clear, lambda: cache.rewind(0)):
        program.forward([1], [0])
        clear()
        assert cache.length == 0
    program.close()
    with pytest.raises(etkv.EtkvError, match="no loaded program keeps buffers"):
        cache.clear()


def test_a_clear_that_is_interrupted_clears(program):
    """After an interrupt at any point, before or after the reset of the buffers, the length and the buffers are
    consistent.
    """
    expected, cache = list(etkv.generate_tokens(program, PROMPT, max_tokens=4, eos_token_ids=[])), program.cache
    with Interruption(None) as interruption:
        cache.clear()
    for at in range(1, interruption.n_places + 1):
        cache.clear()
        ids = list(etkv.generate_tokens(program, PROMPT, max_tokens=2, eos_token_ids=[]))
        with Interruption(at):
            cache.clear()
        rest, ids = (ids[-1:], ids) if cache.length else (PROMPT, [])
        ids += list(etkv.generate_tokens(program, rest, max_tokens=2, eos_token_ids=[]))
        assert ids == expected[: len(ids)], f"interrupted at place {at}"


def test_a_failed_answer_keeps_the_steps_that_ran(program, monkeypatch):
    monkeypatch.setattr(etkv.generation, "choose", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(etkv.generate_tokens(program, [1, 2, 3]))
    assert program.cache.length == 0, "a text from its beginning on is cleared"
    program.forward([7, 8], range(2))
    with pytest.raises(ZeroDivisionError):
        next(etkv.generate_tokens(program, [1, 2, 3]))
    assert program.cache.length == 5


def test_inspect_names_it(model):
    found = inspection.report(model)
    assert found["layers"] is None
    assert found["cache"] == {"in_graph": {"buffers": 4, "capacity": CONTEXT}}
    assert f"cache: part of the program, in 4 buffers for {CONTEXT} positions; load it without a session" in list(
        inspection.lines(found)
    )


def test_the_command_that_answers(model, tokenizer, capsys):
    def generate(*words: object) -> tuple[int, str, str]:
        status = main(["generate", str(model), *map(str, words)])
        return status, *capsys.readouterr()

    prompt = tokenizer.apply_chat_template([{"role": "user", "content": SAID[0]}], add_generation_prompt=True)
    status, out, told = generate(SAID[0], "--max-tokens", COUNT)
    assert (status, out) == (0, tokenizer.decode(expected(tokenizer, prompt)) + "\n")
    assert told.count("the cache is part of the program: there is no session") == 1
    assert "the cache is full: 20 positions" in generate("x" * 18, "--raw", "--capacity", 20)[2]
    for options, message in (
        (["--kv-format", "f16"], "--kv-format does not apply"),
        (["--capacity", CONTEXT + 1], f"--capacity is {CONTEXT + 1}, expected 1 to {CONTEXT}"),
    ):
        status, out, told = generate("Hi", *options)
        assert (status, out) == (2, "")
        assert f"error: {message}" in told


def test_a_session_is_refused(model):
    config = etkv.CacheConfig([etkv.LayerConfig(2, 32)] * 2, CONTEXT)
    with etkv.DecodeSession(config) as session, pytest.raises(etkv.EtkvError, match="attends in 0 layers"):
        etkv.load(model, session)


def test_two_loads_have_caches_of_their_own(model, program, tokenizer):
    prompt = tokenizer.encode(SAID[0])
    greedy = expected(tokenizer, prompt)
    with etkv.load(model, None) as other:
        first = etkv.generate_tokens(program, prompt, max_tokens=4, eos_token_ids=[])
        second = etkv.generate_tokens(other, prompt, max_tokens=4, eos_token_ids=[])
        assert list(zip(first, second, strict=True)) == [(one, one) for one in greedy[:4]]
        other.cache.clear()
        assert program.cache.length == len(prompt) + 3
