"""Answers that are stopped by another thread, by Ctrl-C in a prompt, or by a change of the cache."""

from __future__ import annotations

import sys
import threading

import pytest

import etkv
import reference
from etkv import _device
from reference import Variant, config

CHUNK = 64
"""Maximum tokens of a step."""

LONG = [(7 * number) % 250 for number in range(3 * CHUNK + 5)]
"""A prompt of four steps."""


@pytest.fixture(params=["mlx", "cpu"])
def model(request):
    return reference.program(Variant("tiny-llama", backend=request.param))


@pytest.fixture
def loaded(model):
    backend = etkv.read_kv_cache_metadata(model.path).backend
    with etkv.DecodeSession(config(model, 400), backend=backend) as session, etkv.load(model.path, session) as program:
        yield program


@pytest.fixture
def steps(loaded, monkeypatch):
    """Return a list of functions. The n-th function is called after the n-th step of a prompt."""
    waiting: list = []

    def then(made):
        if waiting:
            waiting.pop(0)()
        return made

    read, row = _device.DeviceAnswer.read_prompt, loaded.last_row
    monkeypatch.setattr(_device.DeviceAnswer, "read_prompt", lambda answer: then(read(answer)))
    monkeypatch.setattr(loaded, "last_row", lambda *given: then(row(*given)))
    return waiting


def nothing() -> None:
    """Do nothing after a step."""


def ctrl_c() -> None:
    raise KeyboardInterrupt


def answered(loaded, prompt, count=6) -> list[int]:
    return list(etkv.generate_tokens(loaded, prompt, max_tokens=count, eos_token_ids=[]))


@pytest.fixture
def expected(loaded):
    """The answer to the long prompt."""
    ids = answered(loaded, LONG)
    loaded.session.clear()
    return ids


@pytest.mark.parametrize("how", ["ctrl-c", "cancel"])
def test_the_read_part_of_a_prompt_stays(loaded, expected, steps, how):
    answer = etkv.generate_tokens(loaded, LONG, max_tokens=6, eos_token_ids=[])
    steps[:] = [nothing, ctrl_c if how == "ctrl-c" else answer.cancel]
    if how == "ctrl-c":
        with pytest.raises(KeyboardInterrupt):
            next(answer)
    else:
        assert list(answer) == []
        assert answer.finish_reason == "cancelled"
    # The device may have run one more step, whose token Python has not received. The cache does not include it.
    assert loaded.session.length == answer.read_tokens == 2 * CHUNK
    assert answered(loaded, LONG[answer.read_tokens :]) == expected


def test_a_prompt_that_was_read_whole_goes_on_with_its_last_token(loaded, expected, steps):
    answer = etkv.generate_tokens(loaded, LONG, max_tokens=6, eos_token_ids=[])
    steps[:] = [nothing, nothing, nothing, answer.cancel]
    assert list(answer) == []
    assert loaded.session.length == answer.read_tokens == len(LONG) - 1
    assert answered(loaded, LONG[answer.read_tokens :]) == expected


def test_an_answer_is_rolled_back_on_request(loaded, expected, steps):
    assert answered(loaded, [5, 6, 7], 1)
    before = loaded.session.length
    answer = etkv.generate_tokens(loaded, LONG, max_tokens=6, eos_token_ids=[])
    answer.roll_back()
    steps[:] = [nothing, answer.cancel]
    list(answer)
    assert loaded.session.length == before + 2 * CHUNK
    answer.roll_back()
    assert (loaded.session.length, answer.read_tokens) == (before, 0)
    another = etkv.generate_tokens(loaded, LONG, max_tokens=6, eos_token_ids=[])
    next(another)
    next(another)
    another.roll_back()
    assert loaded.session.length == before
    loaded.session.clear()
    assert answered(loaded, LONG) == expected


def test_a_step_of_a_prompt_that_fails_removes_the_prompt(loaded, steps):
    def fail() -> None:
        raise etkv.EtkvError("no")

    steps[:] = [nothing, fail]
    answer = etkv.generate_tokens(loaded, LONG, max_tokens=6, eos_token_ids=[])
    with pytest.raises(etkv.EtkvError, match=r"^no$"):
        next(answer)
    assert loaded.session.length == answer.read_tokens == 0


