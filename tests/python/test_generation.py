"""Answers token by token, text to ids and back, chats, and wrong use."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import weakref

import pytest

import etkv
import reference
from etkv import _device
from reference import PROMPT, Variant, config


@pytest.fixture
def by_steps(monkeypatch):
    """Let the host choose every token from the logits of a step, as with a CPU program."""
    monkeypatch.setattr(_device.DeviceAnswer, "make", lambda *_: None)


def alone(
    program: reference.Program, ids: list[int], max_tokens: int, max_step_tokens: int = 0, **options
) -> list[int]:
    """Return the answer of a session of its own."""
    with (
        etkv.DecodeSession(config(program, 200, max_step_tokens=max_step_tokens)) as session,
        etkv.load(program.path, session, logits="last") as loaded,
    ):
        return list(etkv.generate_tokens(loaded, ids, max_tokens=max_tokens, **options))


def test_greedy_ids_are_those_of_transformers(loaded, greedy_ids):
    answer = etkv.generate_tokens(loaded, PROMPT, max_tokens=24, eos_token_ids=[])
    assert list(answer) == greedy_ids == answer.token_ids
    assert answer.finish_reason == "length"
    assert (answer.cached_tokens, loaded.session.length) == (23, len(PROMPT) + 23)
    assert answer.prefill_seconds > 0
    assert answer.tokens_per_second > 0


def test_an_answer_goes_on_after_a_break(loaded, greedy_ids):
    """After a break, the rest of the answer begins with the token that is not in the cache yet."""
    answer = etkv.generate_tokens(loaded, PROMPT, max_tokens=24, eos_token_ids=[])
    for _, _token in zip(range(10), answer, strict=False):
        pass
    assert answer.finish_reason is None
    assert loaded.session.length == len(PROMPT) + answer.cached_tokens
    rest = etkv.generate_tokens(
        loaded, answer.token_ids[answer.cached_tokens :], max_tokens=24 - len(answer.token_ids), eos_token_ids=[]
    )
    assert answer.token_ids + list(rest) == greedy_ids


def test_nothing_runs_before_the_first_token(loaded):
    answer = etkv.generate_tokens(loaded, PROMPT)
    assert (loaded.session.length, answer.cached_tokens, answer.token_ids) == (0, 0, [])


def test_ends_and_capacity(llama, loaded, greedy_ids):
    answer = etkv.generate_tokens(loaded, PROMPT, eos_token_ids=[greedy_ids[5]])
    first = greedy_ids.index(greedy_ids[5])
    assert list(answer) == greedy_ids[:first]
    assert answer.finish_reason == "stop"
    with (
        etkv.DecodeSession(config(llama, 10)) as session,
        etkv.load(llama.path, session, logits="last") as small,
    ):
        answer = etkv.generate_tokens(small, PROMPT, eos_token_ids=[])
        assert list(answer) == greedy_ids[:4]
        assert answer.finish_reason == "capacity"
        assert session.length == 10
        session.rewind(7)
        assert list(etkv.generate_tokens(small, [greedy_ids[0]], max_tokens=2, eos_token_ids=[])) == greedy_ids[1:3]
        with pytest.raises(etkv.CapacityError, match="the prompt has 5 tokens, the cache has room for"):
            list(etkv.generate_tokens(small, [1] * 5))


def test_a_prompt_longer_than_a_step(loaded):
    """150 tokens in chunks of 64 give the same answer as in single tokens."""
    prompt = [(7 * i) % 250 for i in range(150)]
    chunked = list(etkv.generate_tokens(loaded, prompt, max_tokens=8, eos_token_ids=[]))
    loaded.session.clear()
    for position, token in enumerate(prompt[:-1]):
        loaded.forward([token], [position], copy=False)
    assert list(etkv.generate_tokens(loaded, prompt[-1:], max_tokens=8, eos_token_ids=[])) == chunked


def test_sequences_of_one_session(llama, greedy_ids):
    with (
        etkv.SeqSession(config(llama, 200)) as session,
        etkv.load(llama.path, session, logits="last") as loaded,
    ):
        first = etkv.generate_tokens(loaded, PROMPT, max_tokens=12, eos_token_ids=[])
        second = etkv.generate_tokens(loaded, PROMPT, max_tokens=12, eos_token_ids=[], sequence=9)
        pairs = list(zip(first, second, strict=True))
        assert pairs == [(token, token) for token in greedy_ids[:12]]
        assert session.sequences() == [0, 9]


@pytest.mark.parametrize("failing", [1, 2], ids=["prefill", "decode"])
def test_a_failed_step_leaves_no_declaration(llama, greedy_ids, monkeypatch, by_steps, failing):
    """After the failure, the cache accepts candidates, and the next step needs no declaration."""
    with etkv.TreeSession(config(llama, 200)) as session, etkv.load(llama.path, session) as loaded:
        forward, calls = loaded.last_row, []

        def fails(*args, **options):
            calls.append(1)
            if len(calls) == failing:
                raise KeyboardInterrupt
            return forward(*args, **options)

        monkeypatch.setattr(loaded, "last_row", fails)
        answer = etkv.generate_tokens(loaded, PROMPT, max_tokens=8, eos_token_ids=[])
        with pytest.raises(KeyboardInterrupt):
            list(answer)
        assert answer.token_ids == greedy_ids[: failing - 1]
        at = session.seq_next(0)
        assert at == (len(PROMPT) if answer.token_ids else 0)
        rest = answer.token_ids[answer.cached_tokens :] or PROMPT
        # These are two candidates, but the answer had declared one token.
        session.propose([-1, -1])
        forward([rest[0]] * 2, [at] * 2)
        session.commit([0] if answer.token_ids else [])
        if not answer.token_ids:
            assert list(etkv.generate_tokens(loaded, PROMPT, max_tokens=3, eos_token_ids=[])) == greedy_ids[:3]
        assert session.seq_next(0) > at


def test_draws(loaded):
    """The same seed repeats an answer, ``top_k=1`` is greedy, and a temperature varies answers."""

    def draw(**options) -> list[int]:
        loaded.session.clear()
        return list(etkv.generate_tokens(loaded, PROMPT, max_tokens=16, eos_token_ids=[], **options))

    best = draw()
    assert draw(temperature=0.7, top_k=1, seed=1) == best
    assert draw(temperature=0.7, top_p=1e-9, seed=1) == best
    assert draw(temperature=1.5, seed=1) == draw(temperature=1.5, seed=1)
    assert len({tuple(draw(temperature=1.5, seed=seed)) for seed in range(4)}) > 1
    assert draw(temperature=1e-320, seed=1) == best
    assert draw(temperature=0.7, min_p=1.0, seed=1) == best
    assert draw(logit_bias={best[0]: -math.inf})[0] != best[0]
    assert draw(logit_bias={3: 1e9}) == [3] * 16
    assert len(set(draw(repetition_penalty=100.0))) == 16


SAMPLINGS = [
    {},
    {"temperature": 1.5},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.2, "top_p": 0.7, "logit_bias": {7: 3.0}},
    {"temperature": 1.2, "min_p": 0.2},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_device_and_host_choose_the_same(loaded, monkeypatch, sampling):
    def drawn() -> list[int]:
        loaded.session.clear()
        return list(etkv.generate_tokens(loaded, PROMPT, max_tokens=40, eos_token_ids=[], seed=11, **sampling))

    on_device = drawn()
    monkeypatch.setattr(_device.DeviceAnswer, "make", lambda *_: None)
    assert drawn() == on_device


def test_the_device_chooses_for_every_token_of_a_step(llama):
    """The tokens are the argmax of each row of logits. A refused step changes nothing."""
    with etkv.DecodeSession(config(llama, 64)) as session, etkv.load(llama.path, session) as loaded:
        wanted = loaded.forward(PROMPT, range(len(PROMPT))).argmax(-1).tolist()
        session.clear()
        assert loaded.choose(PROMPT, range(len(PROMPT))) == wanted
        for tokens, at, told in [
            ([], [], "0 tokens"),
            ([1], [0, 1], "1 tokens at 2 positions"),
            ([1], [60], "60"),
            ([1], [2**31], "position 2147483648; expected 0 to 2147483647"),
            ([2**63], [6], "token 9223372036854775808; expected 0 to"),
        ]:
            with pytest.raises(etkv.EtkvError, match=told):
                loaded.choose(tokens, at)
        assert session.length == len(PROMPT)
    with pytest.raises(etkv.EtkvError, match="is closed"):
        loaded.choose([1], [0])
    with etkv.load(llama.path, None) as loaded, pytest.raises(etkv.EtkvError, match="without a session"):
        loaded.choose([1], [0])


def test_a_program_that_is_closed_ends_its_answers(llama):
    with etkv.DecodeSession(config(llama, 200)) as session:
        with etkv.load(llama.path, session, logits="last") as loaded:
            answer = etkv.generate_tokens(loaded, PROMPT, max_tokens=24, eos_token_ids=[])
            next(answer)
        with pytest.raises(etkv.EtkvError, match="is closed: load it again"):
            next(answer)
        assert session.length == len(PROMPT)


def test_arguments_in_another_order_are_refused(loaded, tokenizer):
    with pytest.raises(etkv.EtkvError, match=r"tokenizer is Program, expected an etkv\.Tokenizer"):
        etkv.generate(tokenizer, loaded, "Hello")
    with pytest.raises(etkv.EtkvError, match=r"program is Tokenizer, expected an etkv\.Program from etkv\.load"):
        etkv.generate_tokens(tokenizer, PROMPT)


def test_paths_that_are_not_text_are_refused(llama):
    with etkv.DecodeSession(config(llama, 20)) as session:
        for path in ("a\udcff.pte", "a\0.pte"):
            for call in (lambda path: etkv.load(path, session), session.save, session.load):
                with pytest.raises(etkv.EtkvError, match="path is"):
                    call(path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_tokens": -1}, "max_tokens is -1, the minimum is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5, expected an integer"),
        ({"temperature": -0.5}, "temperature is -0.5, the minimum is 0"),
        ({"temperature": float("nan")}, "temperature is nan, the minimum is 0"),
        ({"seed": -1}, "seed is -1, the minimum is 0"),
        ({"top_p": 0}, "top_p is 0, expected more than 0 and at most 1"),
        ({"top_k": -2}, "top_k is -2, the minimum is 0"),
        ({"min_p": 2}, "min_p is 2, expected 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected more than 0"),
        ({"sequence": 3}, "sequence is 3, but the cache has one sequence only: use a SeqSession"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": "Hello"}, "prompt has 'H'; expected token ids; a Tokenizer encodes text"),
    ],
)
def test_wrong_use(loaded, options, told):
    with pytest.raises(etkv.EtkvError) as caught:
        etkv.generate_tokens(loaded, options.pop("prompt", PROMPT), **options)
    assert told in str(caught.value)
    assert caught.value.status is etkv.Status.INVALID_ARGUMENT


QUESTION = [{"role": "user", "content": "Hi"}]


def test_text(llama, tokenizer):
    assert tokenizer.decode(tokenizer.encode("naïve €")) == "naïve €"
    written = "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False) == written
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{written}<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == "user\nHi\nassistant\n"
    assert ids == etkv.Tokenizer(tokenizer.hf).apply_chat_template(QUESTION, add_generation_prompt=True)
    with pytest.raises(etkv.EtkvError, match="the chat template cannot render this conversation"):
        tokenizer.apply_chat_template([3])


def test_a_template_takes_variables(llama, tokenizer):
    other = etkv.Tokenizer.from_file(llama.path.parent / "tokenizer.json")
    assert not other.has_chat_template
    with pytest.raises(etkv.EtkvError, match="the model has no chat template: use encode"):
        other.apply_chat_template(QUESTION)
    other.hf.chat_template = "{{ messages[0].content }}{% if shout %}!{% endif %}"
    assert other.apply_chat_template(QUESTION, tokenize=False, shout=True) == "Hi!"
    assert other.apply_chat_template(QUESTION) == tokenizer.encode("Hi")


def test_a_detokenizer_returns_whole_characters(tokenizer):
    """Each byte of a character is a token here. An incomplete character becomes U+FFFD."""
    detokenizer = tokenizer.detokenizer
    ids = tokenizer.encode("aß€")
    segments = []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    assert segments == ["a", "", "ß", "", "", "€"]
    assert (detokenizer.text, detokenizer.tokens) == ("aß€", ids)
    detokenizer.finalize()
    assert detokenizer.last_segment == ""
    detokenizer.reset()
    for token in ids[:-1]:
        detokenizer.add_token(token)
    assert detokenizer.text == "aß"
    detokenizer.finalize()
    assert detokenizer.text == "aß\ufffd"


def test_text_of_an_answer(loaded, tokenizer):
    """There is a response for each token, and a last response. Their texts together equal the text of ``generate``."""
    prompt = tokenizer.encode("Hi")
    ids = list(etkv.generate_tokens(loaded, prompt, max_tokens=12, eos_token_ids=[]))
    loaded.session.clear()
    responses = list(etkv.stream_generate(loaded, tokenizer, "Hi", max_tokens=12, eos_token_ids=[]))
    assert [response.token for response in responses] == [*ids, None]
    assert [response.finish_reason for response in responses] == [None] * 12 + ["length"]
    assert [response.generation_tokens for response in responses] == [*range(1, 13), 12]
    assert {response.prompt_tokens for response in responses} == {len(prompt)}
    assert responses[-1].prompt_tps > 0
    assert responses[-1].generation_tps > 0
    text = "".join(response.text for response in responses)
    assert text == tokenizer.decode(ids)
    loaded.session.clear()
    assert etkv.generate(loaded, tokenizer, prompt, max_tokens=12, eos_token_ids=[]) == text


def test_the_tokenizers_eos_token_ids_end_answers_of_programs_without_any(loaded, greedy_ids, tokenizer, monkeypatch):
    ending = etkv.Tokenizer(tokenizer.hf, eos_token_ids=[greedy_ids[2]])
    first = greedy_ids.index(greedy_ids[2])

    def answered(**options) -> tuple[int, str]:
        loaded.session.clear()
        *_, last = etkv.stream_generate(loaded, ending, PROMPT, max_tokens=24, **options)
        return last.generation_tokens, last.finish_reason

    monkeypatch.setattr(etkv.Program, "eos_token_ids", frozenset())
    assert answered() == (first, "stop")
    assert answered(eos_token_ids=[]) == (24, "length")
    monkeypatch.setattr(etkv.Program, "eos_token_ids", frozenset([greedy_ids[0]]))
    assert answered() == (0, "stop")


def test_arguments_are_refused_before_the_first_response(loaded, tokenizer):
    with pytest.raises(etkv.EtkvError, match="temperature is -1, the minimum is 0"):
        etkv.stream_generate(loaded, tokenizer, "Hi", temperature=-1)


def test_reprs(llama, loaded, tokenizer):
    answer = etkv.generate_tokens(loaded, PROMPT, max_tokens=3, eos_token_ids=[])
    assert repr(answer) == "<Generation: 0 of 3 tokens, unfinished>"
    list(answer)
    assert repr(answer) == "<Generation: 3 of 3 tokens, length>"
    assert repr(loaded) == f"<Program: {llama.path.name}, bound to {loaded.session!r}>"
    assert not loaded.closed
    loaded.close()
    assert loaded.closed
    assert repr(loaded) == f"<Program: {llama.path.name}, closed>"
    assert repr(tokenizer) == f"<Tokenizer: {len(tokenizer.hf)} tokens, a chat template>"
    assert repr(tokenizer.detokenizer) == "<StreamingDetokenizer: 0 tokens, 0 characters>"


def test_a_chat_runs_new_tokens_only(llama, loaded, tokenizer):
    """Each answer equals that of a run of the whole conversation on an empty cache."""
    chat, answers = etkv.Chat(loaded, tokenizer, system="Be brief."), {}
    for text in ("Hi", "And you?"):
        messages = [*chat.messages, {"role": "user", "content": text}]
        whole = tokenizer.conversation_ids(messages, answers)
        said = "".join(chat.send_message(text, max_tokens=12))
        assert chat.messages == [*messages, {"role": "assistant", "content": said}]
        answers[len(messages)] = chat.generation.token_ids
        prefilled = chat.generation.prompt_tokens
        assert alone(llama, whole, 12) == chat.generation.token_ids
    first = tokenizer.apply_chat_template(chat.messages[:2], add_generation_prompt=True)
    assert prefilled <= len(whole) - len(first), "the first turn was not run again"
    # If a message changes, the messages before it are kept.
    chat.messages[1:] = []
    list(chat.send_message("Hello?", max_tokens=3))
    assert chat.generation.prompt_tokens < len(
        tokenizer.apply_chat_template(chat.messages[:-1], add_generation_prompt=True)
    )
    for _ in chat.send_message("x", max_tokens=30, eos_token_ids=[]):
        break
    assert [message["role"] for message in chat.messages[-2:]] == ["user", "assistant"]
    list(chat.send_message("y", max_tokens=3, eos_token_ids=[]))
    assert len(chat.generation.token_ids) == 3


def test_special_tokens_of_an_answer(loaded, tokenizer):
    """The text has no special tokens unless requested. The next turn of a chat keeps them in either case."""
    special = tokenizer.hf.bos_token_id
    forced = {"max_tokens": 3, "logit_bias": {special: 1e9}, "eos_token_ids": []}
    for skip, text in ((True, ""), (False, 3 * tokenizer.hf.bos_token)):
        loaded.session.clear()
        assert etkv.generate(loaded, tokenizer, PROMPT, skip_special_tokens=skip, **forced) == text
        chat = etkv.Chat(loaded, tokenizer, skip_special_tokens=skip)
        assert "".join(chat.send_message("a", **forced)) == text
        assert chat.messages[1]["content"] == text
        held = loaded.session.length
        list(chat.send_message("b", max_tokens=1, eos_token_ids=[]))
        ids = tokenizer.conversation_ids(chat.messages[:3], {1: 3 * [special]})
        assert ids.count(special) == 3
        # Only the answer's last token and the new text run.
        assert chat.generation.prompt_tokens == len(ids) - held


def test_a_dropped_answer_releases_the_session(loaded):
    """An answer without references releases the session at once, not at the next garbage collection."""
    answer = etkv.generate_tokens(loaded, PROMPT, eos_token_ids=[])
    next(answer)
    watched = weakref.ref(answer)
    gc.disable()
    try:
        del answer
        assert watched() is None
    finally:
        gc.enable()


def test_steps_of_window_layers_are_those_of_the_cache():
    """50 tokens on a cache with steps of up to 16 tokens give the same result as one step of all tokens."""
    windowed = reference.program(Variant("tiny-mistral-window"))
    prompt = [(7 * i) % 250 for i in range(50)]
    chunked, whole = (alone(windowed, prompt, 8, max_step_tokens, eos_token_ids=[]) for max_step_tokens in (16, 64))
    assert chunked == whole


@pytest.mark.parametrize("by_device", [True, False])
def test_full_layers_do_not_limit_a_step(llama, monkeypatch, by_device):
    """60 tokens of a prompt are one step of a program with a limit of 64, although the cache's limit for windows is
    lower.
    """
    reads, owner, name = [], *((_device.DeviceAnswer, "read_prompt") if by_device else (etkv.Program, "last_row"))
    read = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: (reads.append(1), read(*args, **options))[1])
    if not by_device:
        monkeypatch.setattr(_device.DeviceAnswer, "make", lambda *_: None)
    prompt = [(7 * i) % 250 for i in range(60)]
    with (
        etkv.DecodeSession(config(llama, 200, max_step_tokens=8)) as session,
        etkv.load(llama.path, session, logits="last") as loaded,
    ):
        assert session.max_step_tokens == 200
        assert len(list(etkv.generate_tokens(loaded, prompt, max_tokens=1, eos_token_ids=[]))) == 1
        assert len(reads) == 1
    for limited in (
        config(reference.program(Variant("tiny-mistral-window")), 200, max_step_tokens=16),
        config(llama, 200, max_step_tokens=16, quantized_kv_start=4),
    ):
        with etkv.DecodeSession(limited) as session:
            assert session.max_step_tokens == 16


@pytest.mark.parametrize("kind", [etkv.DecodeSession, etkv.SeqSession])
def test_steps_before_a_conversion_are_those_of_the_cache(kind):
    """60 tokens run in steps of at most 8, because before the conversion at 48 the cache refuses longer steps."""
    wide = reference.program(Variant("tiny-qwen3"))
    formats = {"k_format": "affine8g32", "v_format": "mxfp8", "float_format": "f32"}
    prompt = [(7 * i) % 250 for i in range(60)]
    settings = config(wide, 200, max_step_tokens=8, quantized_kv_start=48, **formats)
    with kind(settings) as session, etkv.load(wide.path, session, logits="last") as loaded:
        assert session.formats == ("f32", "f32")
        assert len(list(etkv.generate_tokens(loaded, prompt, max_tokens=4, eos_token_ids=[]))) == 4
        assert session.formats == ("affine8g32", "mxfp8")


@pytest.mark.parametrize("options", [{"temperature": -1}, {"max_tokens": 3, "fails_at": 1}, {"fails_at": 3}, {}])
def test_a_chat_goes_on_after_a_refused_or_failed_turn(llama, loaded, tokenizer, monkeypatch, options):
    """A turn is refused for its options or its length, or fails at its first or a later step. The next turn is the same
    as without the failed turn.
    """
    chat = etkv.Chat(loaded, tokenizer)
    list(chat.send_message("Hi", max_tokens=6, eos_token_ids=[]))
    messages, answer = list(chat.messages), chat.generation.token_ids

    fails_at, options = options.get("fails_at"), {key: options[key] for key in options if key != "fails_at"}
    with monkeypatch.context() as patch, pytest.raises(etkv.EtkvError):
        if fails_at:
            steps = iter(range(1, 100))

            def failing(step, *arguments, **more):
                if next(steps) == fails_at:
                    raise etkv.EtkvError("a step that fails")
                return step(*arguments, **more)

            for name in ("read_prompt", "next"):
                step = getattr(_device.DeviceAnswer, name)
                patch.setattr(_device.DeviceAnswer, name, lambda answer, step=step: failing(step, answer))
        list(chat.send_message("and then?" if options or fails_at else "x" * 300, **options, eos_token_ids=[]))
    assert chat.messages == messages

    whole = tokenizer.conversation_ids([*messages, {"role": "user", "content": "And you?"}], {1: answer})
    list(chat.send_message("And you?", max_tokens=6, eos_token_ids=[]))
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert alone(llama, whole, 6, eos_token_ids=[]) == chat.generation.token_ids


def test_messages_that_the_template_refuses_are_dropped(loaded, tokenizer):
    chat = etkv.Chat(loaded, tokenizer)
    chat.messages.append(3)
    with pytest.raises(etkv.EtkvError, match="the chat template cannot render this conversation"):
        list(chat.send_message("Hi"))
    assert chat.messages == [3]


def test_missing_tokenizer(tmp_path):
    for path in (tmp_path, tmp_path / "model.pte"):
        with pytest.raises(etkv.EtkvError, match=r"has no tokenizer.json: the exporter writes it next to the program"):
            etkv.Tokenizer.from_pretrained(path)
    file = tmp_path / "tokenizer.json"
    with pytest.raises(etkv.EtkvError, match=r"tokenizer.json cannot be read: No such file"):
        etkv.Tokenizer.from_file(file)
    file.write_text("{")
    for read, path in ((etkv.Tokenizer.from_pretrained, tmp_path), (etkv.Tokenizer.from_file, file)):
        with pytest.raises(etkv.EtkvError, match="cannot be read"):
            read(path)
    with pytest.raises(etkv.EtkvError, match="hf is str, expected a fast tokenizer of transformers"):
        etkv.Tokenizer("model.pte")


def test_bars(llama):
    """Progress goes to stderr, and only on request."""
    script = (
        "import sys, etkv\nconfig = etkv.CacheConfig(etkv.read_kv_cache_metadata(sys.argv[1]).layers, 32)\n"
        "with etkv.DecodeSession(config) as session, etkv.load(sys.argv[1], session) as program:\n"
        "    print(list(etkv.generate_tokens(program, [60, 61], max_tokens=3, eos_token_ids=[], progress=True)))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    done = reference.run([sys.executable, "-c", script, llama.path], env=environment)
    assert done.stdout.startswith("["), done.stderr
    assert "prompt" in done.stderr
    assert "answer" in done.stderr


def test_a_reader_that_has_enough_ends_the_command(llama):
    command = [sys.executable, "-m", "etkv", "inspect", str(llama.path), "--instructions"]
    read, write = os.pipe()
    os.close(read)
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with os.fdopen(write) as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=path, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_capacity_of_0_is_refused(llama, capsys):
    from etkv.__main__ import main

    assert main(["generate", str(llama.path), "Hi", "--capacity", "0"]) == 2
    assert "capacity is 0, the minimum is 1" in capsys.readouterr().err
