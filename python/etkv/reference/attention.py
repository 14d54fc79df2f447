"""Attention by its definition, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from etkv.errors import Status, status_error

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of queries, keys, values and outputs."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    """Returns the softmax of the scaled scores that ``mask`` lets through, times the values.

    ``q`` is ``[1, n_heads, T, k_head_dim]``, ``k`` ``[1, n_kv_heads, L, k_head_dim]``, ``v``
    ``[1, n_kv_heads, L, v_head_dim]``, and ``mask`` ``[T, L]``, true where a query sees a key. Each KV head serves the
    same number of adjacent query heads. Returns ``[1, n_heads, T, v_head_dim]`` in ``out_dtype``.
    """
    share = q.shape[1] // k.shape[1]
    keys, values = (rows.double().repeat_interleave(share, dim=1) for rows in (k, v))
    scores = (q.double() @ keys.transpose(-1, -2)) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ values).to(out_dtype)


def check_dtypes(**dtypes: torch.dtype) -> None:
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise status_error(
                Status.DTYPE, f"expected {name} in one of {known}, got {str(dtype).removeprefix('torch.')}"
            )


def check_queries(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises :class:`StatusError` with ``SHAPE`` if ``q``, ``k`` and ``v`` do not fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[0] != 1:
            raise status_error(
                Status.SHAPE,
                f"expected {name} of shape [1, heads, tokens, head_dim], got {list(tensor.shape)}",
            )
    if q.shape[2] != k.shape[2] or k.shape[2] != v.shape[2]:
        raise status_error(
            Status.SHAPE,
            f"expected q, k and v of one number of tokens, got {q.shape[2]}, {k.shape[2]} and {v.shape[2]}",
        )
    if k.shape[1] != v.shape[1]:
        raise status_error(Status.SHAPE, f"expected k and v of one number of heads, got {k.shape[1]} and {v.shape[1]}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise status_error(
            Status.SHAPE, f"expected a multiple of the {k.shape[1]} heads of k as heads of q, got {q.shape[1]}"
        )
    if q.shape[3] != k.shape[3]:
        raise status_error(Status.SHAPE, f"expected q and k of one head_dim, got {q.shape[3]} and {k.shape[3]}")
