"""The ops of recurrent layers, the overload with sinks, and the state that they run on in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensorMode

from etkv import op, recurrent_op
from etkv.config import CacheConfig, LayerConfig
from etkv.errors import PositionError, Status, StatusError, StepError
from etkv.reference import ContiguousCache, NoActiveCacheError, RecurrentState
from etkv.reference.recurrence import convolve, scan

T, K_HEADS, HEADS, K_DIM, V_DIM, CHANNELS, WIDTH = 9, 2, 4, 8, 6, 10, 4


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def recurrence(decay: str = "head", delta: bool = True, n: int = T):
    g = numbers(1, HEADS, n, K_DIM) if decay == "channel" else numbers(1, HEADS, n)
    k = F.normalize(numbers(1, K_HEADS, n, K_DIM, seed=1), dim=-1)
    beta = numbers(1, HEADS, n, seed=2).sigmoid() if delta else None
    return [numbers(1, K_HEADS, n, K_DIM), k, numbers(1, HEADS, n, V_DIM), -g.abs(), beta]


def part(tensors, begin: int, end: int):
    return [None if tensor is None else tensor[:, :, begin:end] for tensor in tensors]


def run(inputs, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a forward of a convolution and a recurrence on the tokens ``begin`` to ``end`` of ``inputs``."""
    at = torch.arange(begin, end)
    x, weight, bias, *others = inputs
    return (
        recurrent_op.update_and_convolve(x[:, :, begin:end], weight, bias, at, 0, "silu", torch.float32),
        recurrent_op.update_and_scan(*part(others, begin, end), at, 1, 0.5, torch.float32),
    )


