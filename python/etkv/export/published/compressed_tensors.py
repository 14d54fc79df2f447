"""The method ``compressed-tensors``: the formats of the package of this name, which llm-compressor writes.

A configuration has groups of layers. A group has the bits and the strategy of the weights of its layers. The names and
shapes of a layer's tensors must agree with its group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from etkv.export.published.format import Format
from etkv.export.published.fp4 import nvfp4
from etkv.export.published.fp8 import FLOAT8, scaled
from etkv.export.published.packing import unpack_words, words_of
from etkv.export.published.settings import FLOATS, Settings
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Grouped, Groups, Weight

_PARTS = {
    ".weight_packed": "packed",
    ".weight_scale": "scale",
    ".weight_zero_point": "zero",
    ".weight_shape": "shape",
    ".weight_g_idx": "order",
    ".weight_global_scale": "global",
}
_INTEGERS = ("int-quantized", "naive-quantized")
_FORMATS = (
    "pack-quantized",
    *_INTEGERS,
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "dense",
)
_CLASSES = ("Linear", "Embedding")
"""The classes of layers that a group may contain."""


class CompressedTensors(Format):
    """Decodes ``compressed-tensors``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        values = settings.values
        for name in ("sparsity_config", "transform_config"):
            value = settings.mapping(name, values)
            if value and (name != "sparsity_config" or value.get("format", "dense") != "dense"):
                raise settings.refuse(f"{name} is {value!r}, which the exporter does not support")
        # Older packages wrote `frozen`, also for compressed weights.
        settings.one_of("quantization_status", ("compressed", "frozen", None), None)
        self._format = settings.one_of("format", (*_FORMATS, "mixed-precision"), "dense")
        groups = settings.mapping("config_groups", values)
        self._groups = [settings.mapping(name, groups) for name in groups]
        self._ignored = settings.names("ignore", values)
        for group in self._groups:
            for target in settings.names("targets", group):
                if "." not in target and not target.startswith("re:") and target not in _CLASSES:
                    raise settings.refuse(f"a group is for layers of class {target}, expected {' or '.join(_CLASSES)}")
        rounded = next((args for group in self._groups if (args := settings.mapping("input_activations", group))), None)
        self.activations = None if rounded is None else f"in {rounded.get('num_bits', 8)} bits"

    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:
        for end, part in _PARTS.items():
            if name.endswith(end):
                return f"{name.removesuffix(end)}.weight", part
        return None

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        settings = self._settings
        group = self._group(name.removesuffix(".weight"))
        kind = group.get("format") or self._format
        args = settings.mapping("weights", group)
        if kind not in _FORMATS or kind == "dense":
            raise settings.refuse(
                f"weight {name} has the format {kind!r}, but its tensors are {', '.join(sorted(parts))}"
            )
        if "packed" not in parts and args.get("type") == "float" and kind in _INTEGERS:
            kind = "float-quantized"
        scale = settings.part(parts, name, "scale")
        if kind == "nvfp4-pack-quantized":
            packed, whole = settings.part(parts, name, "packed"), settings.part(parts, name, "global")
            return nvfp4(settings, packed, scale, whole, divides=True)
        if kind == "mxfp4-pack-quantized":
            return nvfp4(settings, settings.part(parts, name, "packed"), scale, None, divides=False)
        if kind == "pack-quantized":
            return self._packed(name, parts, args)
        codes = settings.part(parts, name, "weight")
        if kind in ("float-quantized", "mxfp8-quantized"):
            if codes.dtype not in FLOAT8:
                raise settings.refuse(f"tensor {codes.name} is {codes.described()}, expected float8_e4m3fn")
            block = args.get("block_structure") if args.get("strategy") == "block" else None
            if args.get("strategy") in ("group", "tensor_group"):
                block = (1, self._columns_of_a_group(args, codes.shape[1]))
            return scaled(settings, codes, scale, None if block is None else settings.block("block_structure", block))
        return self._integers(name, codes, parts, args)

    def _group(self, layer: str) -> Mapping[str, Any]:
        """Return the settings of ``layer``: of the group with its name, or else of the group with its class."""

        def names(target: str) -> bool:
            return re.match(target[3:], layer) is not None if target.startswith("re:") else target == layer

        if any(names(target) for target in self._ignored):
            raise self._settings.refuse(f"layer {layer} is among the ignored layers, but is quantized")
        named = [group for group in self._groups if any(names(target) for target in group.get("targets") or ())]
        found = named or [group for group in self._groups if set(group.get("targets") or ()) & set(_CLASSES)]
        if len(found) != 1:
            raise self._settings.refuse(f"{len(found)} groups of config_groups are for layer {layer}, expected 1")
        return found[0]

    def _columns_of_a_group(self, args: Mapping[str, Any], columns: int) -> int:
        """Return the number of columns that share a scale."""
        strategy = args.get("strategy")
        size = args.get("group_size")
        if strategy is None:
            # Older packages did not write the strategy.
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        if strategy in ("tensor", "channel"):
            return columns
        if strategy not in ("group", "tensor_group") or type(size) is not int or size < 1 or columns % size:
            raise self._settings.refuse(
                f"cannot group {columns} columns by the strategy {strategy!r} with a group_size of {size!r}"
            )
        return size

    def _packed(self, name: str, parts: Mapping[str, Stored], args: Mapping[str, Any]) -> Weight:
        """Return a weight whose integers are packed in words."""
        settings = self._settings
        codes, scale, size = (settings.part(parts, name, part) for part in ("packed", "scale", "shape"))
        bits = args.get("num_bits")
        if type(bits) is not int or not 1 <= bits <= 8 or args.get("type", "int") != "int":
            raise settings.refuse(f"num_bits is {bits!r} and type {args.get('type')!r}, expected 1 to 8 and 'int'")
        rows, columns = (int(length) for length in size.read().flatten().tolist())
        words = words_of(columns, bits)
        if 32 % bits and words == -(-columns // (32 // bits)):
            raise settings.refuse(
                f"cannot decode weight {name} of {bits} bits: old and new packages pack it in different ways"
            )
        settings.check(codes, ("int32",), (rows, words))
        of_group = self._columns_of_a_group(args, columns)
        groups = columns // of_group
        self._check_scale(scale, rows, groups)
        zero = self._zero(name, parts, args, (words_of(rows, bits), groups), (rows, groups))
        order = parts.get("order")
        of_columns: torch.Tensor | None = None
        if order is not None:
            settings.check(order, ("int32", "int64"), (columns,))
            of_columns = order.read().long()
            if bool((of_columns < 0).any()) or bool((of_columns >= groups).any()):
                raise settings.refuse(f"tensor {order.name} has groups outside of the {groups} groups of {name}")
        return Grouped(partial(_packed, codes, scale, zero, bits, (rows, columns), of_columns))

    def _integers(self, name: str, codes: Stored, parts: Mapping[str, Stored], args: Mapping[str, Any]) -> Weight:
        """Return a weight of integers of 8 bits."""
        if len(codes.shape) != 2 or args.get("num_bits") not in (4, 8):
            raise self._settings.refuse(
                f"tensor {codes.name} is {codes.described()} with num_bits {args.get('num_bits')!r}, expected a matrix "
                "with num_bits 4 or 8"
            )
        rows, columns = codes.shape
        self._settings.check(codes, ("int8",), codes.shape)
        of_group = self._columns_of_a_group(args, columns)
        scale = parts["scale"]
        self._check_scale(scale, rows, columns // of_group)
        zero = self._zero(name, parts, args, scale.shape, scale.shape)
        return Grouped(partial(_integers, codes, scale, zero))

    def _check_scale(self, scale: Stored, rows: int, groups: int) -> None:
        shapes = {(rows, groups), *({(rows,), (1,), (), (1, 1)} if groups == 1 else ())}
        if scale.dtype not in FLOATS or scale.shape not in shapes:
            raise self._settings.refuse(
                f"tensor {scale.name} is {scale.described()}, expected floating-point numbers {[rows, groups]}"
            )

    def _zero(
        self,
        name: str,
        parts: Mapping[str, Stored],
        args: Mapping[str, Any],
        packed: tuple[int, ...],
        plain: tuple[int, ...],
    ) -> Stored | None:
        """Return the zero points, int32 of shape ``packed`` or int8 of shape ``plain``; None if weights have none."""
        zero = parts.get("zero")
        if args.get("symmetric", True):
            if zero is not None:
                raise self._settings.refuse(f"weight {name} is symmetric, but has {zero.name}")
            return None
        zero = self._settings.part(parts, name, "zero")
        if (zero.dtype, zero.shape) not in (("int32", packed), ("int8", plain)):
            raise self._settings.refuse(
                f"tensor {zero.name} is {zero.described()}, expected int32 {list(packed)} or int8 {list(plain)}"
            )
        return zero


def _packed(
    codes: Stored, scale: Stored, zero: Stored | None, bits: int, shape: tuple[int, int], order: torch.Tensor | None
) -> Groups:
    rows, columns = shape
    half = 1 << (bits - 1)
    scales = _of_rows(scale, rows)
    if zero is None:
        zeros = torch.full_like(scales, half)
    elif zero.dtype == "int8":
        zeros = zero.read().float() + half
    else:
        # Zero points are packed along the rows.
        zeros = unpack_words(zero.read().T, bits, rows).T.float()
    return Groups(unpack_words(codes.read(), bits, columns), scales, zeros, order)


def _integers(codes: Stored, scale: Stored, zero: Stored | None) -> Groups:
    rows = codes.shape[0]
    scales = _of_rows(scale, rows)
    zeros = torch.zeros_like(scales) if zero is None else _of_rows(zero, rows)
    # Convert signed integers and zero points to unsigned ones.
    return Groups(codes.read().view(torch.uint8) ^ 128, scales, zeros + 128)


def _of_rows(stored: Stored, rows: int) -> torch.Tensor:
    """Return one number for each row and group, ``[rows, groups]`` in float32."""
    numbers = stored.read().float()
    return numbers.reshape(1, 1).expand(rows, 1) if numbers.numel() == 1 else numbers.reshape(rows, -1)
