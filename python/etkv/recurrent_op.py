"""The ops by which recurrent layers use their cache: ``kvcache::update_and_convolve`` and
``kvcache::update_and_scan``.

They correspond to ``kvcache::update_and_attend`` of attention layers, see :mod:`etkv.op`. In an exported program a
delegate runs them on a native cache. In plain PyTorch they run on the active state::

    state = etkv.reference.RecurrentState(n_layers)
    with etkv.op.active(cache, state):
        logits = model(tokens, positions)

``layer_id`` counts convolutions and recurrences together, from 0, in the order of the program. Attention layers are
counted separately.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etkv import op
from etkv.errors import StatusError
from etkv.reference.errors import NoActiveCacheError


def update_and_convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    position: Tensor,
    layer_id: int,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Store a layer's inputs, and return their causal depthwise convolution.

    The output of a token depends on its input and on the inputs of the W - 1 tokens before it. Inputs before the first
    token are zeros.

    Args:
        x: ``[1, channels, T]``.
        weight: ``[channels, W]``. The last column is the factor of the token's own input.
        bias: ``[channels]``, or None.
        position: int32 or int64, ``[T]`` or ``[T, n]``, as for ``update_and_attend``.
        layer_id: the layer's number among the recurrent layers.
        activation: the function that is applied to the sums: ``silu``, or ``none``.
        out_dtype: the dtype of the result.

    Returns:
        ``[1, channels, T]`` in ``out_dtype``.

    Raises:
        NoActiveCacheError: no state is active.
        StatusError: the state refuses the inputs, and is unchanged.
    """
    made: Tensor = torch.ops.kvcache.update_and_convolve(x, weight, bias, position, layer_id, activation, out_dtype)
    return made


def update_and_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    position: Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """Store a layer's inputs, and return the outputs of its recurrence.

    Each head has a state S ``[k_dim, v_dim]``, which is zeros before the first token. For token t::

        S = exp(g_t) * S
        u = beta_t * (v_t - S^T k_t), or v_t without beta
        S = S + k_t u^T
        output_t = scale * S^T q_t

    Args:
        q: ``[1, Hk, T, k_dim]``. A head of ``q`` and ``k`` serves H / Hk adjacent heads of ``v``.
        k: ``[1, Hk, T, k_dim]``.
        v: ``[1, H, T, v_dim]``.
        g: the log of the decay: ``[1, H, T]``, or ``[1, H, T, k_dim]`` for a decay of each channel of a key.
        beta: the strengths of the delta rule, ``[1, H, T]``; None for a recurrence without the delta rule.
        position: as for :func:`update_and_convolve`.
        layer_id: the layer's number among the recurrent layers.
        scale: the factor of the outputs.
        out_dtype: the dtype of the result.

    Returns:
        ``[1, H, T, v_dim]`` in ``out_dtype``.

    Raises:
        NoActiveCacheError: no state is active.
        StatusError: the state refuses the inputs, and is unchanged.
    """
    made: Tensor = torch.ops.kvcache.update_and_scan(q, k, v, g, beta, position, layer_id, scale, out_dtype)
    return made


@torch.library.custom_op("kvcache::update_and_convolve", mutates_args=())
def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    position: Tensor,
    layer_id: int,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    state = _state()
    positions = _positions(state, position, x)
    # The reference stores its rows on the CPU.
    made = state.update_and_convolve(layer_id, x.cpu(), weight.cpu(), _on_cpu(bias), positions, activation, out_dtype)
    return made.to(x.device)


@_convolve.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    position: Tensor,
    layer_id: int,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


@torch.library.custom_op("kvcache::update_and_scan", mutates_args=())
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    position: Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
) -> Tensor:
    state = _state()
    positions = _positions(state, position, q)
    made = state.update_and_scan(
        layer_id, q.cpu(), k.cpu(), v.cpu(), g.cpu(), _on_cpu(beta), positions, scale, out_dtype
    )
    return made.to(q.device)


@_scan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    position: Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
) -> Tensor:
    return v.new_empty(v.shape, dtype=out_dtype)


def _state() -> op.OpState:
    state = op.active_state()
    if state is None:
        raise NoActiveCacheError
    return state


def _positions(state: op.OpState, position: Tensor, rows: Tensor) -> list[int]:
    """Return the positions of the tokens of ``rows``, ``[1, heads or channels, T, ...]``."""
    try:
        return op.positions_of(position, rows.shape[2] if rows.dim() > 2 else None)
    except StatusError:
        state.abort()
        raise


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
