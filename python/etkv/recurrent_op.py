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
from etkv.reference.errors import NoActiveCacheError
from etkv.reference.state import RecurrentState


@torch.library.custom_op("kvcache::update_and_convolve", mutates_args=())
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
    state = _state()
    positions = op.positions_of(state, position, _n_tokens(x))
    # The reference stores its rows on the CPU.
    made = state.update_and_convolve(layer_id, x.cpu(), weight.cpu(), _on_cpu(bias), positions, activation, out_dtype)
    return made.to(x.device)


update_and_convolve.register_fake(
    lambda x, weight, bias, position, layer_id, activation, out_dtype: x.new_empty(x.shape, dtype=out_dtype)
)


@torch.library.custom_op("kvcache::update_and_scan", mutates_args=())
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
    state = _state()
    positions = op.positions_of(state, position, _n_tokens(q))
    made = state.update_and_scan(
        layer_id, q.cpu(), k.cpu(), v.cpu(), g.cpu(), _on_cpu(beta), positions, scale, out_dtype
    )
    return made.to(q.device)


update_and_scan.register_fake(
    lambda q, k, v, g, beta, position, layer_id, scale, out_dtype: v.new_empty(v.shape, dtype=out_dtype)
)


def _state() -> RecurrentState:
    state = op.active_state()
    if state is None:
        raise NoActiveCacheError
    return state


def _n_tokens(rows: Tensor) -> int | None:
    """Return the number of tokens of ``rows``, ``[1, heads or channels, T, ...]``; None for another shape."""
    return rows.shape[2] if rows.dim() > 2 else None


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
