"""Quantization for XNNPACK: weights in 4 bits (``8da4w``) or 8 (``8da8w``), and activations in 8 within each step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import PreTrainedModel


def quantize(model: PreTrainedModel, name: str, group_size: int | None) -> None:
    """Quantize every linear weight of ``model`` in place. ``group_size`` elements share a scale; None is a whole row.

    Embeddings stay as they are: a step reads few of their rows. A head that is tied to them gets quantized weights of
    its own, so the model no longer has tied weights.
    """
    import torch
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    from etkv.export.cpu import experts

    infer_shapes_quickly()
    if name not in ("8da4w", "8da8w") or (group_size is None) != (name == "8da8w"):
        raise AssertionError(f"no quantization {name} of groups of {group_size}")
    experts.pack(model, name, group_size or experts.GROUP_SIZE)
    int4: Any = getattr(torch, "int4")  # noqa: B009 (torch's types lack it)
    dtype = int4 if name == "8da4w" else torch.int8
    granularity = PerAxis(0) if group_size is None else PerGroup(group_size)
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity))
    model.config.get_text_config().tie_word_embeddings = False


@functools.cache
def infer_shapes_quickly() -> torch.library.Library:
    """Make torchao's quantization of fake tensors, which have a shape and no values, return a shape at once.

    torchao takes about twenty steps for a shape, and an export asks for a dozen shapes of each linear layer, which
    would take minutes. Real tensors are computed as before. The change lasts as long as the process.
    """
    import torch
    from torch._inductor.decomposition import decompositions

    shapes: dict[str, Callable[..., Any]] = {
        "choose_qparams_affine": _chosen,
        "quantize_affine": _quantized,
        "dequantize_affine": _dequantized,
    }
    library = torch.library.Library("torchao", "IMPL")
    for name, shape in shapes.items():
        op = getattr(torch.ops.torchao, name).default
        library.impl(name, _for_fakes(op, decompositions[op], shape), "CompositeImplicitAutograd")
    return library


def _for_fakes(op: Any, compute: Callable[..., Any], shape: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``shape`` for fake tensors, with the arguments of ``op`` by name, else ``compute``.

    ``shape`` returns None where it does not know.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    names = [argument.name for argument in op._schema.arguments]

    def quick(*arguments: Any, **named: Any) -> Any:
        known = None
        if isinstance(arguments[0], FakeTensor):
            known = shape(**dict(zip(names, arguments, strict=False)), **named)
        return compute(*arguments, **named) if known is None else known

    return quick


def _chosen(
    input: torch.Tensor,
    block_size: list[int],
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
    keepdim: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return scales and zero points, one of each for a row."""
    import torch

    if any(size != 1 for size in block_size[:-1]) or block_size[-1] != input.shape[-1]:
        return None
    shape = (*input.shape[:-1], 1) if keepdim else input.shape[:-1]
    scale = input.new_empty(shape, dtype=scale_dtype or input.dtype)
    return scale, input.new_empty(shape, dtype=zero_point_dtype or torch.int32)


def _quantized(input: torch.Tensor, output_dtype: torch.dtype, **others: Any) -> torch.Tensor:
    return input.new_empty(input.shape, dtype=output_dtype)


def _dequantized(input: torch.Tensor, output_dtype: torch.dtype | None = None, **others: Any) -> torch.Tensor:
    import torch

    return input.new_empty(input.shape, dtype=output_dtype or torch.float32)
