"""Causal convolutions and recurrences by their definitions, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

ACTIVATIONS = {"none": lambda x: x, "silu": torch.nn.functional.silu}
"""Functions that a convolution applies to its sums, by name."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return the causal depthwise convolution of ``x`` ``[1, channels, T]``, in float32. Earlier inputs are zeros.

    ``weight`` is ``[channels, W]``; its last column applies to the token itself. ``bias`` is ``[channels]``.
    """
    width, n_tokens = weight.shape[1], x.shape[2]
    rows = torch.nn.functional.pad(x.float(), (width - 1, 0))
    sums = torch.zeros_like(x, dtype=torch.float32)
    for tap in range(width):
        sums += rows[:, :, tap : tap + n_tokens] * weight.float()[:, tap : tap + 1]
    if bias is not None:
        sums += bias.float()[:, None]
    activated: Tensor = ACTIVATIONS[activation](sums)
    return activated


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor:
    """Return the outputs ``[1, H, T, v_dim]`` of a recurrence, in float32. The first state is zeros.

    The shapes are those of :func:`etkv.recurrent_op.update_and_scan`. Each head of ``q`` and ``k`` serves the same
    number of adjacent heads of ``v``.
    """
    share = v.shape[1] // k.shape[1]
    q, k = (rows.float().repeat_interleave(share, dim=1) for rows in (q, k))
    v, g = v.float(), g.float()
    decay = (g if g.dim() == 4 else g.unsqueeze(-1)).exp()
    state = torch.zeros(1, v.shape[1], k.shape[3], v.shape[3])
    outputs = torch.zeros_like(v)
    for t in range(v.shape[2]):
        state = state * decay[:, :, t].unsqueeze(-1)
        u = v[:, :, t]
        if beta is not None:
            read = (state * k[:, :, t].unsqueeze(-1)).sum(-2)
            u = beta.float()[:, :, t].unsqueeze(-1) * (u - read)
        state = state + k[:, :, t].unsqueeze(-1) * u.unsqueeze(-2)
        outputs[:, :, t] = scale * (state * q[:, :, t].unsqueeze(-1)).sum(-2)
    return outputs
