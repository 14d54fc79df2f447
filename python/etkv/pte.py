"""Reads the methods, the constants and the delegates' payloads of an exported ``.pte``.

Only the tables and the requested parts are read, so a file with gigabytes of weights opens as fast as a small file.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from etkv import _library
from etkv._mlx_serialization import flatc
from etkv.config import Dtype
from etkv.errors import EtkvError, first_line

DAMAGE = (RuntimeError, UnicodeDecodeError, IndexError, MemoryError)
"""The exceptions of ExecuTorch's Python module on damaged tables: error codes, names that are not UTF-8, values of
wrong types, and sizes above the memory."""

_LISTS = frozenset({"get_eos_ids"})
"""Constant methods that return a list, with an output for each element."""

_MLX = _library.MLX_BACKEND

_DTYPES: dict[str | None, Dtype] = {"FLOAT": "f32", "HALF": "f16", "BFLOAT16": "bf16"}
"""ExecuTorch's name of a dtype -> the dtype."""

_HEAD = struct.Struct("<8x4sIQQ")
"""The flatbuffer's header, then the extended header: magic, length, bytes of the tables, offset of the segments."""


def check_mark(head: bytes, path: Path) -> None:
    """Raise :class:`EtkvError` unless ``head``, the first bytes of a file, has the magic of a program.

    The magic is ``ET`` and two digits, after 4 bytes with the offset of the root. Without this check, ExecuTorch would
    log the wrong magic, and its Python module would crash the process if the magic is not UTF-8.
    """
    if head[4:6] != b"ET" or not head[6:8].isdigit():
        raise EtkvError(f"{path} is not an ExecuTorch program")


class PteFile:
    """Reads the tables of a program at once, and its segments on demand.

    Raises :class:`EtkvError` if ``path`` cannot be read, is not a program, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        tables, self._segments_at = read_tables(path)
        self.size = path.stat().st_size
        with self._damage_told():
            self._tables = _as_json(tables)
            self._plans = {plan["name"]: plan for plan in self._tables["execution_plan"]}

    @property
    def delegates(self) -> dict[str, list[str]]:
        """Return the ids of the delegates that each method calls, in order, by the method's name."""
        return {name: [delegate["id"] for delegate in plan.get("delegates", [])] for name, plan in self._plans.items()}

    @property
    def constant_names(self) -> list[str]:
        """Return the names of the constant methods: methods of the exporter without inputs and delegates."""
        return [name for name, plan in self._plans.items() if not plan.get("delegates") and not plan.get("inputs")]

    def output_dtype(self) -> Dtype | None:
        """Return the dtype of the first output of the method with delegates; None if it is not a :data:`Dtype`."""
        for plan in self._plans.values():
            if plan.get("delegates") and plan.get("outputs"):
                with self._damage_told():
                    value = plan["values"][plan["outputs"][0]]["val"]
                    return _DTYPES.get(value.get("scalar_type"))
        return None

    def operators(self, method: str) -> list[str]:
        """Return the names of the operators of ``method`` that run outside of delegates.

        Raises :class:`EtkvError` if the program has no such method.
        """
        if method not in self._plans:
            raise EtkvError(f"{self.path} has no method {method}")
        return [operator["name"] for operator in self._plans[method].get("operators", [])]

    @property
    def named_data(self) -> dict[str, int]:
        """Return the bytes of each constant that delegates read, by its name."""
        segments = self._tables.get("segments", [])
        return {item["key"]: segments[item["segment_index"]]["size"] for item in self._tables.get("named_data", [])}

    def mlx_payload(self, index: int = 0) -> bytes:
        """Return the payload of MLX delegate number ``index``, counted from 0 over all methods.

        Raises :class:`EtkvError` if there is no such delegate, or if the file is damaged.
        """
        delegates = self._delegates(*_library.FOR_MLX)
        if not 0 <= index < len(delegates):
            raise EtkvError(
                f"{self.path} has no MLX delegate number {index}; it has {len(delegates)}. CPU programs have none"
            )
        return self._payload(delegates[index])

    def cpu_payloads(self) -> list[bytes]:
        """Return the payloads of etkv's CPU delegates, in order over all methods.

        Raises :class:`EtkvError` if the file is damaged.
        """
        return [self._payload(delegate) for delegate in self._delegates(_library.CPU_DELEGATE)]

    def _delegates(self, *backends: str) -> list[dict[str, Any]]:
        delegates = (delegate for plan in self._plans.values() for delegate in plan.get("delegates", []))
        return [delegate for delegate in delegates if delegate["id"] in backends]

    def _payload(self, delegate: dict[str, Any]) -> bytes:
        with self._damage_told():
            place = delegate["processed"]
            if place["location"] == "SEGMENT":
                segment = self._tables["segments"][place["index"]]
                return _read(self.path, self._segments_at + segment["offset"], segment["size"])
            return bytes(self._tables["backend_delegate_data"][place["index"]]["data"])

    @contextlib.contextmanager
    def _damage_told(self) -> Iterator[None]:
        """Convert exceptions of the block to :class:`EtkvError`. A damaged file raises many types of exceptions."""
        try:
            yield
        except EtkvError:
            raise
        except Exception as error:
            raise EtkvError(f"{self.path} is damaged: {first_line(error)}") from error


