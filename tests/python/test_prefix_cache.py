"""Prefix caches in Python: other sessions and later turns reuse the texts that one session has read."""

from __future__ import annotations

import logging
import re
import shutil
import time

import pytest

import etkv
import reference
from reference import Program, Variant
from runners import runner

IDS = [5 + number * 7 % 50 for number in range(60)]
"""Ids of a text."""
SYSTEM = "Call a tool, or say that you do not know."
TURNS = 20


@pytest.fixture(scope="module")
def llama() -> Program:
    return reference.program(Variant("tiny-llama", backend="cpu"))


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-mistral-window"])
def each(request) -> Program:
    """A program with full history, and one with windows."""
    return reference.program(Variant(request.param, backend="cpu"))


def session(program: Program, **options: object) -> etkv.DecodeSession:
    facts = etkv.read_kv_cache_metadata(program.path)
    return etkv.DecodeSession(etkv.CacheConfig(facts.layers, 2048, **options), backend=facts.backend)


def shared(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_texts_that_are_read_ahead_are_in_memory(llama, tmp_path):
    model = etkv.fingerprint(llama.path)
    store = etkv.PrefixStore(tmp_path / "texts", 64 << 20)
    with session(llama) as cache, etkv.load(llama.path, cache) as program:
        program.forward(IDS, list(range(60)))
        assert store.save(cache, IDS, fingerprint=model)
        cache.rewind(50)
        expected = program.forward([9], [50])
    prefixes = etkv.PrefixCache(store=store)
    with session(llama) as cache, etkv.load(llama.path, cache) as program:
        assert not etkv.PrefixCache().prefetch(cache, IDS[:50], fingerprint=model)
        with pytest.raises(etkv.EtkvError, match="the fingerprint is empty"):
            prefixes.prefetch(cache, IDS, fingerprint="")
        assert prefixes.prefetch(cache, IDS[:50], fingerprint=model)
        until = time.monotonic() + 60
        while prefixes.statistics().ahead_waiting > 0 and time.monotonic() < until:
            time.sleep(0.005)
        found = prefixes.statistics()
        assert (found.ahead_waiting, found.ahead_read, found.tokens_ahead, found.ahead_failed) == (0, 1, 50, 0)
        assert cache.length == 0
        shutil.rmtree(tmp_path / "texts")
        assert prefixes.attach(cache, IDS[:50], fingerprint=model) == 50
        assert (prefixes.statistics().tokens_in_memory, prefixes.statistics().tokens_in_store) == (50, 0)
        assert (program.forward([9], [50]) == expected).all()
        prefixes.clear()
        # Reading ahead fails, because the folder was removed.
        assert prefixes.prefetch(cache, IDS, fingerprint=model)
        while prefixes.statistics().ahead_waiting > 0 and time.monotonic() < until:
            time.sleep(0.005)
        assert prefixes.statistics().ahead_failed == 1


def test_a_prefix_is_shared(llama):
    with session(llama) as first, etkv.load(llama.path, first) as program:
        with pytest.raises(etkv.EtkvError, match="the cache is empty"):
            first.freeze()
        program.forward(IDS, list(range(60)))
        prefix = first.freeze()
        assert (prefix.length, prefix.rewindable_to) == (60, 1)
        assert prefix.nbytes == first.memory().shared > 0
        assert first.report()["memory"]["shared"] == prefix.nbytes
        first.rewind(45)
        expected = program.forward([9, 8], [45, 46])
    # The rows outlive the session that read them.
    with session(llama) as cache, etkv.load(llama.path, cache) as program:
        for length in (0, 61):
            with pytest.raises(etkv.EtkvError, match="it has 60 positions, and the minimum is 1"):
                cache.attach(prefix, length)
        cache.attach(prefix, 45)
        assert cache.length == 45
        assert cache.memory().shared >= prefix.nbytes * 45 // 60
        assert (program.forward([9, 8], [45, 46]) == expected).all()
        with pytest.raises(etkv.EtkvError, match="holds 47 positions; clear it"):
            cache.attach(prefix)
    with (
        session(llama, k_format="bf16", v_format="bf16") as other,
        pytest.raises(etkv.EtkvError, match="got one that stores"),
    ):
        other.attach(prefix)
    assert repr(prefix) == f"<Prefix: 60 positions, {prefix.nbytes} bytes>"


def test_kept_texts(llama, tmp_path):
    model = etkv.fingerprint(llama.path)
    store = etkv.PrefixStore(tmp_path, 64 << 20)
    prefixes = etkv.PrefixCache(store=store)
    with session(llama) as cache, etkv.load(llama.path, cache) as program:
        assert prefixes.attach(cache, IDS, fingerprint=model) == 0
        program.forward(IDS, list(range(60)))
        assert prefixes.keep(cache, IDS, fingerprint=model)
        with pytest.raises(etkv.EtkvError, match=r"holds 60 positions, and the text has 59"):
            prefixes.keep(cache, IDS[:-1], fingerprint=model)
        with pytest.raises(etkv.EtkvError, match="holds 60 positions; clear it"):
            prefixes.attach(cache, IDS, fingerprint=model)
    with session(llama) as cache:
        assert prefixes.find(cache, IDS[:50], fingerprint=model) == 50
        assert prefixes.find(cache, IDS[:50], fingerprint="another") == 0
        with pytest.raises(etkv.EtkvError, match="no prefix in memory has this text of 61 tokens"):
            prefixes.pin(cache, [*IDS, 1], fingerprint=model)
        with prefixes.pin(cache, IDS[:40], fingerprint=model):
            assert prefixes.reclaim(1) == 0
            prefixes.clear()
            assert prefixes.statistics().pinned == 1
        held = prefixes.statistics()
        assert held.prefixes == 1
        assert held.bytes > 0
        assert prefixes.reclaim(1) == held.bytes
        # The prefix was removed from memory, so the store loads it.
        assert prefixes.attach(cache, IDS[:50], fingerprint=model) == 50 == cache.length
    found = prefixes.statistics()
    assert (found.tokens_asked, found.tokens_in_memory, found.tokens_in_store) == (110, 0, 50)
    assert repr(prefixes) == f"<PrefixCache: 1 prefixes, {found.bytes} bytes>"
    for bad in (0, -1, 2**64):
        with pytest.raises(etkv.EtkvError, match=f"max_bytes is {bad}, expected 1 to"):
            etkv.PrefixCache(bad)


@pytest.mark.parametrize("alone", [True, False], ids=["a session a request", "one session"])
def test_a_conversation_with_tools_is_not_read_again(each, alone):
    """In 20 requests of whole conversations, at most 1 % of earlier tokens run again."""
    tokenizer = etkv.Tokenizer.from_pretrained(each.path)
    prefixes = etkv.PrefixCache()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is the height of the water?"}]
    before: list[int] = []
    old = again = 0
    options = {"max_tokens": 12, "prefix_cache": prefixes, "fingerprint": "a model", "eos_token_ids": []}

    def respond(program: etkv.Program, ids: list[int]) -> tuple[str, list[int], int]:
        """Return the answer, its token ids, and how many tokens of the request did not run."""
        responses = list(etkv.stream_generate(program, tokenizer, ids, **options))
        assert responses[-1].prompt_tokens == len(ids)
        tokens = [response.token for response in responses if response.token is not None]
        return "".join(response.text for response in responses), tokens, responses[-1].cached_tokens

    # With short steps, windows hold only a few more positions than queries see: fewer than an answer has.
    few = {"max_step_tokens": 8}
    held = session(each, **few)
    with held, etkv.load(each.path, held, logits="last") as shared_program:
        for turn in range(TURNS):
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            if alone:
                with session(each, **few) as cache, etkv.load(each.path, cache, logits="last") as program:
                    text, tokens, cached = respond(program, ids)
            else:
                text, tokens, cached = respond(shared_program, ids)
            known = shared(before, ids)
            old, again = old + known, again + max(0, known - cached)
            before = [*ids, *tokens]
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "tool", "content": f"the gauge says {turn * 17 % 40} inches"})
    assert old > 10_000
    assert again <= old / 100, f"{again} of {old} tokens were read again"
    found = prefixes.statistics()
    assert found.tokens_in_memory >= old * 0.99
    print(f"{each.variant}: {again} of {old} tokens were read again; {found}")


