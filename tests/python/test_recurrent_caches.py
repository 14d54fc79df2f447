"""Caches with recurrent layers: configs, bytes, reports and checkpoints."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import etkv
import reference
from etkv import CacheConfig, Convolution, DecodeSession, LayerConfig, Recurrence, SeqSession, TreeSession, inspection
from etkv.config import LayerConfigs
from etkv.recurrent_layer import RecurrentLayer
from reference import Variant
from test_recurrent_programs import recurrent_program

CONVOLUTION, RECURRENCE = Convolution(160, 4), Recurrence(2, 4, 16, 24)
SESSIONS = (DecodeSession, SeqSession, TreeSession)
BACKENDS = ("cpu", "MLXBackend")
BLOCK = 64


def config(**changes) -> CacheConfig:
    given = {"layers": [LayerConfig(2, 64)], "capacity": 256, "recurrent_layers": [CONVOLUTION, RECURRENCE]}
    return CacheConfig(**{**given, **changes})


@pytest.fixture(scope="module")
def hybrid() -> Path:
    """Return a CPU program with convolutions, recurrences and attention."""
    return recurrent_program("qwen3.5", "cpu").request.output


def run(program, tokens, at, chunk):
    """Run the tokens, the first at position ``at``, in steps of ``chunk``. Return the last logits."""
    for start in range(at, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        logits = program.forward(torch.tensor([piece]), torch.arange(start, start + len(piece)))
    return logits[-1].clone()


def test_layers_are_their_facts():
    assert RecurrentLayer("convolution", channels=160, width=4) == CONVOLUTION
    assert RecurrentLayer("recurrence", k_heads=2, heads=4, k_dim=16, v_dim=24) == RECURRENCE
    assert Recurrence(2, 4, 16, 24, channel_decay=True) != RECURRENCE
    assert CONVOLUTION != RECURRENCE
    assert len({CONVOLUTION, RecurrentLayer("convolution", 160, 4), RECURRENCE}) == 2
    assert eval(repr([CONVOLUTION, RECURRENCE])) == [CONVOLUTION, RECURRENCE]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("session_class", SESSIONS)
def test_a_cache_reports_what_was_estimated(session_class, backend):
    upfront = config(growth="upfront", anchors=3)
    with session_class(upfront, backend=backend) as session:
        assert (session.n_layers, session.n_recurrent_layers) == (1, 2)
        memory, report = session.memory(), session.report()
        assert "0 of 256 positions in 1 layers and 2 recurrent layers" in repr(session)
    estimated = (etkv.estimate if session_class is DecodeSession else etkv.estimate_shared)(upfront, 0)
    assert memory == estimated
    convolution, recurrence = memory.recurrent_layers
    assert (convolution.anchors_allocated, convolution.rows_used) == (0, 0)
    assert min(convolution.rows_allocated, recurrence.rows_allocated, recurrence.anchors_allocated) > 0
    of_attention = memory.layers[0].k_allocated + memory.layers[0].v_allocated
    of_recurrent = sum(layer.rows_allocated + layer.anchors_allocated for layer in memory.recurrent_layers)
    assert memory.allocated == of_attention + of_recurrent
    assert report["recurrent_layers"] == [
        {
            "rows": {"allocated": layer.rows_allocated, "used": layer.rows_used},
            "anchors": {"allocated": layer.anchors_allocated, "used": layer.anchors_used},
        }
        for layer in memory.recurrent_layers
    ]
    assert report["config"]["recurrent_layers"] == [
        {"kind": "convolution", "channels": 160, "width": 4},
        {"kind": "recurrence", "k_heads": 2, "heads": 4, "k_dim": 16, "v_dim": 24, "channel_decay": False},
    ]
    assert (report["config"]["anchors"], report["config"]["checkpoints"]) == (3, 32)


def test_bytes_follow_from_the_layers():
    found = etkv.estimate(config(growth="exact"), 10).recurrent_layers
    assert found[0].rows_used == 10 * 160 * 4
    assert found[1].rows_used == 10 * (2 * 16 + 4 * (24 + 1)) * 4
    state = 4 * 16 * 24 * 4
    for anchors in (1, 2, 3):
        assert etkv.estimate(config(anchors=anchors), 256).recurrent_layers[1].anchors_used == anchors * state
    with_decay = config(recurrent_layers=[dataclasses.replace(RecurrentLayer(**vars(RECURRENCE)), channel_decay=True)])
    assert etkv.estimate(with_decay, 10).recurrent_layers[0].rows_used == 10 * (2 * 16 + 4 * (24 + 16)) * 4
    shared = {most: etkv.estimate_shared(config(capacity=4096, checkpoints=most), 0) for most in (None, 0, 1, 32)}
    assert shared[None].at_capacity == shared[32].at_capacity == shared[0].at_capacity + 32 * state
    assert shared[1].at_capacity == shared[0].at_capacity + state


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("session_class", SESSIONS)
def test_a_model_without_attention(session_class, backend):
    with session_class(config(layers=[]), backend=backend) as session:
        assert (session.n_layers, session.n_recurrent_layers) == (0, 2)
        assert session.memory().layers == ()
        session.clear(release=True)
    with pytest.raises(etkv.EtkvError, match="the session is closed"):
        session.n_layers  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchors": -1}, "anchors is -1, the minimum is 1"),
        ({"anchors": 65}, "anchors is 65, the maximum is 64"),
        ({"checkpoints": -1}, "checkpoints is -1, the minimum is 0"),
        ({"checkpoints": 257}, "checkpoints is 257, the maximum is 256"),
        ({"recurrent_layers": [Convolution(0, 4)]}, "recurrent layer 0: channels is 0, the minimum is 1"),
        ({"recurrent_layers": [CONVOLUTION, Convolution(8, 65)]}, "recurrent layer 1: width is 65, the maximum is 64"),
        ({"recurrent_layers": [Recurrence(3, 4, 16, 24)]}, "multiple of k_heads, got 4 and 3"),
        ({"recurrent_layers": [Recurrence(1, 1, 2**31 - 1, 2)]}, "is too large"),
        ({"recurrent_layers": [RecurrentLayer("convolution", 8, 4, heads=2)]}, "heads is 2, expected 0 for a convolut"),
        ({"recurrent_layers": [], "layers": []}, "a cache needs at least 1 layer"),
    ],
)
def test_limits(changes, message):
    for make in (DecodeSession, SeqSession, lambda wrong: etkv.estimate(wrong, 0)):
        with pytest.raises(etkv.EtkvError, match=re.escape(message)) as caught:
            make(config(**changes))
        if "-1, the minimum is 0" not in message:
            assert caught.value.status is etkv.Status.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recurrent_layers": CONVOLUTION}, "CacheConfig.recurrent_layers is Convolution(channels=160, width=4), expe"),
        ({"recurrent_layers": [LayerConfig(1, 8)]}, "CacheConfig.recurrent_layers[0] is LayerConfig("),
        ({"recurrent_layers": [Convolution(8, 4.0)]}, "recurrent_layers[0].width is 4.0, expected an integer"),
        ({"recurrent_layers": [RecurrentLayer("lstm")]}, "kind is 'lstm', expected one of convolution, recurrence"),
        ({"recurrent_layers": [Recurrence(1, 1, 8, 8, channel_decay=2)]}, "channel_decay is 2, expected a bool"),
        ({"anchors": 2.5}, "CacheConfig.anchors is 2.5, expected an integer"),
        ({"checkpoints": True}, "CacheConfig.checkpoints is True, expected an integer"),
    ],
)
def test_types(changes, message):
    with pytest.raises(etkv.EtkvError, match=re.escape(message)):
        config(**changes)
    with pytest.raises(etkv.EtkvError, match="width is 2147483648, expected a 32-bit integer"):
        DecodeSession(config(recurrent_layers=[Convolution(8, 2**31)]))


def test_a_config_of_a_program_has_its_recurrent_layers():
    facts = {"kv_cache.backend": "cpu", "kv_cache.n_layers": 0, "kv_cache.n_kv_heads": 0, "kv_cache.head_dim": 0}
    listed = [*CONVOLUTION.facts(), *RECURRENCE.facts()]
    facts |= {"kv_cache.schema_version": 2, "kv_cache.recurrent_layers": listed}
    params = etkv.read_kv_cache_metadata(facts)
    made = CacheConfig(params.layers, 256)
    assert made.recurrent_layers == params.recurrent_layers == (CONVOLUTION, RECURRENCE)
    # A copy of the layers keeps the recurrent layers. Explicit recurrent layers take precedence.
    assert CacheConfig(LayerConfigs(params.layers), 256) == made
    assert dataclasses.replace(made, capacity=128).recurrent_layers == made.recurrent_layers
    assert CacheConfig(params.layers, 256, recurrent_layers=[CONVOLUTION]).recurrent_layers == (CONVOLUTION,)
    assert CacheConfig(list(params.layers), 256).recurrent_layers == ()
    with DecodeSession(made) as session:
        assert (session.n_layers, session.n_recurrent_layers) == (0, 2)
        holders = etkv.process_report()["memory"]["holders"]
        assert any(session.key in holder["keys"] for holder in holders)
    for version in (4, 0):
        with pytest.raises(etkv.EtkvError, match=rf"schema_version is {version}; this etkv reads versions 1 to 3"):
            etkv.read_kv_cache_metadata({**facts, "kv_cache.schema_version": version})


def test_inspect_lists_recurrent_layers(monkeypatch):
    path = reference.program(Variant("tiny-llama")).path
    facts = etkv.read_kv_cache_metadata(path)
    recurrent = (CONVOLUTION, CONVOLUTION, RECURRENCE)
    layers = LayerConfigs(facts.layers, recurrent_layers=recurrent)
    without = inspection.report(path, capacity=100, formats=("f16",))
    changed = dataclasses.replace(facts, layers=layers, recurrent_layers=recurrent)
    monkeypatch.setattr(inspection, "read_kv_cache_metadata", lambda _: changed)
    found = inspection.report(path, capacity=100, formats=("f16",))
    assert found["recurrent_layers"][1:] == [
        {"kind": "convolution", "channels": 160, "width": 4},
        {"kind": "recurrence", "k_heads": 2, "heads": 4, "k_dim": 16, "v_dim": 24, "channel_decay": False},
    ]
    printed = list(inspection.lines(found))
    assert "cache: 2 recurrent layers: convolution of 160 channels, width 4" in printed
    states = "recurrence of 4 heads (2 of keys), states of 16 x 24, a decay for each head"
    assert f"cache: 1 recurrent layer: {states}" in printed
    a_position = [contents["cache"]["bytes"]["f16"]["a_position"] for contents in (found, without)]
    assert a_position[0] - a_position[1] == (2 * 160 + 2 * 16 + 4 * (24 + 1)) * 4
    assert "recurrent_layers" not in without


@pytest.mark.parametrize("session_class", SESSIONS)
def test_marks_before_any_step(session_class):
    with session_class(config(), backend="cpu") as session:
        assert session.reachable(100) == session.reachable(0) == 0
        assert [session.mark(position) for position in (0, 63, 64, 100, 130)] == [0, 0, 64, 64, 128]
        # The marks have no effect before a step reaches them.
        assert session.reachable(130) == 0
        for use in (session.mark, session.reachable):
            with pytest.raises(etkv.PositionError, match="position -1 is negative"):
                use(-1)
            with pytest.raises(etkv.EtkvError, match="position is 'a', expected an integer"):
                use("a")
        if session_class is not DecodeSession:
            assert (session.seq_mark(7, 100), session.seq_reachable(7, 100)) == (64, 0)
            for use in (session.seq_mark, session.seq_reachable):
                with pytest.raises(etkv.StatusError, match="256"):
                    use(256, 64)
                with pytest.raises(etkv.PositionError, match="is negative"):
                    use(0, -1)
    with session_class(config(checkpoints=0), backend="cpu") as session:
        assert session.mark(100) == 0
    with pytest.raises(etkv.EtkvError, match="closed"):
        session.mark(64)


def test_a_contiguous_cache_with_windows_makes_no_checkpoints():
    windowed = config(layers=[LayerConfig(2, 64, window=8)], recurrent_layers=[], max_step_tokens=4)
    with DecodeSession(windowed) as session, pytest.raises(etkv.UnsupportedError, match="use kind seq or tree"):
        session.mark(64)
    with SeqSession(windowed) as session:
        assert session.mark(70) == 70


def test_a_text_with_windows_returns_to_a_mark():
    """A checkpoint keeps rows that windows have dropped, so a text that continues there has the same logits."""
    path = reference.program(Variant("tiny-mistral-window")).path
    facts = etkv.read_kv_cache_metadata(path)
    window = min(layer.window for layer in facts.layers if layer.window)
    made = CacheConfig(facts.layers, 4 * window, max_step_tokens=4)
    tokens = [3 + (7 * at) % 90 for at in range(3 * window)]

    with SeqSession(made) as session, etkv.load(path, session) as program:
        assert session.mark(6) == 6
        run(program, tokens, 0, 4)
        least = session.rewindable_to()
        assert least > 6
        assert session.reachable(least - 1) == session.reachable(6) == 6
        assert session.reachable(1000) == len(tokens)
        assert session.reachable(5) == 0
        (sequence,) = session.report()["sequences"]
        assert sequence["checkpoints"] == [6]
        session.seq_cp(0, 1)
        assert session.seq_reachable(1, least - 1) == 6
        for use in (session.mark, session.reachable):
            with pytest.raises(etkv.StatusError, match="2 sequences") as caught:
                use(6)
            assert caught.value.status is etkv.Status.INVALID_ARGUMENT
        session.seq_rm(1)
        with pytest.raises(etkv.PositionError, match="no longer reachable; the next reachable one below it is 6"):
            session.mark(7)
        session.rewind(6)
        other = [*tokens[:6], *tokens[10:30]]
        again = run(program, other, 6, 4)
    with SeqSession(made) as session, etkv.load(path, session) as program:
        run(program, other[:6], 0, 4)
        torch.testing.assert_close(again, run(program, other, 6, 4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("session_class", SESSIONS)
def test_a_program_fills_the_cache_that_was_estimated(session_class, hybrid):
    made = CacheConfig(etkv.read_kv_cache_metadata(hybrid).layers, 256, max_step_tokens=16, growth="exact")
    estimate = etkv.estimate if session_class is DecodeSession else etkv.estimate_shared
    tokens = [3 + (7 * at) % 90 for at in range(250)]
    with session_class(made) as session, etkv.load(hybrid, session) as program:
        assert session.n_recurrent_layers == len(made.recurrent_layers) == 4
        for at in range(0, len(tokens), 50):
            run(program, tokens[: at + 50], at, 16)
            found, estimated = session.memory(), estimate(made, at + 50)
            assert (found.used, found.layers) == (estimated.used, estimated.layers)
            used = [[(layer.rows_used, layer.anchors_used) for layer in m.recurrent_layers] for m in (found, estimated)]
            assert used[0] == used[1]


@pytest.mark.parametrize("session_class", SESSIONS)
def test_a_text_with_recurrent_layers_returns_to_a_mark(session_class, hybrid):
    made = CacheConfig(etkv.read_kv_cache_metadata(hybrid).layers, 256, max_step_tokens=16)
    tokens = [3 + (7 * at) % 90 for at in range(250)]
    other = [*tokens[:BLOCK], *tokens[100:150]]
    with session_class(made) as session, etkv.load(hybrid, session) as program:
        wanted = run(program, other, 0, 16)
        session.clear()
        assert session.mark(100) == BLOCK
        run(program, tokens, 0, 16)
        # There are anchors at 128 and 192.
        assert session.rewindable_to() == 2 * BLOCK
        reached = [session.reachable(position) for position in (63, 64, 100, 127, 128, 200, 1000)]
        assert reached == [0, BLOCK, BLOCK, BLOCK, 128, 200, 250]
        (sequence,) = session.report()["sequences"]
        assert (sequence["checkpoints"], sequence["rewindable_to"]) == ([BLOCK], 2 * BLOCK)
        with pytest.raises(etkv.PositionError):
            session.rewind(100)
        session.rewind(session.reachable(100))
        assert torch.equal(run(program, other, BLOCK, 16), wanted)


def test_a_cache_without_checkpoints_begins_again(hybrid):
    made = CacheConfig(etkv.read_kv_cache_metadata(hybrid).layers, 256, max_step_tokens=16, anchors=1, checkpoints=0)
    with DecodeSession(made) as session, etkv.load(hybrid, session) as program:
        assert session.mark(100) == 0
        run(program, [5] * 200, 0, 16)
        assert session.rewindable_to() == 192
        assert session.reachable(191) == 0
        assert "checkpoints" not in session.report()["sequences"][0]
