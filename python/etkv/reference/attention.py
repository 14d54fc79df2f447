"""Attention by its definition, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    out_dtype: torch.dtype,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Returns the softmax of the scaled scores under ``mask``, times the values.

    ``q`` is ``[1, n_heads, T, k_head_dim]``, ``k`` ``[1, n_kv_heads, L, k_head_dim]``, ``v``
    ``[1, n_kv_heads, L, v_head_dim]``, and ``mask`` ``[T, L]``, true where a query sees a key. Each KV head serves the
    same number of adjacent query heads. ``sinks`` ``[n_heads]`` add one score to every query, with a value of zeros.
    A ``softcap`` other than 0 bounds the scaled scores. Returns ``[1, n_heads, T, v_head_dim]`` in ``out_dtype``.
    """
    share = q.shape[1] // k.shape[1]
    keys, values = (rows.double().repeat_interleave(share, dim=1) for rows in (k, v))
    scores = (q.double() @ keys.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return (scores.softmax(-1) @ values).to(out_dtype)
    with_sinks = torch.cat([scores, sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return (with_sinks.softmax(-1)[..., :-1] @ values).to(out_dtype)
