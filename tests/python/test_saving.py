"""Cache files in Python: a saved and loaded cache gives the same answers, and a file that does not fit is refused."""

from __future__ import annotations

import json
import os
import resource
import socket

import numpy as np
import pytest

import etkv
import reference
from reference import Variant

PROMPT = [60, 61, 62, 63, 64, 65, 66]
KINDS = [etkv.DecodeSession, etkv.SeqSession, etkv.TreeSession]
LAYERS = (etkv.LayerConfig(2, 64), etkv.LayerConfig(1, 32, 64, window=8, sinks=2))


def config(**changes) -> etkv.CacheConfig:
    return etkv.CacheConfig(**{"layers": LAYERS, "capacity": 100, **changes})


@pytest.mark.parametrize("kind", [etkv.SeqSession, etkv.TreeSession])
@pytest.mark.parametrize("format", ["f32", "row-int4"])
def test_a_sequence_goes_on_beside_others_with_the_same_bits(kind, format, tmp_path):
    tiny = reference.program(Variant("tiny-llama"))
    stored = reference.config(tiny, k_format=format, v_format=format)
    path = tmp_path / "a sequence.safetensors"

    def step(session, program, sequence, ids):
        start = session.seq_next(sequence)
        session.begin_step([sequence] * len(ids))
        return program.forward(ids, list(range(start, start + len(ids))))

    with (
        kind(stored) as session,
        etkv.SeqSession(stored) as other,
        etkv.load(tiny.path, session) as program,
        etkv.load(tiny.path, other) as second,
    ):
        step(session, program, 0, [3, 4, 5])
        step(session, program, 1, PROMPT[:4])
        step(session, program, 0, [6])
        model = etkv.fingerprint(tiny.path)
        session.seq_save(1, path, tokens=PROMPT[:4], fingerprint=model)
        step(other, second, 1, [7, 8])
        with pytest.raises(etkv.EtkvError, match="sequence 1 holds 2 positions"):
            other.seq_load(1, path, fingerprint=model)
        assert other.seq_load(5, path, fingerprint=model) == PROMPT[:4]
        assert (other.sequences(), other.seq_len(5), other.length) == ([1, 5], 4, 6)
        for at in range(4, len(PROMPT)):
            expected = step(session, program, 1, PROMPT[at : at + 1])
            np.testing.assert_array_equal(step(other, second, 5, PROMPT[at : at + 1]), expected)
        # A removed sequence makes room, and can be loaded again.
        session.seq_rm(1)
        assert session.seq_load(1, path, fingerprint=model) == PROMPT[:4]
        with pytest.raises(etkv.CacheFileError, match="of the model"):
            session.seq_load(9, path)
        with pytest.raises(etkv.EtkvError, match="sequence 9 holds no positions"):
            session.seq_save(9, path)


def test_a_fingerprint_is_that_of_the_bytes(tmp_path):
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file, held in zip(files, (b"weights", b"weights", b"other weights"), strict=True):
        file.write_bytes(held)
    a, b, c = map(etkv.fingerprint, files)
    assert a == b != c
    with pytest.raises(etkv.CacheFileError, match="cannot read"):
        etkv.fingerprint(tmp_path / "none")


def test_tokens_are_kept(tmp_path):
    path = tmp_path / "cache"
    with etkv.DecodeSession(config(), backend="cpu") as session:
        for tokens in [[], [0], [-1, 2**63 - 1, -(2**63)]]:
            session.save(str(path), tokens=tokens)
            assert session.load(path) == tokens
        with pytest.raises(etkv.EtkvError, match="64-bit"):
            session.save(path, tokens=[2**63])
        with pytest.raises(etkv.EtkvError, match="64-bit"):
            session.save(path, tokens=["a"])
        # A refused call does not change the file.
        assert session.load(path) == [-1, 2**63 - 1, -(2**63)]


def test_another_backend_loads_it(tmp_path):
    with etkv.SeqSession(config()) as saved, etkv.SeqSession(config(), backend="cpu") as loaded:
        saved.save(tmp_path / "cache", tokens=[3])
        assert loaded.load(tmp_path / "cache") == [3]


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "cache"
    with etkv.DecodeSession(config(), backend="cpu") as session, etkv.SeqSession(config(), backend="cpu") as other:
        session.save(path, fingerprint="one")
        for call, words in [
            (lambda: session.load(path), "of the model `one`, expected ``"),
            (lambda: other.load(path, fingerprint="one"), "`contiguous`, but this cache is of kind `seq`"),
            (lambda: session.load(tmp_path / "none"), "none"),
            (lambda: session.load(tmp_path), "not a file"),
            (lambda: session.save(tmp_path / "no" / "folder"), "folder"),
        ]:
            with pytest.raises(etkv.CacheFileError, match=words) as caught:
                call()
            assert caught.value.status == etkv.Status.FILE
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(etkv.CacheFileError, match="its header says"):
            session.load(path, fingerprint="one")
    assert [found.name for found in tmp_path.iterdir()] == ["cache"]


