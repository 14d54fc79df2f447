"""Chats on models with recurrent layers: a turn runs its new tokens, and at most one block of earlier tokens."""

from __future__ import annotations

import itertools
import random

import pytest

import etkv
from etkv.recurrent_layer import BLOCK
from reference import EVERYTHING
from test_recurrent_programs import recurrent_program

WORDS = ["a", "bee", "sea", "dog", "elephant", "river"]


# Layers of MiniMax have a window or a recurrence.
_LONG = ["minimax-mlx", "lfm2-cpu", "lfm3-window-cpu", "lfm3-window-mlx", "minimax-cpu"]
CASES = ["qwen3.5-cpu", *(_LONG if EVERYTHING else [])]


@pytest.fixture(scope="module", params=CASES)
def model(request):
    return recurrent_program(*request.param.rsplit("-", 1))


@pytest.fixture
def tokenizer(model):
    return etkv.Tokenizer.from_pretrained(model.request.output)


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, most)))


def common(before: list[int], after: list[int]) -> int:
    """Return the number of tokens at the beginning of both texts that are equal."""
    pairs = zip(before, after, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def say(chat: etkv.Chat, rng: random.Random) -> etkv.Reuse:
    """Run a turn with an answer of some tokens. Return its :class:`etkv.Reuse`."""
    list(chat.send_message(words(rng, 60), max_tokens=rng.randint(5, 100)))
    assert chat.reuse is not None
    assert chat.reuse.run_again < BLOCK, chat.reuse
    assert bool(chat.reuse.reason) == (chat.reuse.run_again > 0)
    return chat.reuse


def test_nothing_is_read_from_its_beginning_again(model, tokenizer, tmp_path):
    """20 turns of the whole conversation, with tool results. One message in the middle is edited, and later another
    process continues from the store.
    """
    rng = random.Random(0)
    store = etkv.PrefixStore(tmp_path, max_bytes=1 << 30)
    messages: list[dict[str, str]] = []
    before: list[int] = []
    for turns in (range(16), range(16, 20)):
        with model.session(capacity=8192) as session, model.load(session) as program:
            chat = etkv.Chat(program, tokenizer, prefix_store=store)
            chat.messages = messages
            for turn in turns:
                if turn % 3 == 2:
                    chat.messages.append({"role": "tool", "content": words(rng, 90)})
                if turn == 12:
                    chat.messages[10]["content"] += " edited"
                reuse = say(chat, rng)
                shared = common(before, chat._held)
                # Another process has the texts of earlier answers, but not their ids.
                if turn not in (12, 16):
                    assert shared >= len(before) - 1
                assert shared - reuse.restored < BLOCK, (turn, shared, reuse)
                before = list(chat._held)
            messages = chat.messages


def test_messages_change_after_long_answers(model, tokenizer):
    """Conversations with long answers and tool results, in which the first words of a message change."""
    rng = random.Random(5)
    with model.session(capacity=8192) as session, model.load(session) as program:
        chat = etkv.Chat(program, tokenizer)
        for turn in range(8):
            if turn in (3, 5):
                # The message follows an answer of up to 300 tokens, and other turns follow it.
                edited = [message for message in chat.messages if message["role"] == "user"][-2]
                edited["content"] = "edited " + edited["content"]
            elif turn > 0:
                chat.messages.append({"role": "tool", "content": words(rng, 90)})
            list(chat.send_message(words(rng, 60), max_tokens=rng.randint(100, 300), eos_token_ids=[]))
            assert chat.reuse is not None
            assert chat.reuse.run_again < BLOCK, (turn, chat.reuse)
            assert turn == 0 or chat.reuse.restored > 0


def test_an_answer_that_comes_back_shorter_runs_from_its_prompt(model, tokenizer):
    """Clients remove the model's reasoning, so each turn differs from the cache after the end of the last prompt."""
    rng = random.Random(1)
    with model.session(capacity=8192) as session, model.load(session) as program:
        chat = etkv.Chat(program, tokenizer)
        for turn in range(6):
            held = session.length
            if chat.messages:
                chat.messages[-1]["content"] = "short"
            reuse = say(chat, rng)
            assert turn == 0 or 0 < reuse.matched < held


def test_a_chat_goes_on_after_a_restart(model, tokenizer, tmp_path):
    rng = random.Random(2)
    store = etkv.PrefixStore(tmp_path, max_bytes=1 << 30)
    messages: list[dict[str, str]] = []
    stored: list[int] = []
    for restart in range(3):
        with model.session(capacity=8192) as session, model.load(session) as program:
            chat = etkv.Chat(program, tokenizer, prefix_store=store)
            chat.messages = [dict(message) for message in messages]
            for turn in range(3):
                if chat.messages:
                    chat.messages[-1]["content"] = f"short {turn}"
                restored = say(chat, rng).restored
                if stored:
                    shared = common(stored, chat._held)
                    assert shared - restored < BLOCK, (restart, turn, shared, restored)
                stored = list(chat._held)
            messages = chat.messages


def test_caches_share_the_beginning_of_a_text(model, tokenizer):
    rng = random.Random(3)
    prefixes = etkv.PrefixCache()
    system = words(random.Random(4), 400)
    for number in range(3):
        with model.session(capacity=8192) as session, model.load(session) as program:
            chat = etkv.Chat(program, tokenizer, system=system, prefix_cache=prefixes)
            reuse = say(chat, rng)
            assert (reuse.restored > 0) == (number > 0), reuse
            say(chat, rng)