def _as_json(tables: bytes) -> dict[str, Any]:
    """Return the tables of a program as JSON types, named as in ExecuTorch's ``program.fbs``.

    ExecuTorch has a function for this in a package whose import loads its whole exporter, which takes 4 seconds.
    """
    # First, because it tells that ExecuTorch is missing.
    compiler = flatc()
    schema = _library.installed("executorch", "executorch/exir/_serialize/program.fbs")
    with tempfile.TemporaryDirectory() as scratch:
        binary = Path(scratch, "tables.bin")
        binary.write_bytes(tables)
        options = ("--json", "--defaults-json", "--strict-json", "-o", scratch)
        ran = subprocess.run([compiler, *options, schema, "--", binary], capture_output=True, check=False)
        if ran.returncode != 0:
            raise ValueError(f"its tables cannot be read: flatc ended with {ran.returncode}")
        text = binary.with_suffix(".json").read_text(encoding="utf-8")
    # flatc writes infinite numbers as JSON cannot.
    made: dict[str, Any] = json.loads(re.sub(r'("double_val"\s*:\s*)(-?inf)', r'\1"\2"', text))
    return made


def _read(path: Path, offset: int, n_bytes: int) -> bytes:
    size = path.stat().st_size
    if offset + n_bytes > size:
        raise EtkvError(f"{path} is damaged: it has {size} bytes, but a segment ends at byte {offset + n_bytes}")
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(n_bytes)


def read_tables(path: Path) -> tuple[bytes, int]:
    """Return the tables of a program, and the offset of its segments.

    Raises :class:`EtkvError` if ``path`` cannot be read, is not a program, or is shorter than its tables.
    """
    try:
        with path.open("rb") as file:
            n_tables, segments_at = _extent(file.read(_HEAD.size), path, path.stat().st_size)
            file.seek(0)
            return file.read(n_tables), segments_at
    except OSError as error:
        raise EtkvError(f"{path} cannot be read: {error.strerror}") from error


def _extent(head: bytes, path: Path, size: int) -> tuple[int, int]:
    """Return the size of a file's tables, and the offset of its segments, both in bytes.

    ``head`` is the beginning of the file, and ``size`` the number of its bytes.

    Raises :class:`EtkvError` if the file is not a program, or is shorter than its tables.
    """
    check_mark(head, path)
    n_tables, segments_at = size, 0
    if len(head) == _HEAD.size and head[8:12] == b"eh00":
        _, _, n_tables, segments_at = _HEAD.unpack(head)
    if n_tables > size:
        raise EtkvError(f"{path} is damaged: it has {size} bytes, but its tables have {n_tables}")
    return n_tables, segments_at


def constant_methods(path: Path) -> dict[str, Any]:
    """Return the value of each constant method by its name: an int, a bool, a float or a list of ints.

    Numbers, strings and lists of integers are read from the tables. Methods of other types are run with the wheel's
    runtime, as a runner in C++ does. A method may return a list of ints as one output for each element. This function
    returns a list even for one element.

    Raises :class:`EtkvError` if the program is damaged.
    """
    from etkv import _tables

    tables, segments_at = read_tables(path)
    try:
        outputs_of = _tables.constants(tables, lambda offset, n: _read(path, segments_at + offset, n))
    except _tables.DAMAGE as error:
        raise EtkvError(f"{path} is damaged: {first_line(error)}") from error
    values: dict[str, Any] = {name: _of_outputs(name, outputs) for name, outputs in outputs_of.items() if outputs}
    names = outputs_of.keys() - values.keys()
    return values | _run_constants(path, names) if names else values


def _run_constants(path: Path, names: Iterable[str]) -> dict[str, Any]:
    _library.go_first()
    _library.runtime()
    from executorch.runtime import Runtime, Verification

    try:
        with _library.EXECUTORCH_CALLS:
            program = Runtime.get().load_program(path, verification=Verification.InternalConsistency)
            return {name: constant(program, name) for name in names}
    except DAMAGE as error:
        raise EtkvError(f"{path} is damaged: {first_line(error)}") from error


def output_dtype(path: Path) -> Dtype | None:
    """Return the dtype of a program's first output. The program computes in this dtype."""
    return PteFile(path).output_dtype()


def for_backend(path: Path, backend: str) -> bytes:
    """Return the program at ``path`` with ``backend`` in place of ``MLXBackend``.

    Raises :class:`EtkvError` if the two names differ in length.
    """
    if len(backend) != len(_MLX):
        raise EtkvError(f"backend is {backend!r}, expected a name of {len(_MLX)} characters")
    # A string in a flatbuffer is its length, its characters and a zero.
    before, after = (struct.pack("<I", len(name)) + name.encode() + b"\0" for name in (_MLX, backend))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        n_tables, _ = _extent(whole[: _HEAD.size], path, len(whole))
        with memoryview(whole) as view, view[n_tables:] as segments:
            return b"".join((whole[:n_tables].replace(before, after), segments))


def constant(program: Any, name: str) -> Any:
    """Return the value of the constant method ``name`` of a program that ``executorch.runtime`` has loaded."""
    with _library.EXECUTORCH_CALLS:
        return _of_outputs(name, [_plain(output) for output in program.load_method(name).execute([])])


def _of_outputs(name: str, outputs: list[Any]) -> Any:
    return outputs if name in _LISTS else outputs[0]


def _plain(output: Any) -> Any:
    return output.tolist() if hasattr(output, "tolist") else output
