"""What the reference caches refuse, in words; forwards that come to nothing; formats that change on the way."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import step_programs
from etkv.config import CacheConfig, LayerConfig
from etkv.errors import EtkvError, Status, StatusError
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


def forward(cache, positions, seed=0):
    positions = list(positions)
    return [
        cache.update_and_fetch(layer, *rows(cache.config, layer, len(positions), seed), positions)
        for layer in range(len(cache.config.layers))
    ]


def grown(cache, length):
    for at in range(length):
        forward(cache, [at], seed=at)
    return cache


def assert_refused(cache, call, status, words):
    """The call is refused with these words, and the cache says and gives what it did."""
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
        ({"capacity": 0}, "capacity is 0, the least is 1"),
        ({"capacity": 2**31}, "capacity is 2147483648, the most is 2147483647"),
        ({"max_step_tokens": -1}, "max_step_tokens is -1, the least is 0"),
        ({"quantized_kv_start": -1}, "quantized_kv_start is -1, the least is 0"),
        ({"growth": "slow"}, "unknown growth 'slow'; available: doubling, step, exact, upfront"),
        ({"growth": "exact", "min_chunk": 4}, "expected min_chunk 0 for growth 'exact', got 4"),
        ({"k_format": "f64"}, "k_format: unknown storage format `f64`"),
        (
            {"k_format": "affine4"},
            "layer 0: keys: affine4g32 takes a head_dim that is a multiple of 32, got head_dim 8",
        ),
        ({"v_format": "affine7g32"}, "v_format: unknown storage format `affine7g32`"),
        ({"quantized_kv_start": 3, "float_format": "mxfp8"}, "expected float_format f32, f16 or bf16, got mxfp8"),
        ({"layers": [LayerConfig(0, 8)]}, "layer 0: n_kv_heads is 0, the least is 1"),
        ({"layers": [LayerConfig(1, 8), LayerConfig(1, 8, 0)]}, "layer 1: v_head_dim is 0, the least is 1"),
        ({"layers": [LayerConfig(1, 8, window=-1)]}, "layer 0: window is -1, the least is 0"),
        ({"layers": [LayerConfig(1, 8, sinks=2)]}, "layer 0: expected sinks 0 for a layer without a window, got 2"),
    ],
)
@pytest.mark.parametrize("kind", ["contiguous", "tree"])
def test_invalid_configs_are_refused(kind, change, words):
    config = CacheConfig(**{"layers": ONE.layers, "capacity": 16, **change})
    with pytest.raises(StatusError, match=words) as caught:
        make_cache(kind, config)
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


def test_there_are_three_kinds():
    with pytest.raises(StatusError, match="unknown cache kind 'ring'; available: contiguous, seq, tree"):
        make_cache("ring", ONE)


# ---- Forwards ------------------------------------------------------------


def test_a_forward_is_done_when_every_layer_was_called():
    cache = ContiguousCache(TWO)
    cache.update_and_fetch(1, *rows(TWO, 1, 3), [0, 1, 2])
    assert cache.length == 0
    assert_refused(cache, cache.clear, Status.STEP, "cannot clear the cache in the middle of a step")
    assert_refused(cache, lambda: cache.rewind(0), Status.STEP, "in the middle of a step")
    assert_refused(cache, lambda: cache.convert("f16", "f16"), Status.STEP, "in the middle of a step")
    cache.update_and_fetch(0, *rows(TWO, 0, 3), [0, 1, 2])
    assert cache.length == 3


def test_a_forward_that_begins_anew_forgets_what_was_not_finished():
    cache = grown(ContiguousCache(TWO), 2)
    k, v = rows(TWO, 0, 1, seed=7)
    cache.update_and_fetch(0, k, v, [2])
    cache.update_and_fetch(0, -k, -v, [2])  # the same layer again
    cache.update_and_fetch(1, *rows(TWO, 1, 1), [2])
    keys, _, _ = cache.update_and_fetch(0, k, v, [3])
    assert torch.equal(keys[:, :, 2], -k[:, :, 0])
    cache.update_and_fetch(1, *rows(TWO, 1, 1), [0])  # another position: a rewind that never ends
    cache.abort()
    assert cache.length == 3


@pytest.mark.parametrize("kind", ["contiguous", "seq", "tree"])
def test_a_layer_that_comes_again_with_its_rows_only_attends(kind):
    """Before and after the last layer's first call, with queries of its own; nothing is written twice."""
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
    cache.rewind(4)  # no forward is under way, and what was changed since is not forgotten
    keys, _, _ = cache.update_and_fetch(0, *rows(TWO, 0, 1, seed=8), [4])
    assert keys.shape[2] == 5


