"""Prefix stores in Python and in ``etkv_chat``: a later process reuses the texts that an earlier process has read."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

import etkv
import reference
from reference import Program, Variant
from runners import FAILED, MISUSED, answers, refused, runner

IDS = [5 + number * 7 % 50 for number in range(60)]
"""Ids of a text."""
SYSTEM = "Answer in a few words, and always check: say that you do not know. " * 3
LIMIT = 64 << 20


def session(program: Program) -> etkv.DecodeSession:
    facts = etkv.read_kv_cache_metadata(program.path)
    return etkv.DecodeSession(etkv.CacheConfig(facts.layers, 512), backend=facts.backend)


def test_a_text_outlives_its_session(llama, tmp_path):
    model = etkv.fingerprint(llama.path)
    store = etkv.PrefixStore(tmp_path / "texts", LIMIT)
    assert store.usage() == (0, 0)
    with session(llama) as cache, etkv.load(llama.path, cache) as program:
        program.forward(IDS, list(range(60)))
        assert store.find(cache, IDS, fingerprint=model) == 0
        assert store.save(cache, IDS, fingerprint=model)
        assert not store.save(cache, IDS, fingerprint=model)
        with pytest.raises(etkv.EtkvError, match=r"holds 60 positions, and the text has 59"):
            store.save(cache, IDS[:-1], fingerprint=model)
        with pytest.raises(etkv.EtkvError, match="holds 60 positions; clear it"):
            store.load(cache, IDS, fingerprint=model)
        cache.rewind(45)
        expected = program.forward([9, 8], [45, 46])
    other = [*IDS[:45], 9, 8]
    with session(llama) as cache, etkv.load(llama.path, cache) as program:
        assert store.load(cache, other, fingerprint="another") == 0
        assert store.load(cache, other[:-2], fingerprint=model) == 45 == cache.length
        assert (program.forward([9, 8], [45, 46]) == expected).all()
    assert store.usage().files == 1
    assert repr(store) == f"<PrefixStore: {tmp_path / 'texts'}>"
    assert (tmp_path / "texts").stat().st_mode & 0o777 == 0o700


def has_buckets() -> bool:
    """Return whether the library was built with buckets, by its error for an address that no build accepts."""
    with pytest.raises((etkv.UnsupportedError, etkv.CacheFileError), match="cannot open nothing://texts") as caught:
        etkv.PrefixStore("nothing://texts", 1)
    if isinstance(caught.value, etkv.UnsupportedError):
        assert "built without buckets; build it with ETKV_BUCKETS=ON" in str(caught.value)
        return False
    return True


def test_an_address_is_not_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    has_buckets()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif("ETKV_TEST_BUCKET" not in os.environ, reason="`make test-buckets` has a bucket")
def test_a_text_in_a_bucket_outlives_its_process(llama):
    assert has_buckets()
    model = etkv.fingerprint(llama.path)
    address = f"{os.environ['ETKV_TEST_BUCKET']}/python-{os.getpid()}"
    with session(llama) as cache, etkv.load(llama.path, cache) as program:
        program.forward(IDS, list(range(60)))
        assert etkv.PrefixStore(address, LIMIT).save(cache, IDS, fingerprint=model)
        cache.rewind(45)
        expected = program.forward([9, 8], [45, 46])
    store = etkv.PrefixStore(address, LIMIT)
    assert store.usage().files == 1
    with session(llama) as cache, etkv.load(llama.path, cache) as program:
        assert store.load(cache, IDS[:45], fingerprint=model) == 45
        assert (program.forward([9, 8], [45, 46]) == expected).all()
    # The runner's second run finds the text that the first run has stored.
    words = [runner("chat"), "--model", llama.path, "--system", SYSTEM, "--ids", "--max-tokens", 16]
    words += ["--prefix-store", f"{address}-chat", "--prompt", "What is a cache?"]
    first, again = (reference.run(words) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert answers(first.stdout) == answers(again.stdout)
    assert re.findall(r"prefill (\d+) token", again.stderr) == ["1"]


def test_invalid_stores_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(etkv.CacheFileError, match=r"cannot make .*file"):
        etkv.PrefixStore(tmp_path / "file", LIMIT)
    with pytest.raises(etkv.EtkvError, match="max_bytes is -1, expected 0 to"):
        etkv.PrefixStore(tmp_path, -1)
    with pytest.raises(etkv.EtkvError, match="folder is empty"):
        etkv.PrefixStore("", LIMIT)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral-window"])
def test_a_chat_goes_on_where_an_earlier_chat_ended(name, tmp_path):
    made = reference.program(Variant(name))
    model = etkv.fingerprint(made.path)
    tokenizer = etkv.Tokenizer.from_pretrained(made.path)
    said = ["What is a cache?", "And where is it?"]

    def chat(cache, store, messages=None) -> tuple[list[list[int]], list[int], list[dict[str, str]]]:
        """Return the ids of the answers, the tokens of each prompt that ran, and the messages."""
        ids, ran = [], []
        with etkv.load(made.path, cache) as program:
            talk = etkv.Chat(program, tokenizer, system=SYSTEM, prefix_store=store, fingerprint=model)
            talk.messages[:] = messages or talk.messages
            for text in said[len(talk.messages) // 2 :]:
                "".join(talk.send_message(text, max_tokens=12))
                ids.append(talk.generation.token_ids)
                ran.append(talk.generation.prompt_tokens)
            return ids, ran, talk.messages

    store = etkv.PrefixStore(tmp_path, LIMIT)
    with session(made) as cache:
        expected, plain, messages = chat(cache, None)
    with session(made) as cache:
        assert chat(cache, store)[0] == expected
    # Repeat the first turn: the store has all tokens except the last. With windows, it has the text up to the turn's
    # end.
    with session(made) as cache:
        again, ran, _ = chat(cache, store)
        assert again == expected
        assert ran[0] == 1 or name == "tiny-mistral-window"
    # Run the second turn of a conversation from another process, with only the text of the first answer, not its ids.
    with session(made) as cache:
        expected, _, _ = chat(cache, None, messages[:3])
    with session(made) as cache:
        again, ran, _ = chat(cache, store, messages[:3])
        assert again == expected
        assert ran[0] < plain[0] / 2


@pytest.mark.parametrize("kind", ["contiguous", "seq", "tree"])
def test_etkv_chat_loads_what_it_stored(llama, kind, tmp_path):
    words = [runner("chat"), "--model", llama.path, "--system", SYSTEM, "--ids", "--max-tokens", 16, "--session", kind]
    stored = [*words, "--prefix-store", tmp_path / "texts"]
    asked = {"input": "What is a cache?\nAnd where?\n", "stdin": None}
    plain = reference.run(words, **asked)
    first, again = (reference.run(stored, **asked) for _ in range(2))
    assert [one.returncode for one in (plain, first, again)] == [0, 0, 0]
    assert plain.stdout == first.stdout == again.stdout
    assert len(answers(plain.stdout)) == 2

    def read(one: subprocess.CompletedProcess[str]) -> list[int]:
        return [int(n) for n in re.findall(r"prefill (\d+) token", one.stderr)]

    assert read(plain) == read(first)
    assert read(again) == [1, 1]
    # Ask another question after the same system message.
    other = reference.run([*stored, "--prompt", "What is a tree?"])
    assert other.returncode == 0
    assert read(other)[0] < read(first)[0] / 3
    assert int(re.search(r"(\d+) cached", other.stderr)[1]) > 32


def test_etkv_chat_refuses_options_that_exclude_each_other(llama, tmp_path):
    words = [runner("chat"), "--model", llama.path, "--prompt", "hi"]
    refused([*words, "--prefix-store-mib", 9], MISUSED, "--prefix-store-mib requires --prefix-store")
    refused(
        [*words, "--prefix-store", tmp_path, "--draft", "ngram"], MISUSED, "--prefix-store does not go with --draft"
    )
    (tmp_path / "file").write_text("")
    refused([*words, "--prefix-store", tmp_path / "file"], FAILED, "cannot make", "file")
    refused([*words, "--prefix-store", "nothing://texts"], FAILED, "cannot open nothing://texts")
