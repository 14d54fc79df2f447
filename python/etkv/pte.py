"""Reads what an exported ``.pte`` holds: its delegates, its constant methods and the MLX instructions.

``python -m etkv.pte MODEL.pte`` prints a summary; ``--instructions`` adds every instruction with its fields.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etkv._mlx_serialization import ensure_available
from etkv.errors import EtkvError, first_line
from etkv.export.progress import third_party_noise

_LISTS = frozenset({"get_eos_ids"})
"""Constant methods with one output an element."""

_SCALAR_TYPES = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    11: "bool",
    15: "bfloat16",
    28: "uint32",
}


@dataclass(frozen=True)
class MlxProgram:
    """One MLX delegate, decoded by the wheel's own inspector.

    ``graph`` is the inspector's dictionary; ``tensors`` has one text per tensor id, such as ``float32[1, 1..512, 64]``
    (empty for a temporary, whose shape is not recorded); ``names`` maps a tensor id to its name in the source program.
    """

    graph: dict[str, Any]
    tensors: list[str]
    names: dict[int, str]

    @property
    def main_chain(self) -> list[dict[str, Any]]:
        """The instructions that run at every execution."""
        return self._chain(self.graph["main_chain_idx"])

    @property
    def init_chain(self) -> list[dict[str, Any]]:
        """The instructions that run once, when the program is loaded."""
        return self._chain(self.graph["init_chain_idx"])

    def _chain(self, index: int) -> list[dict[str, Any]]:
        chains = self.graph["instruction_chains"]
        return chains[index]["instructions"] if 0 <= index < len(chains) else []


def delegates(path: Path) -> dict[str, list[str]]:
    """Method name -> ids of the delegates that it calls, in order.

    Raises :class:`EtkvError` if ``path`` is not an ExecuTorch program.
    """
    return {
        plan["name"]: [delegate["id"] for delegate in plan.get("delegates", [])]
        for plan in _program(path)["execution_plan"]
    }


def undelegated_operators(path: Path, method: str = "forward") -> list[str]:
    """Names of the operators of ``method`` that run outside any delegate."""
    for plan in _program(path)["execution_plan"]:
        if plan["name"] == method:
            return [operator["name"] for operator in plan.get("operators", [])]
    raise EtkvError(f"{path} has no method {method}")


def constant_methods(path: Path) -> dict[str, Any]:
    """Constant method name -> its value: an int, a bool, a float or a list of ints.

    A constant method takes no inputs and calls no delegate. Runs each with the wheel's runtime, so what comes back is
    what a runner in C++ reads. A list of ints, which a program keeps as one output an element, is a list here even if
    it has one element only.
    """
    from executorch.runtime import Runtime, Verification

    plans = _program(path)["execution_plan"]
    names = [plan["name"] for plan in plans if not plan.get("inputs") and not plan.get("delegates")]
    program = Runtime.get().load_program(path, verification=Verification.Minimal)
    return {name: _plain(name, program.load_method(name).execute([])) for name in names}


def mlx_program(path: Path, index: int = 0) -> MlxProgram:
    """The MLX delegate number ``index`` of the program at ``path``."""
    ensure_available()
    from executorch.backends.mlx import pte_inspector

    with _damage_told(path):
        payload = pte_inspector.extract_delegate_payload(_read(path), "mlx", delegate_index=index)
    if payload is None:
        raise EtkvError(f"{path} has no MLX delegate number {index}")
    graph = pte_inspector.parse_mlx_payload(payload)["graph"]
    if "error" in graph:
        raise EtkvError(f"{path}: the MLX delegate cannot be read: {graph['error']}")
    names = {slot["slot_idx"]: slot["name"] for slot in graph["named_slots"] if slot["slot_type"] == 0}
    return MlxProgram(graph, _tensor_texts(payload), names)


def describe(program: MlxProgram) -> Iterator[str]:
    """The summary of a program, line by line."""
    graph = program.graph
    yield (
        f"tensors: {graph['num_constant_tensors']} constants, {graph['num_input_tensors']} inputs, "
        f"{graph['num_output_tensors']} outputs, {graph['num_mutable_buffer_tensors']} mutable buffers, "
        f"{graph['num_temp_tensors']} temporaries; {graph['num_values']} values"
    )
    for label, slots in (("inputs", graph["input_map"]), ("outputs", graph["output_map"])):
        yield f"{label}: " + ", ".join(_slot_text(program, slot) for slot in slots)
    for label, chain in (("init chain", program.init_chain), ("main chain", program.main_chain)):
        yield f"{label}: {len(chain)} instructions"
        for name, count in Counter(instruction["op_name"] for instruction in chain).most_common():
            yield f"  {count:6} {name}"


def instruction_text(program: MlxProgram, instruction: dict[str, Any]) -> str:
    """One instruction as a line: its name, then each field; ``t7`` is a tensor, ``v2`` an integer value slot."""
    fields = (
        f"{key}={_field_text(program, value)}"
        for key, value in instruction.items()
        if key not in ("instr_idx", "op_type", "op_name")
    )
    return f"{instruction['instr_idx']:5} {instruction['op_name']} " + " ".join(fields)


def _program(path: Path) -> dict[str, Any]:
    from executorch.exir._serialize._flatbuffer import _program_flatbuffer_to_json

    with _damage_told(path):
        return json.loads(_program_flatbuffer_to_json(_read(path)))


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EtkvError(f"{path} cannot be read: {error.strerror}") from error
    if data[4:6] != b"ET":
        raise EtkvError(f"{path} is not an ExecuTorch program")
    return data


@contextlib.contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """Tell what readers of flatbuffers raise on a damaged file, which is of many types, as an :class:`EtkvError`."""
    try:
        yield
    except EtkvError:
        raise
    except Exception as error:
        raise EtkvError(f"{path} is damaged: {first_line(error)}") from error


def _plain(name: str, outputs: Any) -> Any:
    values = [output.tolist() if hasattr(output, "tolist") else output for output in outputs]
    return values if name in _LISTS else values[0]


def _tensor_texts(payload: bytes) -> list[str]:
    from executorch.backends.mlx.serialization import parse_header
    from executorch.backends.mlx.serialization._generated.mlx_delegate.MLXGraph import MLXGraph

    start, size, _, _ = parse_header(payload)
    graph = MLXGraph.GetRootAs(payload[start : start + size], 0)
    texts = []
    for index in range(graph.TensorMetaLength()):
        meta = graph.TensorMeta(index)
        if meta is None:
            texts.append("")
            continue
        dims = ", ".join(_dim_text(meta.Shape(axis)) for axis in range(meta.ShapeLength()))
        texts.append(f"{_SCALAR_TYPES.get(meta.ScalarType(), meta.ScalarType())}[{dims}]")
    return texts


def _dim_text(dim: Any) -> str:
    if dim.Value() != -1:
        return str(dim.Value())
    return f"{dim.MinValue()}..{dim.MaxValue() if dim.MaxValue() != -1 else ''}"


def _slot_text(program: MlxProgram, slot: dict[str, int]) -> str:
    index = slot["idx"]
    return _tensor_text(program, index) if slot["slot_type"] == 0 else f"v{index}"


def _tensor_text(program: MlxProgram, index: int) -> str:
    name = program.names.get(index, "")
    meta = program.tensors[index] if index < len(program.tensors) else ""
    note = ":".join(part for part in (name, meta) if part)
    return f"t{index}({note})" if note else f"t{index}"


def _field_text(program: MlxProgram, value: Any) -> str:
    if isinstance(value, dict):
        if "tid" in value:
            return _tensor_text(program, value["tid"])
        if "vid" in value:
            return f"v{value['vid']}"
        if "literal" in value:
            return str(value["literal"])
    if isinstance(value, list):
        return "[" + ", ".join(_field_text(program, item) for item in value) + "]"
    if isinstance(value, str) and value.startswith("tid "):
        return _tensor_text(program, int(value[4:]))
    return str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m etkv.pte", description="Show what an exported .pte holds.")
    parser.add_argument("program", type=Path, metavar="MODEL.pte")
    parser.add_argument("--instructions", action="store_true", help="also print every instruction with its fields")
    options = parser.parse_args(arguments)
    try:
        with third_party_noise(allowed=False):
            lines = list(_report(options.program, options.instructions))
    except EtkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _report(path: Path, instructions: bool) -> Iterator[str]:
    for method, ids in delegates(path).items():
        yield f"method {method}: {', '.join(ids) if ids else 'constant'}"
    for name, value in constant_methods(path).items():
        yield f"{name}: {value}"
    program = mlx_program(path)
    yield from describe(program)
    if instructions:
        for label, chain in (("init chain", program.init_chain), ("main chain", program.main_chain)):
            yield f"{label}:"
            for instruction in chain:
                yield instruction_text(program, instruction)


if __name__ == "__main__":
    sys.exit(main())
