"""Reference caches: messages of refused calls, forwards without a commit, and changes of formats."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import step_programs
from etkv.config import CacheConfig, LayerConfig
from etkv.errors import EtkvError, Status, StatusError
from etkv.recurrent_layer import Convolution
from etkv.reference import ContiguousCache, SeqCache, TreeCache, make_cache
from etkv.reference.formats import format_of

ONE = CacheConfig([LayerConfig(1, 8)], 16, k_format="f32", v_format="f32")
TWO = CacheConfig([LayerConfig(1, 8), LayerConfig(2, 4, 6)], 16, k_format="f32", v_format="f32")
SLIDING = CacheConfig(
    [LayerConfig(1, 8), LayerConfig(1, 8, window=4, sinks=1)], 100, k_format="f32", v_format="f32", max_step_tokens=2
)


def rows(config, layer, n_tokens, seed=0):
    random = torch.Generator().manual_seed(seed)
    facts = config.layers[layer]
    return tuple(
        torch.randn(1, facts.n_kv_heads, n_tokens, dim, generator=random) for dim in (facts.k_head_dim, facts.value_dim)
    )


def forward(cache, positions, seed=0, owners=None):
    positions = list(positions)
    if owners is not None:
        cache.begin_step_shared(owners)
    return [
        cache.update_and_fetch(layer, *rows(cache.config, layer, len(positions), seed), positions)
        for layer in range(len(cache.config.layers))
    ]


def grown(cache, length):
    for at in range(length):
        forward(cache, [at], seed=at)
    return cache


def assert_refused(cache, call, status, words):
    """Check that the call is refused with these words, and that the cache is unchanged."""
    before = step_programs.answers(cache)
    with pytest.raises(StatusError, match=words) as caught:
        call()
    assert caught.value.status == status
    assert step_programs.answers(cache) == before


# ---- Configs -------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": ()}, "at least 1 layer"),
        (
            {"recurrent_layers": [Convolution(4, 3)]},
            "holds keys and values, and the config has 1 recurrent layers; leave them out, and run them on an "
            "etkv.reference.RecurrentState",
        ),
        ({"capacity": 0}, "capacity is 0, the minimum is 1"),
        ({"capacity": 2**31}, "capacity is 2147483648, the maximum is 2147483647"),
        ({"max_step_tokens": -1}, "max_step_tokens is -1, the minimum is 0"),
        ({"quantized_kv_start": -1}, "quantized_kv_start is -1, the minimum is 0"),
        ({"growth": "slow"}, "unknown growth 'slow'; available: doubling, step, exact, upfront"),
        ({"growth": "exact", "min_chunk": 4}, "expected min_chunk 0 for growth 'exact', got 4"),
        ({"k_format": "f64"}, "k_format: unknown storage format `f64`"),
        (
            {"k_format": "affine4"},
            "layer 0: keys: affine4g32 needs a head_dim that is a multiple of 32, got head_dim 8",
        ),
        ({"v_format": "affine7g32"}, "v_format: unknown storage format `affine7g32`"),
        ({"quantized_kv_start": 3, "float_format": "mxfp8"}, "expected float_format f32, f16 or bf16, got mxfp8"),
        ({"layers": [LayerConfig(0, 8)]}, "layer 0: n_kv_heads is 0, the minimum is 1"),
        ({"layers": [LayerConfig(1, 8), LayerConfig(1, 8, 0)]}, "layer 1: v_head_dim is 0, the minimum is 1"),
        ({"layers": [LayerConfig(1, 8, window=-1)]}, "layer 0: window is -1, the minimum is 0"),
        (
            {"layers": [LayerConfig(1, 8, 9, values_in_keys=True)]},
            "layer 0: v_head_dim is 9, but values in keys have at most the 8 elements of a key",
        ),
        (
            {"layers": [LayerConfig(1, 8, 4, values_in_keys=True)], "k_format": "f32", "v_format": "f16"},
            "v_format is f16, but the values of every layer are in its keys, which k_format stores as f32",
        ),
        ({"layers": [LayerConfig(1, 8, chunk=-2)]}, "layer 0: chunk is -2, the minimum is 0"),
        (
            {"layers": [LayerConfig(1, 8, window=4, chunk=8)]},
            "layer 0: expected chunk 0 for a layer with a window or sinks, got 8",
        ),
        ({"layers": [LayerConfig(1, 8, sinks=2)]}, "layer 0: expected sinks 0 for a layer without a window, got 2"),
    ],
)
def test_invalid_configs_are_refused(change, words):
    config = CacheConfig(**{"layers": ONE.layers, "capacity": 16, **change})
    with pytest.raises(StatusError, match=words) as caught:
        TreeCache(config)
    assert caught.value.status == Status.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity": "8"}, "capacity is '8', expected an integer"),
        ({"capacity": 8, "max_step_tokens": True}, "max_step_tokens is True"),
        ({"capacity": 8, "k_format": 16}, "k_format is 16, expected a string"),
        ({"capacity": 8, "layers": LayerConfig(1, 8)}, "expected a sequence of LayerConfig"),
        ({"capacity": 8, "layers": [(1, 8)]}, r"layers\[0\] is \(1, 8\), expected a LayerConfig"),
    ],
)
def test_configs_of_wrong_types(arguments, words):
    with pytest.raises(EtkvError, match=words):
        CacheConfig(**{"layers": [LayerConfig(1, 8)], **arguments})
    with pytest.raises(EtkvError, match=r"n_kv_heads is 1\.5, expected an integer"):
        LayerConfig(1.5, 8)
    with pytest.raises(EtkvError, match=r"LayerConfig\.values_in_keys is 1, expected a bool"):
        LayerConfig(1, 8, values_in_keys=1)


def test_there_are_three_kinds():
    with pytest.raises(StatusError, match="unknown cache kind 'ring'; available: contiguous, seq, tree"):
        make_cache("ring", ONE)


# ---- Calls ---------------------------------------------------------------


def frontier(cache):
    """Add two positions and a frontier of three nodes."""
    forward(cache, [0, 1])
    cache.propose([-1, 0, -1])


def run_frontier(cache):
    frontier(cache)
    forward(cache, [2, 3, 2])


def two_sequences(cache):
    cache.begin_step([0, 0, 1])
    forward(cache, [0, 1, 0])


def fork(cache):
    forward(cache, [0, 1])
    cache.seq_cp(0, 5)


def last_three(cache):
    forward(cache, range(8))
    cache.seq_rm(0, 2, 5)
    cache.seq_rm(0, 0, 2)


def at(length):
    return lambda cache: grown(cache, length)


LATER = CacheConfig(
    [LayerConfig(1, 32, 16)], 40, k_format="row-int4", v_format="row-int4", max_step_tokens=3, quantized_kv_start=6
)
INVALID, CAPACITY, POSITION, STEP = Status.INVALID_ARGUMENT, Status.CAPACITY, Status.POSITION, Status.STEP
DROPPED = "the window layers have dropped what a query there sees"
REFUSED = [
    # One sequence.
    ("contiguous", ONE, at(4), lambda c: forward(c, []), INVALID, "at least 1 token"),
    ("contiguous", ONE, at(4), lambda c: forward(c, [-1]), POSITION, "begins at position -1; expected 0 to 4"),
    ("contiguous", ONE, at(4), lambda c: forward(c, [5]), POSITION, "begins at position 5; expected 0 to 4"),
    ("contiguous", ONE, at(4), lambda c: forward(c, [4, 6]), POSITION, "expected position 5 for token 1 .* got 6"),
    ("contiguous", ONE, at(4), lambda c: forward(c, [4, 3]), POSITION, "expected position 5 for token 1 .* got 3"),
    ("contiguous", ONE, at(4), lambda c: forward(c, range(4, 17)), CAPACITY, "13 tokens .*: 12 of 16 cells are free"),
    ("contiguous", ONE, at(4), lambda c: forward(c, [4.0]), INVALID, "expected a position as an integer, got 4.0"),
    ("contiguous", ONE, at(4), lambda c: c.rewind(5), POSITION, "to length 5: the sequence has 4 positions"),
    ("contiguous", ONE, at(4), lambda c: c.rewind("1"), INVALID, "expected length as an integer, got '1'"),
    ("contiguous", ONE, at(4), lambda c: c.can_extend(-1), INVALID, "n is -1, the minimum is 0"),
    ("contiguous", ONE, at(4), lambda c: c.can_extend(True), INVALID, "expected n as an integer, got True"),
    # Windows.
    ("contiguous", SLIDING, at(40), lambda c: c.rewind(36), POSITION, f"36: {DROPPED}; .* at 0, or at 37 or later"),
    ("contiguous", SLIDING, at(40), lambda c: c.rewind(1), POSITION, f"1: {DROPPED}; .* at 0, or at 37 or later"),
    ("contiguous", SLIDING, at(40), lambda c: forward(c, [36]), POSITION, f"36: {DROPPED}; .* or at 37 or later"),
    *(
        (
            kind,
            SLIDING,
            at(40),
            lambda c: forward(c, range(40, 43)),
            CAPACITY,
            "3 tokens is too long: .* max_step_tokens, 2",
        )
        for kind in ("contiguous", "seq")
    ),
    ("seq", SLIDING, at(40), lambda c: c.seq_cp(0, 1, 0, 20), POSITION, f"20: {DROPPED}; .* at 0, or at 23 or later"),
    ("seq", SLIDING, at(40), lambda c: c.seq_rm(0, 20), POSITION, f"20: {DROPPED}; .* at 0, or at 37 or later"),
    # Several sequences.
    ("seq", ONE, fork, lambda c: forward(c, [2]), INVALID, "holds 2 sequences; call begin_step to assign tokens"),
    ("seq", ONE, fork, lambda c: c.rewind(1), INVALID, "holds 2 sequences; call seq_rm to shorten one of them"),
    ("seq", ONE, fork, lambda c: c.rewindable_to(), INVALID, "2 sequences; call seq_rewindable_to for one of them"),
    ("seq", ONE, fork, lambda c: c.begin_step([]), INVALID, "sequences of at least 1 token"),
    ("seq", ONE, fork, lambda c: c.begin_step([0, 256]), INVALID, "expected a sequence from 0 to 255, got 256"),
    ("seq", ONE, fork, lambda c: c.begin_step_shared([[0], []]), INVALID, "token 1 of the step belongs to no sequence"),
    ("seq", ONE, fork, lambda c: c.begin_step_shared([[5, 0, 5]]), INVALID, "token 0 .* belongs to sequence 5 twice"),
    (
        "seq",
        ONE,
        fork,
        lambda c: forward(c, [1], owners=[[5]]),
        POSITION,
        "position 2 for token 0 .* sequence 5, got 1",
    ),
    ("seq", ONE, fork, lambda c: forward(c, [2, 3], owners=[[5]]), INVALID, "2 tokens, but begin_step declared 1"),
    ("seq", ONE, fork, lambda c: c.seq_rm(0, -1, 2), INVALID, "starts at 0 or later, got -1 to 2"),
    ("seq", ONE, fork, lambda c: c.seq_cp(0, 1, 3, 2), INVALID, "starts at 0 or later, got 3 to 2"),
    ("seq", ONE, two_sequences, lambda c: c.seq_cp(0, 1), POSITION, "0 and 1 hold different tokens at position 0"),
    ("seq", ONE, at(4), lambda c: c.rewind(6), POSITION, "position 5 is not held; use 0, or 0 to 4"),
    ("seq", ONE, last_three, lambda c: c.rewind(4), POSITION, "position 3 is not held; use 0, or 6 to 8"),
    # Trees.
    ("tree", ONE, frontier, lambda c: c.propose([2]), STEP, "the last frontier, of 3 nodes, has not run"),
    ("tree", ONE, frontier, lambda c: c.propose([], 3), INVALID, "a frontier of at least 1 node"),
    ("tree", ONE, frontier, lambda c: c.propose([-1, 1], 3), INVALID, "a parent of node 1 from -1 to 0, got 1"),
    ("tree", ONE, frontier, lambda c: c.propose([-1] * 12, 3), CAPACITY, "14 of 16 cells are free, 3 .* for other"),
    ("tree", ONE, frontier, lambda c: c.commit([0]), INVALID, "0 nodes of the tree have run"),
    ("tree", ONE, frontier, lambda c: forward(c, [2, 3, 3]), POSITION, "expected position 2 for token 2 .* got 3"),
    ("tree", ONE, frontier, lambda c: forward(c, [2, 3], owners=[[0], [0]]), INVALID, "sequence 0 .* 1 are missing"),
    ("tree", ONE, frontier, lambda c: forward(c, [2], owners=[[0, 1]]), STEP, "of 3 nodes, 3 of them for this step"),
    ("tree", ONE, run_frontier, lambda c: forward(c, [2]), STEP, "carries a tree of 3 nodes, 0 of them for this step"),
    ("tree", ONE, run_frontier, lambda c: c.seq_rm(0, 1), STEP, "commit it before you remove a part of it"),
    ("tree", ONE, run_frontier, lambda c: c.seq_cp(1, 0), STEP, "commit it before you copy onto it"),
    ("tree", ONE, run_frontier, lambda c: c.commit([0, 2]), INVALID, "node 2 after 0: its parent is -1"),
    ("tree", ONE, at(2), lambda c: c.commit([]), INVALID, "carries no tree"),
    # Formats.
    ("contiguous", LATER, at(5), lambda c: forward(c, range(5, 9)), CAPACITY, "9 positions in f16, the maximum is 8"),
    ("contiguous", LATER, at(3), lambda c: c.convert("f16", "mxfp8"), INVALID, "layer 0: values: mxfp8 .* of 32, got"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[-1][:40])
def test_a_refusal_changes_nothing(case):
    kind, config, prepare, call, status, words = case
    cache = make_cache(kind, config)
    prepare(cache)
    assert_refused(cache, lambda: call(cache), status, words)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("clear", ()),
        ("rewind", (0,)),
        ("convert", ("f16", "f16")),
        ("begin_step", ([0],)),
        ("begin_step_shared", ([[0]],)),
        ("cancel_step", ()),
        ("seq_cp", (0, 1)),
        ("seq_rm", (0,)),
        ("seq_keep", (0,)),
        ("compact", ()),
        ("propose", ([-1],)),
        ("commit", ([],)),
    ],
)
def test_changes_are_refused_within_a_forward(name, arguments):
    cache = grown(TreeCache(TWO), 2)
    cache.update_and_fetch(0, *rows(TWO, 0, 1), [2])
    assert_refused(cache, lambda: getattr(cache, name)(*arguments), STEP, "in the middle of a step")
    cache.update_and_fetch(1, *rows(TWO, 1, 1), [2])
    assert cache.length == 3


# ---- Forwards ------------------------------------------------------------


def test_a_forward_commits_once_every_layer_is_called():
    cache = ContiguousCache(TWO)
    cache.update_and_fetch(1, *rows(TWO, 1, 3), [0, 1, 2])
    assert cache.length == 0
    cache.update_and_fetch(0, *rows(TWO, 0, 3), [0, 1, 2])
    assert cache.length == 3


def test_a_new_forward_drops_an_unfinished_forward():
    cache = grown(ContiguousCache(TWO), 2)
    k, v = rows(TWO, 0, 1, seed=7)
    cache.update_and_fetch(0, k, v, [2])
    cache.update_and_fetch(0, -k, -v, [2])  # the same layer again
    cache.update_and_fetch(1, *rows(TWO, 1, 1), [2])
    keys, _, _ = cache.update_and_fetch(0, k, v, [3])
    assert torch.equal(keys[:, :, 2], -k[:, :, 0])
    cache.update_and_fetch(1, *rows(TWO, 1, 1), [0])  # another position: an unfinished rewind
    cache.abort()
    assert cache.length == 3


@pytest.mark.parametrize("kind", ["contiguous", "seq", "tree"])
def test_a_repeated_layer_with_the_same_rows_only_attends(kind):
    """The repeated call is before or after the first call of the last layer, with other queries. Nothing is written
    twice.
    """
    cache = grown(make_cache(kind, TWO), 3)
    brought = [rows(TWO, layer, 2, seed=7) for layer in range(2)]
    first = [cache.update_and_fetch(0, *brought[0], [3, 4])]
    again = cache.update_and_fetch(0, *(row.clone() for row in brought[0]), [3, 4])
    first.append(cache.update_and_fetch(1, *brought[1], [3, 4]))
    assert cache.length == 5
    assert all(torch.equal(one, other) for one, other in zip(first[0], again, strict=True))
    for layer in (1, 0, 1):
        again = cache.update_and_fetch(layer, *brought[layer], [3, 4])
        assert all(torch.equal(one, other) for one, other in zip(first[layer], again, strict=True))
    assert cache.length == 5
    cache.rewind(4)  # no forward is open, and later changes stay
    keys, _, _ = cache.update_and_fetch(0, *rows(TWO, 0, 1, seed=8), [4])
    assert keys.shape[2] == 5


@pytest.mark.parametrize("kind", ["seq", "tree"])
def test_a_repeated_layer_with_other_rows_begins_another_forward(kind):
    cache = grown(make_cache(kind, TWO), 3)
    k, v = rows(TWO, 1, 1, seed=7)
    forward(cache, [3], seed=7)
    with pytest.raises(StatusError, match="sequence 0, got 3"):
        cache.update_and_fetch(1, k + 1, v, [3])
    assert cache.length == 4


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_repeated_forward_may_have_some_layers_with_the_same_rows(changed, finished):
    """If a forward is repeated with a change in one layer, layers before it have the same rows."""
    config = CacheConfig([LayerConfig(2, 4)] * 3, 16, k_format="f32", v_format="f32")
    cache = grown(make_cache("contiguous", config), 2)
    for layer in range(3 if finished else 2):
        cache.update_and_fetch(layer, *rows(config, layer, 1, seed=7), [2])
    if finished:
        cache.update_and_fetch(1, *rows(config, 1, 1, seed=7), [2])  # shared by another layer of the model
    for layer in range(3):
        cache.update_and_fetch(layer, *rows(config, layer, 1, seed=7 + (layer >= changed)), [2])
    assert cache.length == 3
    for layer in range(3):
        keys, values, _ = cache.update_and_fetch(layer, *rows(config, layer, 1, seed=9), [3])
        k, v = rows(config, layer, 1, seed=7 + (layer >= changed))
        assert torch.equal(keys[:, :, 2:3], k)
        assert torch.equal(values[:, :, 2:3], v)


def test_rows_that_the_host_overwrites_are_other_rows():
    cache = grown(make_cache("contiguous", TWO), 2)
    brought = [rows(TWO, layer, 1, seed=7) for layer in range(2)]
    for change in (0, 1):
        for layer, (k, v) in enumerate(brought):
            keys, _, _ = cache.update_and_fetch(layer, k.add_(change), v.add_(change), [2])
            assert torch.equal(keys[:, :, 2:], k)
    assert cache.length == 3


def test_a_refused_call_ends_the_forward():
    cache = grown(ContiguousCache(TWO), 2)
    cache.update_and_fetch(0, *rows(TWO, 0, 1), [2])
    assert_refused(
        cache, lambda: cache.update_and_fetch(2, *rows(TWO, 1, 1), [2]), Status.SHAPE, "layer from 0 to 1, got 2"
    )
    cache.rewind(1)  # no step is open
    with pytest.raises(StatusError, match=r"expected v of shape \[1, 2, 1, 6\] for layer 1, got \[1, 2, 1, 4\]"):
        cache.update_and_fetch(1, rows(TWO, 1, 1)[0], rows(TWO, 1, 1)[0], [1])
    assert cache.length == 1


def test_an_aborted_implicit_rewind_keeps_the_positions():
    cache = grown(ContiguousCache(TWO), 5)
    [(before, _, _), _] = forward(cache, [5], seed=5)
    cache.update_and_fetch(0, *rows(TWO, 0, 2, seed=9), [1, 2])
    cache.abort()
    [(after, _, _), _] = forward(cache, [6], seed=6)
    assert torch.equal(after[:, :, :6], before)


# ---- Several sequences, and trees ----------------------------------------


def test_a_declaration_holds_until_a_step_commits():
    cache = SeqCache(ONE)
    fork(cache)
    cache.begin_step([5])
    with pytest.raises(StatusError):
        forward(cache, [1])
    forward(cache, [2])
    with pytest.raises(StatusError, match="holds 2 sequences"):
        forward(cache, [3])
    cache.begin_step([0])
    cache.cancel_step()
    with pytest.raises(StatusError, match="holds 2 sequences"):
        forward(cache, [2])
    cache.seq_keep(5)
    forward(cache, [3])
    assert cache.seq_positions(5) == [range(0, 4)]


def test_windows_of_a_sequence_drop_nothing_before_its_tree_ends():
    cache = grown(TreeCache(SLIDING), 6)
    cache.seq_cp(0, 1)
    for at in range(6, 11):
        forward(cache, [at], owners=[[0]])
    cache.seq_cp(0, 1)
    assert (cache.seq_rewindable_to(0), cache.seq_rewindable_to(1)) == (7, 0)
    cache.propose([-1], 1)
    forward(cache, [11])
    assert cache.seq_rewindable_to(1) == 0
    cache.commit([], 1)
    assert cache.seq_rewindable_to(1) == 9


def test_values_that_are_not_finite_do_not_reach_others():
    for value, v_format, refused in (
        (torch.inf, "f32", True),
        (torch.nan, "affine8g32", True),
        (1e6, "f16", True),
        (1e6, "bf16", False),
        (1e6, "affine8g32", False),
    ):
        config = CacheConfig([LayerConfig(1, 32)], 8, k_format="f32", v_format=v_format)
        k, v = rows(config, 0, 1)
        v[0, 0, 0, 3] = value
        cache = SeqCache(config)
        if refused:
            call = partial(cache.update_and_fetch, 0, k, v, [0])
            assert_refused(cache, call, Status.INVALID_ARGUMENT, f"not finite as {v_format}")
        else:
            cache.update_and_fetch(0, k, v, [0])
        ContiguousCache(config).update_and_fetch(0, k, v, [0])


def test_all_elements_of_keys_with_values_are_finite():
    config = CacheConfig([LayerConfig(1, 32, 8, values_in_keys=True)], 8, k_format="f16")
    k, v = rows(config, 0, 1)
    v[...] = torch.nan
    SeqCache(config).update_and_fetch(0, k, v, [0])
    k[0, 0, 0, 31] = 1e6
    cache = SeqCache(config)
    assert_refused(cache, partial(cache.update_and_fetch, 0, k, v, [0]), Status.INVALID_ARGUMENT, "not finite as f16")


def test_a_tree_may_be_a_long_chain():
    cache = TreeCache(CacheConfig(ONE.layers, 2048, k_format="f32", v_format="f32"))
    cache.propose(range(-1, 1500))
    [(_, _, mask)] = forward(cache, range(1501))
    assert torch.equal(mask, torch.ones(1501, 1501, dtype=torch.bool).tril())


# ---- Changes of formats --------------------------------------------------


def test_conversion_by_hand_lasts_until_the_cache_is_cleared():
    config = CacheConfig([LayerConfig(1, 32, 16)], 40, k_format="f32", v_format="f32")
    cache = grown(ContiguousCache(config), 3)
    cache.convert("mxfp8", "nvfp4")
    [(k, v, _)] = forward(cache, [3], seed=3)
    raw = [torch.cat(pair, dim=2) for pair in zip(*(rows(config, 0, 1, seed=at) for at in range(4)), strict=True)]
    assert torch.equal(k, format_of("mxfp8").stored(raw[0]))
    assert torch.equal(v, format_of("nvfp4").stored(raw[1]))
    cache.clear()
    assert cache.formats == ("f32", "f32")


def test_rows_that_have_a_format_are_not_converted_to_it():
    config = CacheConfig([LayerConfig(1, 32)], 40, k_format="affine8", v_format="f32")
    cache = grown(ContiguousCache(config), 3)
    cache.convert("affine8g32", "f16")
    [(k, _, _)] = forward(cache, [3], seed=3)
    stored = format_of("affine8").stored(torch.cat([rows(config, 0, 1, seed=at)[0] for at in range(4)], dim=2))
    assert torch.equal(k, stored)
    assert not torch.equal(stored, format_of("affine8").stored(stored)), "quantizing twice changes these"