def crafted(path, of, n_tokens: int):
    """Write a sparse copy of a file whose header claims ``n_tokens`` token ids."""
    held = of.read_bytes()
    length = int.from_bytes(held[:8], "little")
    header = json.loads(held[8 : 8 + length])
    start, had = n_tokens * 8, header["tokens"]["data_offsets"][1]
    header["tokens"] = {"dtype": "I64", "shape": [n_tokens], "data_offsets": [0, start]}
    for name, info in header.items():
        if name not in ("tokens", "__metadata__"):
            begin, end = (place - had + start for place in info["data_offsets"])
            info["data_offsets"] = [begin, end]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + max(info["data_offsets"][1] for name, info in header.items() if name[0] != "_"))


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_are_bounded_before_memory_is_taken(kind, tmp_path):
    real, large = tmp_path / "real", tmp_path / "large"
    with kind(config(), backend="cpu") as session:
        session.save(real, tokens=PROMPT, fingerprint="one")
        crafted(large, real, 1 << 28)
        most = 100 + 65536
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        calls = [lambda: session.load(large, fingerprint="one")]
        if kind is not etkv.DecodeSession:
            calls.append(lambda: session.seq_load(1, large, fingerprint="one"))
        for call in calls:
            with pytest.raises(
                etkv.CapacityError, match=f"has {1 << 28} token ids, the maximum for this cache is {most}"
            ):
                call()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
        session.save(real, tokens=[7] * most)
        assert len(session.load(real)) == most
        with pytest.raises(etkv.EtkvError, match=f"{most + 1} token ids, the maximum"):
            session.save(real, tokens=[7] * (most + 1))


def test_a_store_does_not_read_texts_that_no_cache_could_hold(tmp_path):
    store = etkv.PrefixStore(tmp_path / "store", 1 << 40)
    tiny = reference.program(Variant("tiny-llama"))
    text = [(7 * number) % 250 for number in range(80)]

    def session(capacity: int) -> etkv.DecodeSession:
        return etkv.DecodeSession(reference.config(tiny, capacity))

    with session(100) as written, etkv.load(tiny.path, written) as program:
        for begin in range(0, 80, 40):
            program.forward(text[begin : begin + 40], list(range(begin, begin + 40)))
        assert store.save(written, text, fingerprint="one")
        (file,) = [found for found in (tmp_path / "store").iterdir() if found.stat().st_size > 10_000]
        crafted(file.with_name("0" * 8 + file.name[8:]), file, 1 << 28)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert etkv.PrefixStore(tmp_path / "store", 1 << 40).find(written, text, fingerprint="one") == len(text)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
        # A cache that is too small for a text does not remove it from the store.
        fresh = etkv.PrefixStore(tmp_path / "store", 1 << 40)
        with session(70) as small:
            assert fresh.find(small, text, fingerprint="one") == 0
        assert fresh.find(written, text, fingerprint="one") == len(text)


def test_paths_that_are_not_files_are_refused(tmp_path):
    fifo, at_socket = tmp_path / "fifo", tmp_path / "socket"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as listening, etkv.DecodeSession(config(), backend="cpu") as session:
        listening.bind(str(at_socket))
        for path in (fifo, at_socket, "/dev/null", tmp_path):
            with pytest.raises(etkv.CacheFileError, match="it is not a file"):
                etkv.fingerprint(path)
            with pytest.raises(etkv.CacheFileError, match="it is not a file"):
                session.save(path)
            with pytest.raises(etkv.CacheFileError, match="it is not a file"):
                session.load(path)
    assert fifo.is_fifo() and at_socket.is_socket()


def test_messages_quote_little_of_a_file(tmp_path):
    path = tmp_path / "cache"
    with etkv.DecodeSession(config(), backend="cpu") as session:
        session.save(path, fingerprint="m" * 100_000)
        with pytest.raises(etkv.CacheFileError, match=r"of the model `m{200}…`") as caught:
            session.load(path)
        assert len(str(caught.value)) < 500 + len(str(path))