@pytest.mark.parametrize("kind", ["seq", "tree"])
def test_a_layer_that_comes_again_with_other_rows_is_of_another_forward(kind):
    cache = grown(make_cache(kind, TWO), 3)
    k, v = rows(TWO, 1, 1, seed=7)
    forward(cache, [3], seed=7)
    with pytest.raises(StatusError, match="sequence 0, got 3"):
        cache.update_and_fetch(1, k + 1, v, [3])
    assert cache.length == 4


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_forward_is_done_again_although_some_layers_bring_the_same(changed, finished):
    """Of a forward that is done again with a change in one layer, those before it bring what they had brought."""
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


def test_rows_that_the_host_writes_over_are_other_rows():
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
    with pytest.raises(StatusError, match=r"expected values of shape \[1, 2, 1, 6\] for layer 1, got \[1, 2, 1, 4\]"):
        cache.update_and_fetch(1, rows(TWO, 1, 1)[0], rows(TWO, 1, 1)[0], [1])
    assert cache.length == 1


def test_an_implicit_rewind_that_is_given_up_keeps_what_was_there():
    cache = grown(ContiguousCache(TWO), 5)
    [(before, _, _), _] = forward(cache, [5], seed=5)
    cache.update_and_fetch(0, *rows(TWO, 0, 2, seed=9), [1, 2])
    cache.abort()
    [(after, _, _), _] = forward(cache, [6], seed=6)
    assert torch.equal(after[:, :, :6], before)


@pytest.mark.parametrize(
    ("positions", "status", "words"),
    [
        ([], Status.INVALID_ARGUMENT, "at least 1 token"),
        ([-1], Status.POSITION, "position -1 is negative"),
        ([5], Status.POSITION, "position 5 leaves a gap: the next is 4"),
        ([4, 6], Status.POSITION, "expected position 5 for token 1 of the step, got 6"),
        ([4, 3], Status.POSITION, "expected position 5 for token 1 of the step, got 3"),
        (range(4, 17), Status.CAPACITY, "13 tokens from position 4 on need 17 positions, the capacity is 16"),
    ],
)
def test_invalid_positions_are_refused(positions, status, words):
    cache = grown(ContiguousCache(ONE), 4)
    assert_refused(cache, lambda: forward(cache, positions), status, words)


# ---- Windows -------------------------------------------------------------


def test_a_rewind_to_dropped_positions_is_refused():
    cache = grown(ContiguousCache(SLIDING), 40)
    least = cache.rewindable_to()
    assert 30 < least <= 38, "a step of max_step_tokens can always be rolled back"
    words = f"cannot rewind to length {least - 1}: .* rewind to 0, or to {least} or more"
    assert_refused(cache, lambda: cache.rewind(least - 1), Status.POSITION, words)
    assert_refused(cache, lambda: forward(cache, [least - 1]), Status.POSITION, words)
    assert_refused(
        cache, lambda: forward(cache, range(40, 43)), Status.CAPACITY, "3 tokens: .* at most max_step_tokens, 2"
    )
    cache.rewind(least)
    forward(cache, [0])
    assert (cache.length, cache.rewindable_to()) == (1, 0)


def test_windows_drop_what_a_native_cache_drops():
    """Its window layer has 10 slots: a sink, the 3 positions before a query, two steps of 2, and room for another. With
    more than 8 in use, what is left is the sink and the last 5, the first of which a query has to be 3 ahead of."""
    cache, found = ContiguousCache(SLIDING), []
    for at in range(20):
        forward(cache, [at])
        found.append(cache.rewindable_to())
    assert found == [0] * 8 + [7] * 3 + [10] * 3 + [13] * 3 + [16] * 3


