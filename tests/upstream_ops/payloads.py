"""Collects the exported programs in one file, for the campaign of damaged programs
(``tests/rust/damaged_programs.rs``).

``python -m tests.upstream_ops.payloads FILE`` exports missing programs, and writes the file if it is missing or
stale. For each program the file has the delegate's payload, the offset of each number in the payload, the constants,
the inputs, the dtypes of the outputs, and the types of nodes. Payloads are written with all default values, so that
defaults can be damaged as well.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etkv.description import describe_program
from etkv.pte import PteFile

from . import cases, export, wheel
from .cases import Case

MARK = b"etkv-damage-4\n"
HEADER = 24
"""Bytes before the flatbuffer of a payload."""

_SCALARS = {
    "bool": "B",
    "byte": "b",
    "int8": "b",
    "ubyte": "B",
    "uint8": "B",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float": "f",
    "double": "d",
}
# The kinds of numbers in the payload. The campaign uses the same values.
_KINDS = {"B": 0, "b": 0, "i": 1, "I": 2, "q": 3, "f": 4, "d": 5}
_SLOT, _LENGTH, _OFFSET, _FIELD, _TYPE, _TEXT = 6, 7, 8, 9, 10, 11


class _Schema:
    """The tables of a schema, with the names and types of their fields, including the type fields of unions."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        self.structs = set(re.findall(r"\bstruct (\w+)", text))
        self.enums = set(re.findall(r"\benum (\w+)", text))
        self.unions = {
            name: ["", *re.findall(r"\w+", members)] for name, members in re.findall(r"\bunion (\w+)\s*{([^}]*)}", text)
        }
        self.tables: dict[str, list[str]] = {}
        for name, body in re.findall(r"\btable (\w+)\s*{([^}]*)}", text):
            fields = []
            for kind in re.findall(r"\w+\s*:\s*(\[?\w+\]?)", body):
                fields += [f"type {kind}", kind] if kind in self.unions else [kind]
            self.tables[name] = fields


class _Sites:
    """The numbers in a flatbuffer: offset, kind, and whether the number is part of an instruction."""

    def __init__(self, schema: _Schema, data: bytes) -> None:
        self.schema, self.data = schema, data
        self.found: dict[tuple[int, int], bool] = {}
        self._seen: set[tuple[int, str]] = set()
        (root,) = struct.unpack_from("<I", data)
        self._table(root, "MLXGraph", False)

    def _add(self, at: int, kind: int, inside: bool) -> None:
        self.found[at, kind] = self.found.get((at, kind), False) or inside

    def _table(self, at: int, name: str, inside: bool) -> None:
        if (at, name) in self._seen:
            return
        self._seen.add((at, name))
        inside = inside or name.endswith("Node")
        (back,) = struct.unpack_from("<i", self.data, at)
        fields = at - back
        (size,) = struct.unpack_from("<H", self.data, fields)
        union = 0
        for index, kind in enumerate(self.schema.tables[name]):
            entry = fields + 4 + 2 * index
            if 4 + 2 * index >= size:
                break
            self._add(entry, _FIELD, inside)
            (offset,) = struct.unpack_from("<H", self.data, entry)
            if offset == 0:
                continue
            if kind.startswith("type "):
                self._add(at + offset, _TYPE, True)
                union = self.data[at + offset]
            elif kind in self.schema.unions:
                self._reference(at + offset, self.schema.unions[kind][union], True)
            else:
                self._value(at + offset, kind, inside)

    def _value(self, at: int, kind: str, inside: bool) -> None:
        if kind in _SCALARS:
            self._add(at, _KINDS[_SCALARS[kind]], inside)
        elif kind in self.schema.enums:
            self._add(at, 0, inside)
        elif kind in self.schema.structs:
            self._add(at, _SLOT, inside)
        else:
            self._reference(at, kind, inside)

    def _reference(self, at: int, kind: str, inside: bool) -> None:
        self._add(at, _OFFSET, inside)
        (offset,) = struct.unpack_from("<I", self.data, at)
        target = at + offset
        if kind == "string":
            self._add(target, _LENGTH, inside)
            (n,) = struct.unpack_from("<I", self.data, target)
            if n:
                self._add(target + 4, _TEXT, inside)
        elif kind.startswith("["):
            kind = kind[1:-1]
            self._add(target, _LENGTH, inside)
            (n,) = struct.unpack_from("<I", self.data, target)
            size = struct.calcsize(_SCALARS[kind]) if kind in _SCALARS else 4
            for index in range(n):
                self._value(target + 4 + size * index, kind, inside)
        else:
            self._table(target, kind, inside)


