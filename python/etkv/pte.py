"""Reads what an exported ``.pte`` holds: its methods, its constants and the payloads of its delegates.

Only tables are read, and what is asked for: a file of many gigabytes of weights is opened at the price of a small one.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etkv import _library
from etkv.errors import EtkvError, first_line

DAMAGE = (RuntimeError, UnicodeDecodeError, IndexError, MemoryError)
"""What ExecuTorch's Python module raises on damaged tables: its codes, names that are no text, inputs of another kind,
sizes that no memory is there for."""

_LISTS = frozenset({"get_eos_ids"})
"""Constant methods with one output an element."""

_MLX = _library.MLX_BACKEND

_HEAD = struct.Struct("<8x4sIQQ")
"""Flatbuffer's own head, then the extended header: its mark, its length, bytes of the tables, where segments begin."""


def check_mark(head: bytes, path: Path) -> None:
    """Refuse what does not begin as a program does: ET and two digits behind the place of the root.

    ExecuTorch logs the mark of what it refuses, and where that is not text, its Python module ends the process.
    """
    if head[4:6] != b"ET" or not head[6:8].isdigit():
        raise EtkvError(f"{path} is not an ExecuTorch program")


class PteFile:
    """The tables of a program, and its segments on demand.

    Raises :class:`EtkvError` where ``path`` cannot be read, is no program, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                n_tables, self._segments_at = _extent(file.read(_HEAD.size), path, self.size)
                file.seek(0)
                tables = file.read(n_tables)
        except OSError as error:
            raise EtkvError(f"{path} cannot be read: {error.strerror}") from error
        with self._damage_told():
            from executorch.exir._serialize._flatbuffer import _program_flatbuffer_to_json

            self._tables = json.loads(_program_flatbuffer_to_json(tables))
            self._plans = {plan["name"]: plan for plan in self._tables["execution_plan"]}

    @property
    def delegates(self) -> dict[str, list[str]]:
        """Method name -> ids of the delegates that it calls, in order."""
        return {name: [delegate["id"] for delegate in plan.get("delegates", [])] for name, plan in self._plans.items()}

    @property
    def constant_names(self) -> list[str]:
        """The methods that take no input and call no delegate: facts that the exporter wrote down."""
        return [name for name, plan in self._plans.items() if not plan.get("delegates") and not plan.get("inputs")]

    def operators(self, method: str) -> list[str]:
        """Names of the operators of ``method`` that run outside any delegate."""
        if method not in self._plans:
            raise EtkvError(f"{self.path} has no method {method}")
        return [operator["name"] for operator in self._plans[method].get("operators", [])]

    @property
    def named_data(self) -> dict[str, int]:
        """Names of the constants that delegates read -> their bytes."""
        segments = self._tables.get("segments", [])
        return {item["key"]: segments[item["segment_index"]]["size"] for item in self._tables.get("named_data", [])}

    def mlx_payload(self, index: int = 0) -> bytes:
        """The payload of the MLX delegate number ``index``, over all methods."""
        found = [
            delegate
            for plan in self._plans.values()
            for delegate in plan.get("delegates", [])
            if delegate["id"] == _MLX
        ]
        if not 0 <= index < len(found):
            raise EtkvError(f"{self.path} has no MLX delegate number {index}")
        with self._damage_told():
            place = found[index]["processed"]
            if place["location"] == "SEGMENT":
                segment = self._tables["segments"][place["index"]]
                return self._read(self._segments_at + segment["offset"], segment["size"])
            return bytes(self._tables["backend_delegate_data"][place["index"]]["data"])

    def _read(self, offset: int, n_bytes: int) -> bytes:
        if offset + n_bytes > self.size:
            raise EtkvError(
                f"{self.path} is damaged: it has {self.size} bytes, a segment goes up to {offset + n_bytes}"
            )
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(n_bytes)

    @contextlib.contextmanager
    def _damage_told(self) -> Iterator[None]:
        """Tell what readers of flatbuffers raise on a damaged file, which is of many types, as :class:`EtkvError`."""
        try:
            yield
        except EtkvError:
            raise
        except Exception as error:
            raise EtkvError(f"{self.path} is damaged: {first_line(error)}") from error


def _extent(head: bytes, path: Path, size: int) -> tuple[int, int]:
    """The bytes of the tables of a file that begins with ``head`` and has ``size`` bytes, and where segments begin."""
    check_mark(head, path)
    n_tables, segments_at = size, 0
    if len(head) == _HEAD.size and head[8:12] == b"eh00":
        _, _, n_tables, segments_at = _HEAD.unpack(head)
    if n_tables > size:
        raise EtkvError(f"{path} is damaged: it has {size} bytes, its tables have {n_tables}")
    return n_tables, segments_at


def constant_methods(path: Path) -> dict[str, Any]:
    """Constant method name -> its value: an int, a bool, a float or a list of ints.

    Runs each method with the wheel's runtime, so what comes back is what a runner in C++ reads. A list of ints, which
    a program keeps as one output an element, is a list here even if it has one element only.
    """
    _library.go_first()
    from executorch.runtime import Runtime, Verification

    names = PteFile(path).constant_names
    try:
        with _library.EXECUTORCH_CALLS:
            program = Runtime.get().load_program(path, verification=Verification.InternalConsistency)
            return {name: constant(program, name) for name in names}
    except DAMAGE as error:
        raise EtkvError(f"{path} is damaged: {first_line(error)}") from error


def for_backend(path: Path, backend: str) -> bytes:
    """The program at ``path``, with ``backend`` in the place of ``MLXBackend``: a name of as many characters."""
    if len(backend) != len(_MLX):
        raise EtkvError(f"backend is {backend!r}, expected a name of {len(_MLX)} characters")
    # A string of a flatbuffer: its length, its characters and a zero.
    before, after = (struct.pack("<I", len(name)) + name.encode() + b"\0" for name in (_MLX, backend))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        n_tables, _ = _extent(whole[: _HEAD.size], path, len(whole))
        with memoryview(whole) as view, view[n_tables:] as segments:
            return b"".join((whole[:n_tables].replace(before, after), segments))


def constant(program: Any, name: str) -> Any:
    """The value of the constant method ``name`` of a program that ``executorch.runtime`` has loaded."""
    with _library.EXECUTORCH_CALLS:
        values = [_plain(output) for output in program.load_method(name).execute([])]
    return values if name in _LISTS else values[0]


def _plain(output: Any) -> Any:
    return output.tolist() if hasattr(output, "tolist") else output