def test_forks_of_what_windows_dropped_go_on_where_they_can():
    cache = grown(SeqCache(SLIDING), 40)
    least = cache.seq_rewindable_to(0)
    words = "sequence 1 would go on at 20, but the window layers have dropped .*; it can go on at 23 or later"
    assert_refused(cache, lambda: cache.seq_cp(0, 1, 0, 20), Status.POSITION, words)
    words = f"sequence 0 would go on at 20, .* it can go on at {least} or later"
    assert_refused(cache, lambda: cache.seq_rm(0, 20), Status.POSITION, words)
    cache.seq_cp(0, 1)
    assert (cache.length, cache.seq_next(1), cache.seq_rewindable_to(1)) == (40, 40, least)


# ---- Several sequences ---------------------------------------------------


def test_whose_tokens_a_step_has_must_be_said_where_it_is_not_plain():
    cache = SeqCache(ONE)
    forward(cache, [0, 1])
    cache.seq_cp(0, 5)
    assert_refused(cache, lambda: forward(cache, [2]), Status.INVALID_ARGUMENT, "holds 2 sequences")
    assert_refused(cache, lambda: cache.rewind(1), Status.INVALID_ARGUMENT, "holds 2 sequences")
    cache.begin_step([5])
    assert_refused(
        cache,
        lambda: forward(cache, [1]),
        Status.POSITION,
        "expected position 2 for token 0 of the step, the next of sequence 5",
    )
    assert_refused(
        cache, lambda: forward(cache, [2, 3]), Status.INVALID_ARGUMENT, "2 tokens, but begin_step declared 1"
    )
    forward(cache, [2])  # what was said holds until a step has worked
    assert_refused(cache, lambda: forward(cache, [3]), Status.INVALID_ARGUMENT, "holds 2 sequences")


def test_what_was_removed_is_not_gone_back_to():
    cache = SeqCache(ONE)
    forward(cache, range(8))
    cache.seq_rm(0, 2, 5)
    assert (cache.seq_len(0), cache.seq_next(0), cache.seq_positions(0)) == (5, 8, [range(0, 2), range(5, 8)])
    words = "position 3 was removed; 0 is the least length, and 0 removes all"
    assert_refused(cache, lambda: cache.rewind(4), Status.POSITION, words)
    cache.seq_rm(0, 0, 2)
    assert cache.seq_rewindable_to(0) == 6
    cache.seq_rm(0)
    assert cache.seq_next(0) == 0


def test_a_copy_does_not_write_over_other_tokens():
    cache = SeqCache(ONE)
    cache.begin_step([0, 0, 1])
    forward(cache, [0, 1, 0])
    words = "sequences 0 and 1 hold different tokens at position 0; remove it from sequence 1 first"
    assert_refused(cache, lambda: cache.seq_cp(0, 1), Status.POSITION, words)
    cache.seq_cp(0, 1, 1)
    assert cache.seq_positions(1) == [range(0, 2)]


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


# ---- Trees ---------------------------------------------------------------


def test_frontiers_in_turn():
    cache = TreeCache(ONE)
    forward(cache, [0, 1])
    cache.propose([-1, 0, -1])
    assert_refused(cache, lambda: cache.propose([2]), Status.STEP, "the last frontier, of 3 nodes, has not run")
    assert_refused(cache, lambda: cache.commit([0]), Status.INVALID_ARGUMENT, "0 nodes of the tree have run")
    assert_refused(
        cache,
        lambda: forward(cache, [2, 3, 3]),
        Status.POSITION,
        "expected position 2 for token 2 of the step, .* got 3",
    )
    cache.begin_step([0, 0])
    assert_refused(
        cache,
        lambda: forward(cache, [2, 3]),
        Status.INVALID_ARGUMENT,
        "expected all 3 candidates of sequence 0 in the step, got 2",
    )
    cache.begin_step([0, 0, 0])
    [(_, _, mask)] = forward(cache, [2, 3, 2])
    assert mask.tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, False, False, True],
    ]
    assert_refused(cache, lambda: forward(cache, [2]), Status.STEP, "carries a tree of 3 nodes, 0 of them for this")
    assert_refused(cache, lambda: cache.seq_rm(0, 1), Status.STEP, "commit it before you remove a part of it")
    cache.propose([2, 1])
    [(_, _, mask)] = forward(cache, [3, 4])
    assert mask.tolist() == [[True, True, False, False, True, True, False], [True] * 4 + [False, False, True]]
    assert_refused(cache, lambda: cache.commit([0, 2]), Status.INVALID_ARGUMENT, "node 2 .* after 0, .* parent is -1")
    cache.commit([0, 1, 4])
    assert (cache.seq_next(0), cache.length, cache.tree_len()) == (5, 5, 0)
    assert_refused(cache, lambda: cache.commit([]), Status.INVALID_ARGUMENT, "carries no tree")