@pytest.fixture
def inputs():
    return [numbers(1, CHANNELS, T), numbers(CHANNELS, WIDTH), numbers(CHANNELS), *recurrence()]


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_convolution_is_that_of_torch(activation, with_bias):
    x, weight, bias = numbers(1, CHANNELS, T), numbers(CHANNELS, WIDTH), numbers(CHANNELS) if with_bias else None
    expected = F.conv1d(F.pad(x, (WIDTH - 1, 0)), weight.unsqueeze(1), bias, groups=CHANNELS)
    expected = F.silu(expected) if activation == "silu" else expected
    torch.testing.assert_close(convolve(x, weight, bias, activation), expected)


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("delta", [True, False])
def test_a_recurrence_is_its_unrolled_sum(decay, delta):
    q, k, v, g, beta = (None if x is None else x.double() for x in recurrence(decay, delta))
    found = scan(q, k, v, g, beta, 0.5)
    share = HEADS // K_HEADS
    for head in range(HEADS):
        sums = g[0, head].cumsum(0)
        sums = sums if decay == "channel" else sums[:, None].expand(T, K_DIM)
        keys, queries, written = k[0, head // share], q[0, head // share], []
        for t in range(T):
            # The sum over earlier rows i of (k_t exp(G_t - G_i) k_i) u_i.
            def read(row, until, t=t, sums=sums, keys=keys, written=written):
                terms = ((row * (sums[t] - sums[i]).exp() * keys[i]).sum() * written[i] for i in range(until))
                return sum(terms, torch.zeros(V_DIM, dtype=torch.float64))

            u = v[0, head, t]
            written.append(beta[0, head, t] * (u - read(keys[t], t)) if delta else u)
            expected = 0.5 * read(queries[t], t + 1)
            torch.testing.assert_close(found[0, head, t], expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ends", [[9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 5, 9], [2, 8, 9]])
def test_steps_do_not_matter(inputs, ends):
    with op.active(None, RecurrentState(2)):
        made = [run(inputs, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    x, weight, bias, *others = inputs
    convolved, scanned = (torch.cat(outputs, dim=2) for outputs in zip(*made, strict=True))
    assert torch.equal(convolved, convolve(x, weight, bias, "silu"))
    assert torch.equal(scanned, scan(*others, 0.5))


def test_rewinds_and_forks(inputs):
    state = RecurrentState(2)
    with op.active(None, state):
        whole = run(inputs, 0, T)
        state.rewind(4)
        torch.testing.assert_close(run(inputs, 4, T), tuple(made[:, :, 4:] for made in whole))
        # A step that begins below the length rewinds automatically.
        torch.testing.assert_close(run(inputs, 2, 5), tuple(made[:, :, 2:5] for made in whole))
        state.fork(0, 7)
        state.begin_step([7, 0, 7, 0])
        at = torch.tensor([5, 5, 6, 6])
        x, weight, bias, *others = inputs
        both = [None if tensor is None else tensor[:, :, at] for tensor in (x, *others)]
        made = (
            recurrent_op.update_and_convolve(both[0], weight, bias, at, 0, "silu", torch.float32),
            recurrent_op.update_and_scan(*both[1:], at, 1, 0.5, torch.float32),
        )
        torch.testing.assert_close(made, tuple(rows[:, :, at] for rows in whole))
    assert (state.length(), state.length(7)) == (7, 7)


def test_a_forward_that_ends_with_its_block_is_rolled_back(inputs):
    state = RecurrentState(2)
    with op.active(None, state):
        run(inputs, 0, 3)
        x, weight, bias, *_ = inputs
        recurrent_op.update_and_convolve(x[:, :, 3:5], weight, bias, torch.tensor([3, 4]), 0, "silu", torch.float32)
        with pytest.raises(StepError, match="in the middle of a step"):
            state.rewind(1)
    state.rewind(2)
    with pytest.raises(NoActiveCacheError):
        run(inputs, 2, 3)


BAD = {
    "a gap": ({"position": torch.tensor([4])}, Status.POSITION, "expected position 3 for sequence 0, got 4"),
    "too many positions": (
        {"position": torch.tensor([3, 4])},
        Status.SHAPE,
        "expected a position for each of 1 queries, got 2",
    ),
    "heads": ({"v": torch.zeros(1, 3, 1, V_DIM)}, Status.SHAPE, r"for H a multiple of Hk, got .* \[1, 3, 1, 6\]"),
    "a decay of values": ({"g": torch.zeros(1, HEADS, 1, V_DIM)}, Status.SHAPE, r"g of \[1, H, T\] or"),
    "a layer too many": ({"layer_id": 2}, Status.SHAPE, "expected a layer from 0 to 1, got 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_changes_nothing(inputs, name):
    changes, status, words = BAD[name]
    state = RecurrentState(2)
    with op.active(None, state):
        run(inputs, 0, 3)
        names = ("q", "k", "v", "g", "beta")
        good = dict(zip(names, part(inputs[3:], 3, 4), strict=True))
        good |= {"position": torch.tensor([3]), "layer_id": 1, "scale": 0.5, "out_dtype": torch.float32}
        with pytest.raises(StatusError, match=words) as caught:
            recurrent_op.update_and_scan(**{**good, **changes})
        assert caught.value.status == status
        assert isinstance(caught.value, PositionError) == (status == Status.POSITION)
        state.rewind(3)
        run(inputs, 3, T)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_tracing_needs_no_state(inputs, out_dtype):
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, weight, bias, *others = inputs
        at = torch.empty(T, dtype=torch.int64)
        convolved = recurrent_op.update_and_convolve(x, weight, bias, at, 3, "none", out_dtype)
        scanned = recurrent_op.update_and_scan(*others, at, 4, 0.5, out_dtype)
    assert (tuple(convolved.shape), convolved.dtype) == ((1, CHANNELS, T), out_dtype)
    assert (tuple(scanned.shape), scanned.dtype) == ((1, HEADS, T, V_DIM), out_dtype)


def test_the_dispatcher_has_no_complaint(inputs):
    """torch checks schemas, autograd registration and fake kernels."""
    x, weight, bias, *others = inputs
    with op.active(None, RecurrentState(1)):
        arguments = (x, weight, bias, torch.arange(T), 0, "silu", torch.float16)
        torch.library.opcheck(torch.ops.kvcache.update_and_convolve.default, arguments)
        arguments = (*others, torch.arange(T), 0, 0.5, torch.float16)
        torch.library.opcheck(torch.ops.kvcache.update_and_scan.default, arguments)


# ---- Sinks and softcap ---------------------------------------------------

CONFIG = CacheConfig([LayerConfig(2, 8)], 16, k_format="f32", v_format="f32")


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention_with_sinks_and_a_softcap(sinks, softcap):
    q, k, v = numbers(1, 4, 5, 8), numbers(1, 2, 5, 8, seed=1), numbers(1, 2, 5, 8, seed=2)
    with op.active(ContiguousCache(CONFIG)):
        made = [
            op.update_and_attend(*part((q, k, v), begin, end), at, 0, 0.5, torch.float32, sinks, softcap)
            for begin, end, at in ((0, 3, torch.arange(3)), (3, 5, torch.arange(3, 5)))
        ]
    keys, values = (rows.repeat_interleave(2, dim=1) for rows in (k, v))
    scores = q @ keys.transpose(-1, -2) * 0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.reshape(1, 4, 1, 1).exp())
    torch.testing.assert_close(torch.cat(made, dim=2), weights / total @ values, rtol=1e-4, atol=1e-5)


def test_the_overload_in_a_graph():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, sinks, position):
            return op.update_and_attend(q, k, v, position, 0, 0.5, torch.float32, sinks, 2.0)

    inputs = (numbers(1, 4, 3, 8), *(numbers(1, 2, 3, 8) for _ in range(2)), numbers(4), torch.arange(3))
    exported = torch.export.export(Layer(), inputs)
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.kvcache.update_and_attend.sinks]
    with op.active(ContiguousCache(CONFIG)):
        found = exported.module()(*inputs)
    with op.active(ContiguousCache(CONFIG)):
        torch.testing.assert_close(found, Layer()(*inputs))
        torch.library.opcheck(
            torch.ops.kvcache.update_and_attend.sinks, (*inputs[:3], inputs[4], 0, 0.5, torch.float16, inputs[3], 2.0)
        )


def test_sinks_of_other_heads_are_refused():
    with op.active(ContiguousCache(CONFIG)), pytest.raises(StatusError, match=r"sinks of shape \[4\], got \[3\]"):
        op.update_and_attend(
            numbers(1, 4, 3, 8),
            numbers(1, 2, 3, 8),
            numbers(1, 2, 3, 8),
            torch.arange(3),
            0,
            0.5,
            torch.float32,
            numbers(3),
        )