@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_answer_that_is_cancelled_within_a_step_goes_on(loaded, monkeypatch, at):
    prompt = LONG[:5]
    expected = answered(loaded, prompt, 12)
    loaded.session.clear()
    answer = etkv.generate_tokens(loaded, prompt, max_tokens=12, eos_token_ids=[])
    left = [at]

    def cancelling(step):
        def then(*given):
            left[0] -= 1
            if left[0] == 0:
                answer.cancel()
            return step(*given)

        return then

    monkeypatch.setattr(_device.DeviceAnswer, "next", cancelling(_device.DeviceAnswer.next))
    monkeypatch.setattr(loaded, "last_row", cancelling(loaded.last_row))
    taken = list(answer)
    # If the first step is that of the prompt, the rest continues the prompt.
    rest = (prompt + taken)[loaded.session.length :]
    assert len(rest) == 1
    assert answer.cached_tokens == max(0, len(taken) - 1)
    assert taken + answered(loaded, rest, 12 - len(taken)) == expected


def test_an_answer_is_cancelled_by_another_thread(loaded, tokenizer):
    stream = etkv.stream_generate(loaded, tokenizer, [1, 2, 3], max_tokens=300, eos_token_ids=[])
    responses = [next(stream), next(stream)]
    thread = threading.Thread(target=stream.cancel)
    thread.start()
    thread.join()
    responses += stream
    assert [response.finish_reason for response in responses] == [None, None, "cancelled"]
    assert responses[-1].token is None
    assert loaded.session.length == 3 + stream.generation.cached_tokens
    assert stream.generation.cached_tokens == 1
    stream.cancel()
    stream.close()


@pytest.mark.parametrize("change", ["rewind", "clear", "append"])
def test_an_answer_ends_after_another_change_of_the_cache(loaded, change):
    answer = etkv.generate_tokens(loaded, [1, 2, 3, 4], max_tokens=20, eos_token_ids=[])
    for _ in range(3):
        next(answer)
    session = loaded.session
    assert session.length == 6
    if change == "append":
        loaded.forward([7, 8], [6, 7])
    elif change == "clear":
        session.clear()
    else:
        session.rewind(2)
    held = session.length
    with pytest.raises(
        etkv.PositionError, match=f"continues at position 6, but the next position of the cache is {held}"
    ):
        next(answer)
    assert session.length == held


@pytest.mark.parametrize("change", ["rewind", "clear"])
def test_a_prompt_ends_after_another_change_of_the_cache(loaded, steps, change):
    session = loaded.session
    answer = etkv.generate_tokens(loaded, LONG, max_tokens=20, eos_token_ids=[])
    steps[:] = [nothing, session.clear if change == "clear" else lambda: session.rewind(10)]
    told = f"continues at position {2 * CHUNK}, but the next position of the cache is {0 if change == 'clear' else 10}"
    with pytest.raises(etkv.PositionError, match=told):
        next(answer)
    assert session.length == (0 if change == "clear" else 10)


_CLOSED = """
import sys, threading, time
import etkv
backend = etkv.read_kv_cache_metadata(sys.argv[1]).backend
for delay in range(4):
    facts = etkv.read_kv_cache_metadata(sys.argv[1])
    session = etkv.DecodeSession(etkv.CacheConfig(facts.layers, 2000), backend=backend)
    program = etkv.load(sys.argv[1], session)
    answer = etkv.generate_tokens(program, [1, 2, 3], max_tokens=1900, eos_token_ids=[])
    said = []
    def iterate():
        try:
            for _ in answer:
                pass
            said.append("ended")
        except etkv.EtkvError as error:
            said.append(str(error))
    thread = threading.Thread(target=iterate)
    thread.start()
    while len(answer.token_ids) < 3 + 10 * delay:
        time.sleep(0.001)
    program.close()
    thread.join()
    session.close()
    assert said and "closed" in said[0], said
print("whole")
"""


def test_a_program_that_another_thread_closes_ends_its_answers(model):
    """The test has its own process, because a read of freed memory would crash it."""
    done = reference.run([sys.executable, "-c", _CLOSED, model.path])
    assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stderr


def test_an_answer_whose_program_is_closed_after_the_check_says_so(loaded, monkeypatch):
    """Another thread may close the program between an answer's check and its step."""
    receive, row = _device.DeviceAnswer.next, loaded.last_row

    def closed(step, *given):
        loaded.close()
        return step(*given)

    monkeypatch.setattr(_device.DeviceAnswer, "next", lambda answer: closed(receive, answer))
    monkeypatch.setattr(loaded, "last_row", lambda *given: closed(row, *given))
    with pytest.raises(etkv.EtkvError, match=r"the program model\.pte is closed"):
        list(etkv.generate_tokens(loaded, [1, 2, 3], max_tokens=6, eos_token_ids=[]))
