"""The op: tracing, the choice of the cache, refusals, and ExecuTorch's op of the same name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensorMode

import step_programs
from etkv import op
from etkv.config import CacheConfig, LayerConfig
from etkv.errors import EtkvError, Status, StatusError
from etkv.reference import ContiguousCache, NoActiveCacheError

CONFIG = CacheConfig([LayerConfig(2, 8), LayerConfig(1, 4, 6)], 16, k_format="f32", v_format="f32")


def inputs(layer: int, n_tokens: int, n_heads: int = 4, dtype: torch.dtype = torch.float32):
    random = torch.Generator().manual_seed(layer)
    facts = CONFIG.layers[layer]
    shapes = ((n_heads, facts.k_head_dim), (facts.n_kv_heads, facts.k_head_dim), (facts.n_kv_heads, facts.value_dim))
    return [torch.randn(1, heads, n_tokens, dim, generator=random).to(dtype) for heads, dim in shapes]


def forward(positions, dtype=torch.float32, out_dtype=torch.float32):
    position = torch.as_tensor(positions)
    return [
        op.update_and_attend(*inputs(layer, len(position), dtype=dtype), position, layer, 0.5, out_dtype)
        for layer in range(2)
    ]


def causal(layer: int, n_tokens: int) -> torch.Tensor:
    q, k, v = inputs(layer, n_tokens)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)


def test_results_are_attention():
    with op.active(ContiguousCache(CONFIG)):
        for layer, found in enumerate(forward(range(5))):
            torch.testing.assert_close(found, causal(layer, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_have_the_dtype_that_was_asked_for(dtype, out_dtype):
    with op.active(ContiguousCache(CONFIG)):
        for layer, found in enumerate(forward(range(5), dtype, out_dtype)):
            assert found.dtype == out_dtype
            torch.testing.assert_close(found.float(), causal(layer, 5), rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("components", [None, 1, 3])
def test_positions_have_one_or_more_components(dtype, components):
    position = torch.arange(5, dtype=dtype)
    if components is not None:
        # The cache ignores the components after the first.
        others = torch.full((5, components - 1), 77, dtype=dtype)
        position = torch.cat([position.unsqueeze(1), others], dim=1)
    with op.active(ContiguousCache(CONFIG)):
        for layer, found in enumerate(forward(position)):
            torch.testing.assert_close(found, causal(layer, 5))


@pytest.mark.parametrize("position", [(3,), (3, 1), (3, 4)])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_tracing_needs_no_cache(position, out_dtype):
    with FakeTensorMode():
        q, k, v = torch.empty(1, 6, 3, 8), torch.empty(1, 2, 3, 8), torch.empty(1, 2, 3, 5)
        found = op.update_and_attend(q, k, v, torch.empty(position, dtype=torch.int64), 3, 0.5, out_dtype)
    assert (tuple(found.shape), found.dtype) == ((1, 6, 3, 5), out_dtype)


def test_tracing_does_not_change_the_active_cache():
    class Layers(torch.nn.Module):
        def forward(self, position):
            return forward(position)

    cache = ContiguousCache(CONFIG)
    with op.active(cache):
        exported = torch.export.export(Layers(), (torch.arange(5),))
        assert cache.length == 0
        for layer, found in enumerate(exported.module()(torch.arange(5))):
            torch.testing.assert_close(found, causal(layer, 5))
        assert cache.length == 5


def test_torchs_checks_of_the_op_pass():
    """torch checks schema, autograd registration and fake kernel."""
    with op.active(ContiguousCache(CacheConfig(CONFIG.layers[:1], 16, k_format="f32", v_format="f32"))):
        arguments = (*inputs(0, 3), torch.arange(3), 0, 0.5, torch.float16)
        torch.library.opcheck(torch.ops.kvcache.update_and_attend.default, arguments)


# ---- The choice of the cache ---------------------------------------------


def test_without_a_cache():
    with pytest.raises(NoActiveCacheError, match=r"within `with etkv\.op\.active\(cache\):`") as caught:
        forward([0])
    assert caught.value.status == Status.NO_CACHE
    assert isinstance(caught.value, EtkvError) and isinstance(caught.value, RuntimeError)


def test_the_innermost_cache_counts():
    outer, inner = ContiguousCache(CONFIG), ContiguousCache(CONFIG)
    with op.active(outer):
        forward([0])
        with op.active(inner):
            forward([0, 1])
        forward([1])
        with pytest.raises(KeyError), op.active(inner):
            raise KeyError
        forward([2])
    assert (outer.length, inner.length) == (3, 2)
    with pytest.raises(NoActiveCacheError):
        forward([3])


def test_a_forward_that_ends_with_its_block_is_rolled_back():
    cache = ContiguousCache(CONFIG)
    with op.active(cache):
        forward([0])
        op.update_and_attend(*inputs(0, 1), torch.tensor([1]), 0, 0.5, torch.float32)
        with op.active(cache):
            pass  # the outer block is still open
        op.update_and_attend(*inputs(1, 1), torch.tensor([1]), 1, 0.5, torch.float32)
        assert cache.length == 2
        op.update_and_attend(*inputs(0, 1), torch.tensor([2]), 0, 0.5, torch.float32)
        with pytest.raises(StatusError, match="in the middle of a step"):
            cache.clear()
    cache.clear()


def test_each_thread_has_its_own():
    barrier, n_threads = Barrier(4), 4

    def work(number):
        cache = ContiguousCache(CONFIG)
        with pytest.raises(NoActiveCacheError):
            forward([0])
        with op.active(cache):
            for at in range(number + 3):
                if at < 3:
                    barrier.wait(60)
                forward([at])
        return cache.length

    with op.active(ContiguousCache(CONFIG)), ThreadPoolExecutor(n_threads) as threads:
        assert list(threads.map(work, range(n_threads))) == [3, 4, 5, 6]


def test_each_task_has_its_own():
    async def work(n):
        cache = ContiguousCache(CONFIG)
        with op.active(cache):
            for at in range(n):
                forward([at])
                await asyncio.sleep(0)
        return cache.length

    async def together():
        return await asyncio.gather(work(2), work(5))

    assert asyncio.run(together()) == [2, 5]


# ---- Refusals ------------------------------------------------------------

BAD = {
    "q of 3 dimensions": ({"q": torch.zeros(4, 2, 8)}, Status.SHAPE, r"expected q of shape .*, got \[4, 2, 8\]"),
    "a batch of 2": (
        {name: torch.zeros(2, 2, 2, 8) for name in "qkv"},
        Status.SHAPE,
        r"q of shape .*, got \[2, 2, 2, 8\]",
    ),
    "heads": (
        {"q": torch.zeros(1, 3, 2, 8)},
        Status.SHAPE,
        r"q of shape \[1, 2 or a multiple, 2, 8\] for layer 0, got \[1, 3, 2, 8\]",
    ),
    "no query heads": ({"q": torch.zeros(1, 0, 2, 8)}, Status.SHAPE, r"expected q of shape .*, got \[1, 0, 2, 8\]"),
    "v of other heads": ({"v": torch.zeros(1, 4, 2, 8)}, Status.SHAPE, r"expected v of shape .*, got \[1, 4, 2, 8\]"),
    "KV heads": (
        {"k": torch.zeros(1, 4, 2, 8), "v": torch.zeros(1, 4, 2, 8)},
        Status.SHAPE,
        r"expected k of shape \[1, 2, 2, 8\] for layer 0, got \[1, 4, 2, 8\]",
    ),
    "no heads": (
        {"k": torch.zeros(1, 0, 2, 8), "v": torch.zeros(1, 0, 2, 8)},
        Status.SHAPE,
        r"k of shape .*, got \[1, 0, 2, 8\]",
    ),
    "q of another head_dim": ({"q": torch.zeros(1, 4, 2, 16)}, Status.SHAPE, r"q of shape .*, got \[1, 4, 2, 16\]"),
    "v_head_dim": ({"v": torch.zeros(1, 2, 2, 4)}, Status.SHAPE, r"v of shape .*, got \[1, 2, 2, 4\]"),
    "tokens": ({"k": torch.zeros(1, 2, 3, 8)}, Status.SHAPE, r"k of shape .*, got \[1, 2, 3, 8\]"),
    "too few positions": (
        {"position": torch.tensor([2])},
        Status.SHAPE,
        "expected a position for each of 2 queries, got 1",
    ),
    "positions in a cube": (
        {"position": torch.zeros(2, 1, 1).long()},
        Status.SHAPE,
        r"shape \[2, 1, 1\], expected \[q_len",
    ),
    "no components": ({"position": torch.zeros(2, 0).long()}, Status.SHAPE, r"position has shape \[2, 0\]"),
    "float positions": ({"position": torch.tensor([2.0, 3.0])}, Status.DTYPE, "position is float32, expected int32 or"),
    "a gap": (
        {"position": torch.tensor([3, 4])},
        Status.POSITION,
        "begins at position 3; expected 0 to 2, the next position",
    ),
    "double queries": (
        {"q": torch.zeros(1, 4, 2, 8).double()},
        Status.DTYPE,
        "expected q in float32, float16 or bfloat16, got torch.float64",
    ),
    "integer values": (
        {"v": torch.zeros(1, 2, 2, 8).int()},
        Status.DTYPE,
        "expected v in float32, .*, got torch.int32",
    ),
    "an integer result": ({"out_dtype": torch.int8}, Status.DTYPE, "expected out_dtype in float32, .*, got torch.int8"),
    "a layer too many": ({"layer_id": 2}, Status.SHAPE, "expected a layer from 0 to 1, got 2"),
    "a layer before the first": ({"layer_id": -1}, Status.SHAPE, "expected a layer from 0 to 1, got -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_refusal_changes_nothing(name):
    changes, status, words = BAD[name]
    cache = ContiguousCache(CONFIG)
    with op.active(cache):
        forward([0, 1])
        before = step_programs.answers(cache)
        q, k, v = inputs(0, 2)
        good = {"q": q, "k": k, "v": v, "position": torch.tensor([2, 3]), "layer_id": 0, "scale": 0.5}
        with pytest.raises(StatusError, match=words) as caught:
            op.update_and_attend(**{**good, "out_dtype": torch.float32, **changes})
        assert caught.value.status == status
        assert step_programs.answers(cache) == before
        cache.rewind(2)  # no step is open
        # The next step has the same result as without the refusal.
        for layer, found in enumerate(forward([2, 3, 4])):
            q, k, v = inputs(layer, 3)
            history = inputs(layer, 2)
            mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
            keys, values = torch.cat([history[1], k], dim=2), torch.cat([history[2], v], dim=2)
            expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.5, enable_gqa=True)
            torch.testing.assert_close(found, expected)


# ---- ExecuTorch's --------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("words", ["ours trace check theirs trace check lower", "theirs trace ours trace check lower"])
def test_import_orders(words):
    """Each order runs in its own process. If ExecuTorch's op comes later, it replaces the traced op."""
    script = Path(__file__).with_name("op_orders.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(script), *words.split()], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["done"]), ran.stderr