def test_frontiers_share_the_room_that_there_is():
    cache = TreeCache(CacheConfig(ONE.layers, 4, k_format="f32", v_format="f32"))
    cache.propose([-1, -1], 3)
    words = "3 nodes does not fit: 4 of 4 cells are free, 2 of them for other frontiers"
    assert_refused(cache, lambda: cache.propose([-1, -1, -1], 9), Status.CAPACITY, words)
    cache.commit([], 3)
    cache.propose([-1, -1, -1], 9)
    assert cache.sequences() == [9]


# ---- Formats on the way --------------------------------------------------


def test_rows_are_quantized_once_there_are_so_many():
    config = CacheConfig(
        [LayerConfig(1, 32)],
        40,
        k_format="mxfp4",
        v_format="affine2g32",
        max_step_tokens=3,
        quantized_kv_start=6,
        float_format="f32",
    )
    cache = TreeCache(config)
    written = [rows(config, 0, 1, seed=at) for at in range(8)]
    for at in range(5):
        cache.update_and_fetch(0, *written[at], [at])
    cache.propose([-1, -1])
    k, v = (torch.cat(pair, dim=2) for pair in zip(written[5], written[5], strict=True))
    cache.update_and_fetch(0, k, v, [5, 5])
    assert cache.formats == ("f32", "f32"), "candidates do not count"
    cache.commit([1])
    assert cache.formats == ("mxfp4", "affine2g32")
    k, v, _ = cache.update_and_fetch(0, *written[6], [6])
    for found, name, which in ((k, "mxfp4", 0), (v, "affine2g32", 1)):
        raw = torch.cat([pair[which] for pair in written[:7]], dim=2)
        assert torch.equal(found, format_of(name).stored(raw))
    cache.clear()
    assert cache.formats == ("f32", "f32")


def test_a_step_brings_no_more_floats_than_were_reckoned_with():
    config = CacheConfig(
        [LayerConfig(1, 32)], 40, k_format="mxfp8", v_format="mxfp8", max_step_tokens=3, quantized_kv_start=6
    )
    cache = grown(ContiguousCache(config), 5)
    words = "9 positions in f16, the most is 8: quantized_kv_start - 1, and max_step_tokens 3; take smaller steps"
    assert_refused(cache, lambda: forward(cache, range(5, 9)), Status.CAPACITY, words)
    forward(cache, range(5, 8))
    assert cache.formats == ("mxfp8", "mxfp8")
    forward(cache, range(8, 20))


def test_conversion_by_hand_lasts_until_the_cache_is_cleared():
    config = CacheConfig([LayerConfig(1, 32, 16)], 40, k_format="f32", v_format="f32")
    cache = grown(ContiguousCache(config), 3)
    words = "layer 0: values: mxfp8 takes a head_dim that is a multiple of 32, got head_dim 16"
    assert_refused(cache, lambda: cache.convert("mxfp8", "mxfp8"), Status.INVALID_ARGUMENT, words)
    cache.convert("mxfp8", "nvfp4")
    [(k, v, _)] = forward(cache, [3], seed=3)
    raw = [torch.cat(pair, dim=2) for pair in zip(*(rows(config, 0, 1, seed=at) for at in range(4)), strict=True)]
    assert torch.equal(k, format_of("mxfp8").stored(raw[0]))
    assert torch.equal(v, format_of("nvfp4").stored(raw[1]))
    cache.clear()
    assert cache.formats == ("f32", "f32")