def write(path: Path, found: list[Case]) -> None:
    """Write the programs of these cases."""
    schema_path = Path(str(importlib.metadata.distribution("executorch").locate_file("executorch")))
    flatc = schema_path / "data" / "bin" / "flatc"
    schema_path = schema_path / "backends" / "mlx" / "serialization" / "schema.fbs"
    schema = _Schema(schema_path.read_text(encoding="utf-8"))
    buffers = _with_defaults(flatc, schema_path, [PteFile(case.path / "model.pte").mlx_payload() for case in found])
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    with scratch.open("wb") as file:
        file.write(MARK + _text(cases.stamp()) + struct.pack("<I", len(found)))
        for case, buffer in zip(found, buffers, strict=True):
            file.write(b"".join(_program(schema, case, buffer)))
    scratch.replace(path)


def is_current(path: Path, count: int) -> bool:
    """Return whether the file contains ``count`` programs of the current exports."""
    mark = MARK + _text(cases.stamp()) + struct.pack("<I", count)
    try:
        with path.open("rb") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False


def _with_defaults(flatc: Path, schema: Path, payloads: list[bytes]) -> list[bytes]:
    """Return the flatbuffers of payloads, with default values written out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index, payload in enumerate(payloads):
            (end,) = struct.unpack_from("<Q", payload, 8)
            (folder / f"{index}.bin").write_bytes(payload[HEADER : end or len(payload)])
        of = [f"{index}.bin" for index in range(len(payloads))]
        to = [f"{index}.json" for index in range(len(payloads))]
        words = [str(flatc), "--json", "--strict-json", "--raw-binary", str(schema), "--", *of]
        subprocess.run(words, cwd=folder, check=True)
        shutil.rmtree(folder / "out", ignore_errors=True)
        subprocess.run([flatc, "--binary", "--force-defaults", "-o", "out", schema, *to], cwd=folder, check=True)
        return [(folder / "out" / f"{index}.bin").read_bytes() for index in range(len(payloads))]


def _program(schema: _Schema, case: Case, buffer: bytes) -> Iterator[bytes]:
    payload = b"\0\0\0\0MLX0" + bytes(HEADER - 8) + buffer
    sites = sorted(_Sites(schema, buffer).found.items())
    yield _text(case.folder)
    yield _text(case.kv_cache or "")
    yield _list([_text(op) for op in case.ops])
    yield _bytes(payload)
    yield _list([struct.pack("<IBB", HEADER + at, kind, inside) for (at, kind), inside in sites])
    yield _list([_text(name) + _bytes(data) for name, data in _constants(case.path / "model.pte")])
    utils = wheel.test_utils()
    given = utils.load_tensors_from_bin(case.path / "input.bin")
    declared = describe_program(case.path / "model.pte")["inputs"]
    yield _list([_tensor(tensor) for tensor in _in_order(given, declared)])
    outputs = utils.load_tensors_from_bin(case.path / "expected_output.bin")
    yield _list([struct.pack("<b", _scalar_type(tensor)) for tensor in outputs])


def _in_order(given: list[Any], declared: list[dict[str, Any]]) -> list[Any]:
    """Return a method's inputs in the order of its delegate, which may differ."""
    rest = list(given)

    def fits(tensor: Any, argument: dict[str, Any]) -> bool:
        shape = argument["shape"]
        if shape is None:
            return bool(tensor.numel() == 1)
        same = [not isinstance(size, int) or size == found for size, found in zip(shape, tensor.shape, strict=False)]
        return str(tensor.dtype) == f"torch.{argument['dtype']}" and len(shape) == tensor.ndim and all(same)

    ordered = []
    for argument in declared:
        index = next((index for index, tensor in enumerate(rest) if fits(tensor, argument)), None)
        if index is None:
            return given
        ordered.append(rest.pop(index))
    return ordered


def _constants(path: Path) -> Iterator[tuple[str, bytes]]:
    from executorch.exir._serialize._program import deserialize_pte_binary

    data = deserialize_pte_binary(path.read_bytes()).named_data
    if data is not None:
        for name, entry in data.pte_data.items():
            yield name, bytes(data.buffers[entry.buffer_index])


def _scalar_type(tensor: Any) -> int:
    from executorch.exir.tensor import scalar_type_enum

    return int(scalar_type_enum(tensor.dtype))


def _tensor(tensor: Any) -> bytes:
    import torch

    flat = tensor.contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    shape = struct.pack(f"<B{tensor.ndim}i", tensor.ndim, *tensor.shape)
    return struct.pack("<b", _scalar_type(tensor)) + shape + _bytes(data)


def _bytes(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _text(text: str) -> bytes:
    return _bytes(text.encode())


def _list(entries: list[bytes]) -> bytes:
    return struct.pack("<I", len(entries)) + b"".join(entries)


def gather(path: Path) -> None:
    """Export missing programs, and write the file of all programs if it is missing or stale."""

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    exported = export.export(2, lambda folder: True, note)
    found = [case for case in exported if case.error is None]
    if not is_current(path, len(found)):
        write(path, found)


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
