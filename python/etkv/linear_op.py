"""``etkv::linear`` and ``etkv::embedding``: products with packed weights, and rows of packed embeddings.

In a CPU program a delegate runs both ops, see ``crates/etkv-cpu/src/linear/``. The output head of a model and its
embedding may share weights. In plain PyTorch both ops unpack the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etkv.packed_weights import ROWS, WeightFormat

_PART = 1 << 20
"""Number of weights that are unpacked at once."""


@torch.library.custom_op("etkv::linear", mutates_args=())
def linear(x: Tensor, weights: Tensor, bias: Tensor | None, weight_format: str, group_size: int, rows: int) -> Tensor:
    """Return the product of ``x`` with a packed matrix.

    Args:
        x: ``[.., in]``.
        weights: the packed matrix, see :mod:`etkv.packed_weights`.
        bias: ``[rows]``, or None.
        weight_format: the format of the weights.
        group_size: the number of weights that share a scale, or 0.
        rows: the number of rows of the matrix.

    Returns:
        ``[.., rows]`` in the dtype of ``x``.
    """
    return compute(x, weights, bias, WeightFormat(weight_format, group_size), rows)


linear.register_fake(lambda x, weights, bias, weight_format, group_size, rows: x.new_empty((*x.shape[:-1], rows)))


def compute(
    x: Tensor, weights: Tensor, bias: Tensor | None, fmt: WeightFormat, rows: int, *, rounds: bool = True
) -> Tensor:
    """Return the outputs of :func:`linear`. Unless ``rounds`` is set, inputs are not rounded, even for integer
    weights."""
    inputs = x.float()
    if rounds and fmt.group_size:
        inputs = rounded(inputs, fmt.group_size)
    parts = weights.split(max(1, _PART // (ROWS * x.shape[-1])))
    made = torch.cat([inputs @ fmt.unpack(part).T for part in parts], dim=-1)[..., :rows]
    return (made if bias is None else made + bias).to(x.dtype)


@torch.library.custom_op("etkv::embedding", mutates_args=())
def embedding(ids: Tensor, weights: Tensor, weight_format: str, group_size: int, rows: int) -> Tensor:
    """Return rows of an embedding of ``rows`` rows.

    Args:
        ids: int64 of any shape.
        weights: the packed matrix, see :mod:`etkv.packed_weights`.
        weight_format: the format of the weights.
        group_size: the number of weights that share a scale, or 0.
        rows: the number of rows of the matrix.

    Returns:
        ``[*shape, in]`` in float32.

    Raises:
        IndexError: an id is not the number of a row.
    """
    for end in (ids.min(), ids.max()) if ids.numel() else ():
        if not 0 <= int(end) < rows:
            raise IndexError(f"expected ids from 0 to {rows - 1}, got {int(end)}")
    fmt = WeightFormat(weight_format, group_size)
    tiles, rows_of_tiles = ids // ROWS, ids % ROWS
    found: Tensor = fmt.unpack(weights[tiles.flatten()]).unflatten(0, (-1, ROWS))
    return found[torch.arange(ids.numel()), rows_of_tiles.flatten()].reshape(*ids.shape, -1)


@embedding.register_fake
def _(ids: Tensor, weights: Tensor, weight_format: str, group_size: int, rows: int) -> Tensor:
    width = WeightFormat(weight_format, group_size).width(weights.shape)
    return ids.new_empty((*ids.shape, width), dtype=torch.float32)


def rounded(x: Tensor, group_size: int) -> Tensor:
    """Return ``x`` rounded to 8-bit integers times a scale, with one scale for each group of elements of a row."""
    groups = x.unflatten(-1, (-1, group_size))
    most = groups.abs().amax(dim=-1, keepdim=True)
    codes = torch.where(most < 2.0**-100, 0.0, (groups * (127.0 / most)).round())
    made: Tensor = (codes * (most / 127.0)).flatten(-2)
    return made
