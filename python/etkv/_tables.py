"""Reads the constants of an exported ``.pte`` from its tables. Imports neither torch nor ExecuTorch, because that takes
a second.

A constant is a method without inputs, delegates and instructions. Its outputs are numbers, strings, and
one-dimensional tensors of integers. The tables are the flatbuffers of ExecuTorch's ``program.fbs``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from flatbuffers import encode, packer
from flatbuffers import number_types as types
from flatbuffers.table import Table

Read: TypeAlias = Callable[[int, int], bytes]
"""A function that reads bytes of segments. Its arguments are the offset from the first segment and the byte count."""

_PLANS, _SEGMENTS, _CONSTANTS = 1, 4, 5
"""Field numbers of a program: methods, segments, and the offsets of tensor data in a segment."""

_NAME, _VALUES, _INPUTS, _OUTPUTS, _CHAINS, _DELEGATES = 0, 2, 3, 4, 5, 7
"""Field numbers of a method."""

_INSTRUCTIONS = 2
"""The field number of a chain's instructions."""

_KIND, _VALUE = 0, 1
"""Field numbers of a value."""

_NUMBERS = {2: types.Int64Flags, 3: types.BoolFlags, 4: types.Float64Flags}
"""Kinds of values that are numbers."""

_TENSOR, _STRING = 5, 6
"""Other kinds of values."""

_DTYPE, _SIZES, _DATA, _ALLOCATION = 0, 2, 5, 6
"""Field numbers of a tensor."""

_INTEGERS = {0: "B", 1: "b", 2: "h", 3: "i", 4: "q"}
"""ExecuTorch's numbers of integer dtypes -> format characters of ``struct``."""

DAMAGE = (struct.error, IndexError, ValueError, TypeError, AssertionError, UnicodeDecodeError, OverflowError)
"""The exceptions that reading damaged tables raises."""


def constants(tables: bytes, read: Read) -> dict[str, list[Any] | None]:
    """Return the outputs of each constant by name; None for a constant with an output of another kind.

    Raises one of :data:`DAMAGE` for damaged tables, and what ``read`` raises.
    """
    root = Table(tables, encode.Get(packer.uoffset, tables, 0))
    outputs = {}
    for plan in _tables(root, _PLANS):
        if _length(plan, _INPUTS) == 0 and _length(plan, _DELEGATES) == 0:
            outputs[_text(plan, _NAME)] = _outputs(root, plan, read)
    return outputs


def _outputs(root: Table, plan: Table, read: Read) -> list[Any] | None:
    if any(_length(chain, _INSTRUCTIONS) for chain in _tables(plan, _CHAINS)):
        return None
    values = list(_tables(plan, _VALUES))
    outputs = []
    for index in _numbers(plan, _OUTPUTS, types.Int32Flags):
        if not 0 <= index < len(values):
            raise IndexError(f"value {index} of {len(values)}")
        output = _value(root, values[index], read)
        if output is None:
            return None
        outputs.append(output)
    return outputs


def _value(root: Table, value: Table, read: Read) -> Any:
    kind, at = _number(value, _KIND, types.Uint8Flags), _offset(value, _VALUE)
    inner = Table(value.Bytes, 0)
    if not at:
        return None
    value.Union(inner, at)
    if kind in _NUMBERS:
        return _number(inner, 0, _NUMBERS[kind])
    if kind == _STRING:
        return _text(inner, 0)
    return _integers(root, inner, read) if kind == _TENSOR else None


def _integers(root: Table, tensor: Table, read: Read) -> list[int] | None:
    """Return the elements of a constant one-dimensional tensor of integers; None for other tensors."""
    letter = _INTEGERS.get(_number(tensor, _DTYPE, types.Int8Flags))
    sizes, at = list(_numbers(tensor, _SIZES, types.Int32Flags)), _offset(root, _CONSTANTS)
    if letter is None or len(sizes) != 1 or _offset(tensor, _ALLOCATION) or not at:
        return None
    constants = Table(root.Bytes, root.Indirect(root.Pos + at))
    offset = list(_numbers(constants, 1, types.Uint64Flags))[_number(tensor, _DATA, types.Uint32Flags)]
    segment = list(_tables(root, _SEGMENTS))[_number(constants, 0, types.Uint32Flags)]
    layout = struct.Struct(f"<{math.prod(sizes)}{letter}")
    return list(layout.unpack(read(_number(segment, 0, types.Uint64Flags) + offset, layout.size)))


def _offset(table: Table, number: int) -> int:
    at: int = table.Offset(4 + 2 * number)
    return at


def _number(table: Table, number: int, flags: Any) -> Any:
    """Return the value of a table's numeric field, or 0 if the field is absent: tables omit zeros."""
    at = _offset(table, number)
    return table.Get(flags, table.Pos + at) if at else flags.py_type(0)


def _length(table: Table, number: int) -> int:
    at = _offset(table, number)
    return int(table.VectorLen(at)) if at else 0


def _numbers(table: Table, number: int, flags: Any) -> Iterator[int]:
    """Yield the numbers of a vector."""
    at = _offset(table, number)
    start = table.Vector(at) if at else 0
    for index in range(_length(table, number)):
        yield table.Get(flags, start + flags.bytewidth * index)


def _tables(table: Table, number: int) -> Iterator[Table]:
    """Yield the tables of a vector."""
    at = _offset(table, number)
    start = table.Vector(at) if at else 0
    for index in range(_length(table, number)):
        yield Table(table.Bytes, table.Indirect(start + 4 * index))


def _text(table: Table, number: int) -> str:
    at = _offset(table, number)
    if not at:
        raise IndexError("a method has no name")
    return bytes(table.String(table.Pos + at)).decode()
