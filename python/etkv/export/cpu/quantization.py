"""Quantization for the CPU: weights in 4 bits (``8da4w``) or 8 (``8da8w``), and activations in 8 within each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORMATS = {"8da4w": "int4", "8da8w": "int8"}
"""A quantization -> the format of its weights."""


def quantize(model: PreTrainedModel, name: str, group_size: int | None) -> None:
    """Quantize the weights of every linear layer, embedding and expert of ``model`` in place.

    ``group_size`` elements share a scale; None leaves the choice to each layer. A head that is tied to an embedding
    stays so.
    """
    from etkv.export.cpu import experts, linears

    if name not in _FORMATS or (group_size is None) != (name == "8da8w"):
        raise AssertionError(f"no quantization {name} of groups of {group_size}")
    experts.pack(model, name, group_size or experts.GROUP_SIZE)
    linears.pack(model, _FORMATS[name], group_size)
