"""Ctrl-C leaves a session, an answer and a chat consistent, and loses no token."""

from __future__ import annotations

import copy
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import pytest

import etkv
import reference
from etkv import _device, _library, generation
from reference import PROMPT, config

STRIDE = int(os.environ.get("ETKV_INTERRUPTED", "17"))
"""The tests try one in this many of the points at which Ctrl-C can arrive."""


@pytest.fixture(params=["device", "host"])
def where(request, monkeypatch) -> str:
    """Let the device or the host choose the tokens. Return which one chooses."""
    if request.param == "host":
        monkeypatch.setattr(_device.DeviceAnswer, "make", lambda *_: None)
    return request.param


class Interruption:
    """Ctrl-C at the ``at``-th point of ``etkv``'s Python code within a block.

    Python checks for signals when a function begins, when a call has returned, and when a loop repeats. This class
    omits loops.
    """

    FOLDER = str(Path(etkv.__file__).parent)

    def __init__(self, at: int | None) -> None:
        self._at = at
        self.n_places = 0

    def __enter__(self) -> Interruption:
        sys.setprofile(self._follow)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.setprofile(None)
        return kind is KeyboardInterrupt

    def _follow(self, frame: FrameType, event: str, argument: object) -> None:
        # A yield is the return of the call of `next`, not of the generator.
        yields = event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if event == "c_call" or yields or not frame.f_code.co_filename.startswith(self.FOLDER):
            return
        self.n_places += 1
        if self.n_places == self._at:
            sys.setprofile(None)
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [1, 4])
def test_interrupted_where_a_token_is_chosen(loaded, greedy_ids, monkeypatch, where, at):
    """Steps whose token was not delivered are rolled back, so the answer loses no token. If a prompt is interrupted,
    all of its tokens that ran stay, except the last.
    """
    place, name = (_device.DeviceAnswer, "next") if where == "device" else (generation, "choose")
    choose, calls = getattr(place, name), []

    def interrupted(*args):
        chosen = choose(*args)
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return chosen

    answer = etkv.generate_tokens(loaded, PROMPT, max_tokens=8, eos_token_ids=[])
    monkeypatch.setattr(place, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(answer)
    assert answer.token_ids == greedy_ids[: at - 1]
    assert loaded.session.length == (len(PROMPT) + answer.cached_tokens if answer.token_ids else len(PROMPT) - 1)
    monkeypatch.setattr(place, name, choose)
    rest = [*PROMPT[answer.read_tokens :], *answer.token_ids[answer.cached_tokens :]]
    assert list(etkv.generate_tokens(loaded, rest, max_tokens=3, eos_token_ids=[])) == greedy_ids[at - 1 : at + 2]


@pytest.mark.parametrize("session_class", [etkv.DecodeSession, etkv.SeqSession])
def test_interrupted_anywhere(llama, greedy_ids, session_class, where):
    """After an interrupt at any point, no token of the answer is lost, and no token runs twice."""
    with (
        session_class(config(llama, 200)) as session,
        etkv.load(llama.path, session, logits="last") as loaded,
    ):

        def answered(at: int | None) -> tuple[etkv.Generation | None, int]:
            answer = None
            with Interruption(at) as interruption:
                answer = etkv.generate_tokens(loaded, PROMPT, max_tokens=4, eos_token_ids=[])
                list(answer)
            return answer, interruption.n_places

        answered(None)
        session.clear()
        # Count the points of a second answer: the first has additional points.
        _, n_places = answered(None)
        unfinished = 0
        for at in range(1, n_places + 1, STRIDE):
            session.clear()
            answer, _ = answered(at)
            assert not _library.EXECUTORCH_CALLS._is_owned(), f"locked at place {at}"
            read, held, ids = (answer.read_tokens, answer.cached_tokens, answer.token_ids) if answer else (0, 0, [])
            unfinished += len(ids) < 4
            assert session.length == read + held
            rest = [*PROMPT[read:], *ids[held:]]
            again = list(etkv.generate_tokens(loaded, rest, max_tokens=3, eos_token_ids=[]))
            assert ids + again == greedy_ids[: len(ids) + 3], f"interrupted at place {at}"
        assert unfinished > n_places // STRIDE // 2


@pytest.mark.parametrize("restored", [False, True])
def test_a_chat_interrupted_anywhere(loaded, tokenizer, restored):
    """The next turn equals that of a new chat with the same messages, with or without those of the interrupted turn."""
    sent = {"max_tokens": 3, "eos_token_ids": []}

    def turn(at: int | None) -> tuple[etkv.Chat, int]:
        """Run a second turn, with Ctrl-C at point ``at``. The first message has changed, so the chat rewinds."""
        chat = etkv.Chat(loaded, tokenizer, system="Be brief.")
        list(chat.send_message("Hi", **sent))
        first = copy.deepcopy(chat.messages)
        chat.messages[1]["content"] = "Ha"
        with Interruption(at) as interruption:
            list(chat.send_message("And you?", **sent))
        if restored:
            chat.messages = first
        return chat, interruption.n_places

    turn(None)
    _, n_places = turn(None)
    for at in range(1, n_places + 1, STRIDE):
        chat, _ = turn(at)
        assert [message["role"] for message in chat.messages[1::2]] == ["user"] * (len(chat.messages) // 2)
        assert chat.messages[-1]["role"] == "assistant", f"interrupted at place {at}"
        messages, answers = list(chat.messages), list(chat._answers)
        list(chat.send_message("And then?", **sent))
        other = etkv.Chat(loaded, tokenizer)
        # Copy the ids of the answers too, because they cannot be derived from the text.
        other.messages, other._answers = messages, answers
        list(other.send_message("And then?", **sent))
        assert chat.generation.token_ids == other.generation.token_ids, f"interrupted at place {at}"


_INTERRUPTED = """
import json, sys
import etkv
path, PROMPT = sys.argv[1], json.loads(sys.argv[2])
config = etkv.CacheConfig(etkv.read_kv_cache_metadata(path).layers, 200)
with etkv.DecodeSession(config) as session, etkv.load(path, session, logits="last") as program:
    caught = 0
    while caught < 3:
        session.clear()
        answer = etkv.generate_tokens(program, PROMPT, max_tokens=190, eos_token_ids=[])
        try:
            print("ready", flush=True)
            while True:
                for token in answer:
                    pass
                session.rewind(0)
                answer = etkv.generate_tokens(program, PROMPT, max_tokens=190, eos_token_ids=[])
        except KeyboardInterrupt:
            caught += 1
            read, held, length = answer.read_tokens, answer.cached_tokens, session.length
            next_ids = [*PROMPT[read:], *answer.token_ids[held:]]
            rest = list(etkv.generate_tokens(program, next_ids, max_tokens=3, eos_token_ids=[]))
            ids = answer.token_ids[:held]
            print(json.dumps({"read": read, "held": held, "length": length, "ids": ids, "rest": rest}), flush=True)
"""


def test_an_interruption_leaves_the_cache_usable(llama):
    """After Ctrl-C at any time the cache is consistent, and the answer can continue."""
    expected = reference.greedy(llama.hf, {"prompt": PROMPT}, 200)["prompt"].ids
    words = [sys.executable, "-c", _INTERRUPTED, llama.path, json.dumps(PROMPT)]
    with reference.started(words, stdout=subprocess.PIPE, text=True) as process:
        for pause in (0.01, 0.05, 0.11):
            assert process.stdout.readline() == "ready\n"
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
            told = json.loads(process.stdout.readline())
            assert told["length"] == told["read"] + told["held"]
            assert told["ids"] == expected[: told["held"]]
            after = told["held"] + 1 if told["read"] == len(PROMPT) else 0
            assert told["rest"] == expected[after : after + 3]


_FIRST_USE = """
import itertools, os, sys
import etkv
from etkv import _library

FOLDERS = os.path.dirname(etkv.__file__), os.path.dirname(_library.capi_tables())
use = lambda: etkv.row_bytes("f16", 64)

def used(at):
    # In a child process. Returns 0 if the use was interrupted at point `at` and a second use succeeds, 1 if there is no
    # such point.
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    places = itertools.count(1)

    def follow(frame, event, argument):
        if event != "c_call" and frame.f_code.co_filename.startswith(FOLDERS) and next(places) == at:
            raise KeyboardInterrupt

    sys.setprofile(follow)
    try:
        use()
        os._exit(1)
    except KeyboardInterrupt:
        sys.setprofile(None)
        os._exit(0 if use() == 128 else 2)
    finally:
        os._exit(3)

at = 1
while (status := used(at)) == 0:
    at += int(sys.argv[1])
print(at, status)
"""


def test_the_first_use_interrupted_anywhere():
    """The next use loads the C interface completely."""
    words = [sys.executable, "-c", _FIRST_USE, str(STRIDE)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    places, status = map(int, done.stdout.split())
    assert status == 1, f"interrupted at place {places}"
    assert places > max(30, 3 * STRIDE)


_AT_THE_END = """
import atexit, sys, threading
from etkv import _capi

def use():
    assert _capi.struct("etkv_sampling").struct_size
    print("used")

def late():
    threading.main_thread().join()
    use()

if sys.argv[1] == "atexit":
    atexit.register(use)
else:
    threading.Thread(target=late).start()
"""


@pytest.mark.parametrize("when", ["atexit", "thread"])
def test_the_first_use_while_python_ends(when):
    done = subprocess.run([sys.executable, "-c", _AT_THE_END, when], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("used\n", "")