def test_the_answers_are_those_without(each):
    tokenizer = etkv.Tokenizer.from_pretrained(each.path)
    prefixes = etkv.PrefixCache()
    said = ["What is a cache?", "And where is it?", "Say that again."]

    def chat(prefix_cache: etkv.PrefixCache | None, **options: float) -> tuple[list[list[int]], list[int]]:
        ids, ran = [], []
        with session(each) as cache, etkv.load(each.path, cache, logits="last") as program:
            talk = etkv.Chat(program, tokenizer, system=SYSTEM * 3, prefix_cache=prefix_cache, fingerprint="a model")
            for text in said:
                "".join(talk.send_message(text, max_tokens=12, **options))
                talk.messages.append({"role": "tool", "content": "12 inches"})
                ids.append(talk.generation.token_ids)
                ran.append(talk.generation.prompt_tokens)
            return ids, ran

    expected, plain = chat(None)
    first, ran = chat(prefixes)
    assert first == expected
    # Without a prefix cache, a model with windows reads its whole text again if the next prompt tokenizes the answer
    # differently.
    assert sum(ran) <= sum(plain)
    assert ran[-1] < 120
    again, ran = chat(prefixes)
    assert again == expected
    assert ran[0] <= 1 + ("window" in each.variant.model)
    # A repetition penalty counts all tokens, including cached ones.
    first, expected = (chat(kept, repetition_penalty=1.3)[0][0] for kept in (etkv.PrefixCache(), None))
    assert first == expected


def test_etkv_chat_does_not_read_its_conversation_again(each, tmp_path):
    words = [runner("chat"), "--model", each.path, "--system", SYSTEM, "--ids", "--max-tokens", 12]
    asked = {"input": "What is a cache?\nAnd where is it?\nSay that again.\n", "stdin": None}
    plain = reference.run(words, **asked)
    kept = reference.run([*words, "--prefix-store", tmp_path], **asked)
    assert [plain.returncode, kept.returncode] == [0, 0]
    assert plain.stdout == kept.stdout
    before, ran = ([int(n) for n in re.findall(r"prefill (\d+) token", one.stderr)] for one in (plain, kept))
    assert len(ran) == 3
    assert sum(ran) <= sum(before)
    # Only the last answer and the new question run, not earlier text.
    assert max(ran[1:]) < 100
    assert len(re.findall(r"(\d+) cached", kept.stderr)) == 2


def test_a_failure_is_skipped(llama, caplog):
    tokenizer = etkv.Tokenizer.from_pretrained(llama.path)
    prefixes = etkv.PrefixCache()
    with session(llama) as cache, etkv.load(llama.path, cache, logits="last") as program:
        with pytest.raises(etkv.EtkvError, match="a prefix_store or a prefix_cache"):
            etkv.Chat(program, tokenizer, prefix_store=object(), prefix_cache=prefixes)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, "etkv.chat"):
            text = etkv.generate(program, tokenizer, "abc", max_tokens=3, prefix_cache=prefixes, fingerprint="")
        assert len(text) > 0
        assert "the prefix cache is skipped: the fingerprint is empty" in caplog.text
