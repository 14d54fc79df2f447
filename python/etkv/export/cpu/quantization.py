"""Quantization for XNNPACK: weights in 4 bits, activations in 8 bits as a step computes them (``8da4w``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def quantize(model: PreTrainedModel, name: str, group_size: int | None) -> None:
    """Quantize every linear weight of ``model`` in place. ``group_size`` elements share a scale.

    Embeddings stay as they are: a step reads few of their rows. A head that is tied to them is quantized apart.
    """
    import torch
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    if name != "8da4w" or group_size is None:
        raise AssertionError(f"no quantization {name} of groups of {group_size}")
    quantize_(
        model,
        Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(group_size)),
    )
