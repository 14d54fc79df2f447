"""Sessions of all three kinds: methods, errors with their status, and the state after close."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest

import etkv
import reference
from etkv import CacheConfig, DecodeSession, LayerConfig, SeqSession, TreeSession, memory
from etkv._capi import lib, text
from reference import Variant

LAYERS = (LayerConfig(2, 64), LayerConfig(1, 32, 64, window=8, sinks=2))
KINDS = [(DecodeSession, "contiguous"), (SeqSession, "seq"), (TreeSession, "tree")]


def config(**changes) -> CacheConfig:
    return CacheConfig(**{"layers": LAYERS, "capacity": 100, **changes})


UPFRONT = config(layers=(LayerConfig(2, 64),), capacity=1000, growth="upfront")
"""A config of caches that allocate everything at once."""


@pytest.mark.parametrize(("session_class", "kind"), KINDS)
def test_the_face_that_all_have(session_class, kind):
    with session_class(config(k_format="affine4g32", v_format="f32")) as session:
        assert (session.kind, session.capacity, session.length, session.n_layers) == (kind, 100, 0, 2)
        assert session.formats == ("affine4g32", "f32")
        assert session.can_extend(100)
        assert not session.can_extend(101)
        assert session.can_extend(0)
        session.clear(release=True)
        session.rewind(0)
        memory = session.memory()
        assert memory.allocated == memory.used == 0
        assert memory.at_capacity > 0
        assert len(memory.layers) == 2
        assert kind == "contiguous" or session.sequences() == []
        assert "0 of 100 positions in 2 layers" in repr(session)


def test_keys_are_unique_and_leave_the_registry():
    with DecodeSession(config()) as first, DecodeSession(config()) as second:
        assert first.key != second.key


def test_closed_sessions_release_everything():
    gc.collect()
    before = lib().etkv_live_handles()
    for session_class, _ in KINDS:
        session = session_class(config())
        assert lib().etkv_live_handles() > before
        session.close()
        session.close()
    dropped = TreeSession(config())
    del dropped
    gc.collect()
    assert lib().etkv_live_handles() == before


@pytest.mark.parametrize(("session_class", "kind"), KINDS)
def test_a_closed_session_says_so(session_class, kind):
    session = session_class(config())
    session.close()
    assert session.closed
    assert repr(session) == f"<{session_class.__name__}: closed>"
    uses = [lambda: session.length, lambda: session.key, lambda: session.clear(), session.__enter__]
    if kind != "contiguous":
        uses += [lambda: session.seq_len(0), lambda: session.begin_step([0])]
    if kind == "tree":
        uses += [lambda: session.propose([-1]), lambda: session.tree_len()]
    for use in uses:
        with pytest.raises(etkv.EtkvError, match="the session is closed: load the program"):
            use()
    with pytest.raises(etkv.EtkvError, match="closed"), session.bound():
        pass


@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ({"k_format": "affine7"}, 1, ["k_format", "affine7", "row-int4"]),
        ({"v_format": "affine4g128"}, 1, ["128", "64"]),
        ({"capacity": 0}, 1, ["capacity", "0"]),
        ({"capacity": -5}, 1, ["capacity", "-5"]),
        ({"layers": ()}, 1, ["layer"]),
        ({"layers": (LayerConfig(0, 64),)}, 1, ["0"]),
        ({"min_chunk": -1}, 1, ["min_chunk", "-1"]),
        ({"float_format": "affine4", "quantized_kv_start": 4}, 1, ["float_format", "affine4"]),
    ],
)
def test_an_invalid_config_is_refused(changes, status, told):
    with pytest.raises(etkv.StatusError) as caught:
        SeqSession(config(**changes))
    assert caught.value.status == status
    for word in told:
        assert word in str(caught.value)


def test_errors_before_the_library_is_called():
    with pytest.raises(etkv.EtkvError, match="growth is 'never', expected one of doubling"):
        DecodeSession(config(growth="never"))
    with pytest.raises(etkv.EtkvError, match="capacity is 2147483648, expected a 32-bit integer"):
        DecodeSession(config(capacity=2**31))
    with pytest.raises(etkv.EtkvError, match="expected a CacheConfig"):
        DecodeSession({"capacity": 3})
    with SeqSession(config()) as session:
        with pytest.raises(etkv.EtkvError, match=r"sequence is 1.5, expected an integer"):
            session.seq_len(1.5)
        with pytest.raises(etkv.EtkvError, match="sequences is"):
            session.begin_step("ab")
        with (
            pytest.raises(etkv.EtkvError, match="logits is 'some', expected one of all, last"),
            session.bound(logits="some"),
        ):
            pass
        with (
            pytest.raises(etkv.EtkvError, match="passes is 'some', expected one of default, interpreted, none"),
            session.bound(passes="some"),
        ):
            pass


def test_errors_have_a_class_and_a_status():
    with SeqSession(config()) as session:
        with pytest.raises(etkv.PositionError) as caught:
            session.rewind(1)
        assert caught.value.status is etkv.Status.POSITION
        with pytest.raises(etkv.StatusError, match="256") as caught:
            session.seq_len(256)
        assert caught.value.status is etkv.Status.INVALID_ARGUMENT
    with TreeSession(config()) as session:
        session.propose([-1, 0, 0])
        with pytest.raises(etkv.StepError):
            session.propose([-1])
        assert session.tree_len() == 3
        with pytest.raises(etkv.CapacityError):
            session.propose([-1] * 101, sequence=1)
        session.commit([])
        assert session.tree_len() == 0


def test_estimates_are_those_of_the_cache():
    small = config(layers=(LayerConfig(2, 64),), capacity=1000)
    assert etkv.row_bytes("f16", 64) == 128
    assert etkv.estimate(small, 0).used == 0
    assert etkv.estimate(small, 1000).used == 1000 * 2 * 2 * 128
    with DecodeSession(small) as session:
        assert session.memory().at_capacity == etkv.estimate(small, 0).at_capacity
    with pytest.raises(etkv.EtkvError, match="1001"):
        etkv.estimate(small, 1001)


def test_the_memory_callback_frees_what_another_cache_needs(caplog):
    needed = etkv.estimate(UPFRONT, 1000).allocated
    spare, asked = [DecodeSession(UPFRONT)], []

    def free(lacking):
        asked.append(lacking)
        with pytest.raises(etkv.EtkvError, match="from inside itself"):
            etkv.set_memory_callback(None)
        spare.pop().close()
        return needed

    try:
        etkv.set_memory_budget(etkv.memory_budget().held)
        etkv.set_memory_callback(free)
        with DecodeSession(UPFRONT) as session:
            assert (asked, spare) == ([needed], [])
            report = etkv.process_report()["memory"]
            assert (report["limit"], report["free"]) == (report["held"], 0)
            assert {"kind": "contiguous", "name": None, "keys": [session.key], "held": needed}.items() <= max(
                report["holders"], key=lambda holder: holder["id"]
            ).items()
            # There is no other cache any more, so the callback raises, and the exception is logged.
            with pytest.raises(etkv.EtkvError, match=f"this call needs {needed} more"):
                DecodeSession(UPFRONT)
            assert len(asked) == 2
            assert "the memory callback failed" in caplog.text
            etkv.set_memory_callback(None)
            with pytest.raises(etkv.EtkvError, match=f"this call needs {needed} more"):
                DecodeSession(UPFRONT)
            assert len(asked) == 2
    finally:
        etkv.set_memory_callback(None)
        etkv.set_memory_budget(None)


def test_a_memory_callback_lives_when_its_setting_is_interrupted(monkeypatch):
    """The library already has the new callback, and may call it."""
    asked = []

    def interrupted(*arguments):
        call(*arguments)
        raise KeyboardInterrupt

    call = memory.call
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(memory, "call", interrupted)
            etkv.set_memory_callback(asked.append)
        gc.collect()
        with DecodeSession(UPFRONT):
            etkv.set_memory_budget(etkv.memory_budget().held)
            with pytest.raises(etkv.EtkvError, match="memory budget"):
                DecodeSession(UPFRONT)
        assert len(asked) == 1
    finally:
        etkv.set_memory_callback(None)
        etkv.set_memory_budget(None)


def test_allocations_beyond_the_memory_budget_are_refused():
    needed = etkv.estimate(UPFRONT, 1000).allocated
    before = etkv.memory_budget()
    assert before.limit is None
    try:
        etkv.set_memory_budget(before.held + needed)
        with DecodeSession(UPFRONT):
            found = etkv.memory_budget()
            assert (found.held, found.n_caches) == (before.held + needed, before.n_caches + 1)
            assert found.peak >= found.held
            with pytest.raises(etkv.EtkvError, match=f"this call needs {needed} more") as refused:
                DecodeSession(UPFRONT)
            assert refused.value.status == etkv.Status.BACKEND
        with DecodeSession(UPFRONT):
            pass
        with pytest.raises(etkv.EtkvError, match="limit is 0, expected 1 to"):
            etkv.set_memory_budget(0)
    finally:
        etkv.set_memory_budget(None)
    assert etkv.memory_budget().held == before.held


@pytest.mark.parametrize("make", [SeqSession, TreeSession])
def test_estimates_of_several_sequences_are_those_of_their_caches(make):
    windowed = config(layers=(LayerConfig(2, 64, window=8),), capacity=1000, max_step_tokens=4, growth="upfront")
    shared = etkv.estimate_shared(windowed, 0)
    with make(windowed) as session:
        assert session.memory() == shared
    assert shared.allocated == 1000 * 2 * 2 * 128
    assert shared.at_capacity > etkv.estimate(windowed, 0).at_capacity
    with pytest.raises(etkv.EtkvError, match="1001"):
        etkv.estimate_shared(windowed, 1001)


def test_a_freed_handle_has_no_facts():
    with DecodeSession(config()) as session:
        gone = etkv.Cache(lib().etkv_session_cache(session._session))
        lib().etkv_cache_free(gone._raw())
        for fact in ("capacity", "n_layers", "kind"):
            with pytest.raises(etkv.EtkvError, match="another thread closed the session"):
                getattr(gone, fact)


def test_statuses_have_the_names_of_the_library():
    library = lib()
    for status in etkv.Status:
        assert text(library.etkv_status_name(status)) == status.name
        assert f"ETKV_ERROR_{status.name}" in dir(library)
        assert getattr(library, f"ETKV_ERROR_{status.name}") == status
    constants = [name for name in dir(library) if name.startswith("ETKV_ERROR_")]
    assert len(constants) == len(etkv.Status)


def test_a_session_is_not_copied():
    with SeqSession(config()) as session:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(etkv.EtkvError, match="a SeqSession cannot be copied or sent to another process"):
                copied(session)
        assert session.length == 0


def test_positions_are_copied_before_their_memory_goes():
    """Each range is read while its array still exists."""
    program = reference.program(Variant("tiny-llama")).path
    facts = etkv.read_kv_cache_metadata(program)
    with etkv.SeqSession(CacheConfig(facts.layers, 64)) as session, etkv.load(program, session) as loaded:
        loaded.forward(list(range(40)), list(range(40)))
        for start in range(1, 38, 2):
            session.seq_rm(0, start, start + 1)
        expected = [*(range(start, start + 1) for start in range(0, 38, 2)), range(38, 40)]
        for _ in range(3000):
            assert session.seq_positions(0) == expected
            # Allocate as many bytes as the array had, to overwrite freed memory.
            bytes(160)
