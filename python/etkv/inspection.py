"""``python -m etkv inspect``: reports the contents of a ``.pte``, whether this build runs it, and the bytes of its
cache."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etkv import _library, pte
from etkv._capi import call, ffi, lib, text
from etkv.config import CacheConfig, LayerConfig
from etkv.description import describe_program, dtype_and_shape
from etkv.errors import EtkvError, StatusError
from etkv.memory import estimate
from etkv.metadata import context_length, describes_layers, read_kv_cache_metadata
from etkv.pte import PteFile
from etkv.recurrent_layer import RecurrentLayer

DEFAULT_FORMATS = ("f32", "f16", "affine4")
"""The storage formats that a report has by default."""

_FACTS = ("kv_cache.", "get_kv_heads", "get_head_dims", "get_windows", "get_n_caches")
"""Prefixes of the constant methods that describe layers. A report omits them, because it lists the layers."""


def report(
    path: str | Path, *, capacity: int | None = None, formats: tuple[str, ...] = DEFAULT_FORMATS
) -> dict[str, Any]:
    """Return a report on the program at ``path``, as JSON types.

    ``cache`` has the bytes of a cache of ``capacity`` positions in each of ``formats``. The default capacity is the
    number of positions that the program was exported for, or 4,096 if the program does not contain it.

    Raises :class:`EtkvError` if the file cannot be read, is not a program, or is damaged.
    """
    path = Path(path)
    file = PteFile(path)
    contents: dict[str, Any] = {"path": str(path), "bytes": file.size, "methods": _methods(file)}
    contents["constants"] = {"count": len(file.named_data), "bytes": sum(file.named_data.values())}
    constants = pte.constant_methods(path)
    contents["tells"] = {name: value for name, value in constants.items() if not name.startswith(_FACTS)}
    if any(not _library.FOR_MLX.isdisjoint(ids) for ids in file.delegates.values()):
        described = describe_program(path)
        contents["program"] = _program(described)
        contents["runs_here"] = _runs_here(described, file)
    elif payloads := file.cpu_payloads():
        contents["runs_here"] = _runs_here({"refused": _refusal(payloads)}, file, ("aten::", "executorch_prim::"))
    if _has_graph_cache(contents, constants):
        buffers = contents["program"]["mutable_buffers"]
        contents["layers"], contents["cache"] = (
            None,
            {"in_graph": {"buffers": buffers, "capacity": context_length(constants)}},
        )
        return contents
    try:
        facts = read_kv_cache_metadata(path)
    except EtkvError as error:
        contents["layers"], contents["cache"] = None, {"unknown": str(error)}
        return contents
    contents["layers"] = [_layer(layer) for layer in facts.layers]
    if facts.recurrent_layers:
        contents["recurrent_layers"] = [_recurrent_layer(layer) for layer in facts.recurrent_layers]
    positions = capacity or facts.max_context_length or 4096
    contents["cache"] = {
        "capacity": positions,
        "bytes": {name: _cache_bytes(facts.layers, facts.prefill_chunk_size, positions, name) for name in formats},
    }
    return contents


def _has_graph_cache(contents: dict[str, Any], constants: dict[str, Any]) -> bool:
    """Return whether the program has its cache in its graph: it has mutable buffers and uses no other cache."""
    program = contents.get("program", {"mutable_buffers": 0})
    return program["mutable_buffers"] > 0 and not program["attention_layers"] and not describes_layers(constants)


def _methods(file: PteFile) -> dict[str, Any]:
    constant = set(file.constant_names)
    return {
        name: {"delegates": ids, "operators": file.operators(name)}
        for name, ids in file.delegates.items()
        if name not in constant
    }


def _program(described: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: [_argument_text(argument) for argument in described[name]] for name in ("inputs", "outputs")},
        **{name: _counts(described[name]) for name in ("operations", "operations_at_load")},
        **{name: described[name] for name in ("attention_layers", "mutable_buffers")},
        "passes": described["passes"],
        "passes_on_gpu": described["passes_on_gpu"],
        "steps_on_cuda": described["steps_on_cuda"],
    }


def _counts(operations: list[dict[str, Any]]) -> dict[str, int]:
    return {counted["operation"]: counted["count"] for counted in operations}


def _refusal(payloads: list[bytes]) -> str | None:
    """Return the reason why this build cannot run the delegates of a CPU program; None if it can."""
    try:
        for payload in payloads:
            call("etkv_delegate_check", ffi.from_buffer("uint8_t[]", payload), len(payload))
    except StatusError as error:
        return str(error)
    return None


def _runs_here(described: dict[str, Any], file: PteFile, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the versions of this build, and whether it runs the program. ``why`` is the reason why it does not, or
    the condition under which it does.

    Operators that begin with one of ``known`` are left out of the condition: every runtime of such programs has them.
    """
    versions = {"etkv": lib().etkv_version(), "mlx": lib().etkv_mlx_version(), "blas": lib().etkv_mlx_blas()}
    build = {name: text(version) for name, version in versions.items()}
    left = sorted({name for method in file.delegates for name in file.operators(method) if not name.startswith(known)})
    if described["refused"] is not None:
        return {**build, "runs": False, "why": described["refused"]}
    if left:
        return {**build, "runs": True, "why": f"if ExecuTorch has these operators: {', '.join(left)}"}
    return {**build, "runs": True}


def _layer(layer: LayerConfig) -> dict[str, Any]:
    return {
        "n_kv_heads": layer.n_kv_heads,
        "k_head_dim": layer.k_head_dim,
        "v_head_dim": layer.value_dim,
        "window": layer.window,
        "sinks": layer.sinks,
        "chunk": layer.chunk,
        "dtype": layer.dtype,
        "values_in_keys": layer.values_in_keys,
    }


def _recurrent_layer(layer: RecurrentLayer) -> dict[str, Any]:
    """Return the kind and the sizes of a recurrent layer, with the names that a cache's report uses."""
    if layer.kind == "convolution":
        return {"kind": layer.kind, "channels": layer.channels, "width": layer.width}
    names = ("kind", "k_heads", "heads", "k_dim", "v_dim", "channel_decay")
    return {name: getattr(layer, name) for name in names}


def _cache_bytes(layers: tuple[LayerConfig, ...], chunk: int, capacity: int, name: str) -> dict[str, Any]:
    config = CacheConfig(layers, capacity, k_format=name, v_format=name, max_step_tokens=chunk)
    try:
        return {"at_capacity": estimate(config, capacity).allocated, "a_position": estimate(config, 1).used}
    except StatusError as error:
        return {"not_possible": str(error)}


# ---- As text --------------------------------------------------------------------------------------------------------


def lines(contents: dict[str, Any]) -> Iterator[str]:
    """Yield a report as text, line by line."""
    yield f"{contents['path']}: {_bytes(contents['bytes'])}"
    for name, method in contents["methods"].items():
        parts = Counter([*method["delegates"], *method["operators"]])
        yield f"method {name}: {', '.join(part if n == 1 else f'{part} ({n} times)' for part, n in parts.items())}"
    if "runs_here" in contents:
        yield _runs_text(contents["runs_here"])
    yield f"constants: {contents['constants']['count']}, {_bytes(contents['constants']['bytes'])}"
    for name, value in contents["tells"].items():
        yield f"{name}: {value}"
    if "get_draft_tap" in contents["tells"]:
        yield f"a draft, which reads the hidden states of its model's layer {contents['tells']['get_draft_tap']}"
    yield from _cache_lines(contents)
    if "program" in contents:
        program = contents["program"]
        yield f"inputs of the delegate: {', '.join(program['inputs'])}"
        yield f"outputs of the delegate: {', '.join(program['outputs'])}"
        yield from _operation_lines("operations at load", program["operations_at_load"])
        yield from _operation_lines("operations a step", program["operations"])
        yield from _pass_lines("on the CPU", program["passes"])
        yield from _pass_lines("on a GPU", program["passes_on_gpu"])
        if steps := program["steps_on_cuda"]:
            yield f"steps of a few tokens on CUDA: {steps if steps == 'captured' else f'not captured: {steps}'}"


def _runs_text(runs: dict[str, Any]) -> str:
    build = f"etkv {runs['etkv']}, MLX {runs['mlx']}"
    if not runs["runs"]:
        return f"does not run here ({build}): {runs['why']}"
    return f"runs here ({build}){', ' + runs['why'] if 'why' in runs else ''}"


def _cache_lines(contents: dict[str, Any]) -> Iterator[str]:
    if in_graph := contents["cache"].get("in_graph"):
        capacity = f" for {in_graph['capacity']} positions" if in_graph["capacity"] else ""
        yield f"cache: part of the program, in {in_graph['buffers']} buffers{capacity}; load it without a session"
        return
    if contents["layers"] is None:
        yield f"cache: {contents['cache']['unknown']}"
        return
    for layer, same in itertools.groupby(contents["layers"]):
        yield f"cache: {_layers_text(len(list(same)))} of {_layer_text(layer)}"
    # Convolutions and recurrences alternate. So this counts all equal layers, not only adjacent ones.
    for layer_text, n in Counter(map(_recurrent_layer_text, contents.get("recurrent_layers", ()))).items():
        yield f"cache: {_layers_text(n, 'recurrent ')}: {layer_text}"
    for name, size in contents["cache"]["bytes"].items():
        if "not_possible" in size:
            yield f"cache in {name}: not possible: {size['not_possible']}"
            continue
        at_capacity, a_position = _bytes(size["at_capacity"]), _bytes(size["a_position"])
        yield (
            f"cache in {name}: {at_capacity} at {contents['cache']['capacity']} positions, "
            f"{a_position} for the first one"
        )


def _layers_text(n: int, kind: str = "") -> str:
    return f"{n} {kind}{'layer' if n == 1 else 'layers'}"


def _recurrent_layer_text(layer: dict[str, Any]) -> str:
    if layer["kind"] == "convolution":
        return f"convolution of {layer['channels']} channels, width {layer['width']}"
    heads = f"{layer['heads']} heads ({layer['k_heads']} of keys)"
    decay = "channel" if layer["channel_decay"] else "head"
    return f"recurrence of {heads}, states of {layer['k_dim']} x {layer['v_dim']}, a decay for each {decay}"


def _layer_text(layer: dict[str, Any]) -> str:
    k, v = layer["k_head_dim"], layer["v_head_dim"]
    heads = f"{layer['n_kv_heads']} KV {'head' if layer['n_kv_heads'] == 1 else 'heads'}"
    size = f"head_dim {k}" if k == v else f"head_dim {k} (keys) and {v} (values)"
    if layer["values_in_keys"]:
        size = f"head_dim {k} with {'the value' if k == v else f'a value of {v}'} in it"
    dtype = f", stored as {layer['dtype']} by default" if layer["dtype"] else ""
    if layer["chunk"]:
        return f"{heads}, {size}, chunks of {layer['chunk']}{dtype}"
    if not layer["window"]:
        return f"{heads}, {size}, full history{dtype}"
    sinks = f" and the first {layer['sinks']}" if layer["sinks"] else ""
    return f"{heads}, {size}, a window of {layer['window']}{sinks}{dtype}"


def _operation_lines(title: str, counts: dict[str, int]) -> Iterator[str]:
    yield f"{title}: {sum(counts.values())}"
    for name, count in counts.items():
        yield f"  {count:6} {name}"


def _pass_lines(where: str, passes: list[dict[str, Any]]) -> Iterator[str]:
    if passes:
        yield f"instructions {where}: {passes[0]['before']}, {passes[-1]['after']} after the passes"
    for done in passes:
        if done["changed"]:
            counts = f"{done['before']} to {done['after']}"
            yield f"  pass {done['name']}, {counts}: {_changes_text(done['changed'])}"


def _changes_text(changed: list[dict[str, Any]]) -> str:
    return ", ".join(f"{change['before']} {change['operation']} to {change['after']}" for change in changed)


def _bytes(n: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def instruction_lines(described: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each instruction, with its fields. ``t7`` is tensor 7, and ``v2`` is integer slot 2."""
    for label, chain in (("at load", "instructions_at_load"), ("a step", "instructions")):
        yield f"instructions {label}:"
        for index, instruction in enumerate(described[chain]):
            yield f"{index:5} {instruction['operation']} {instruction['fields']}"


def _argument_text(argument: dict[str, Any]) -> str:
    return "integer" if argument["shape"] is None else f"{argument['name']} {dtype_and_shape(argument)}"


# ---- The command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m etkv inspect`` to ``parser``."""
    parser.add_argument("program", type=Path, metavar="MODEL.pte")
    parser.add_argument(
        "--capacity", type=int, metavar="N", help="positions of the cache (default: those the program was exported for)"
    )
    parser.add_argument(
        "--format",
        action="append",
        metavar="NAME",
        help="storage format of keys and values, such as f16 or affine4g64; may be repeated "
        f"(default: {', '.join(DEFAULT_FORMATS)})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--instructions", action="store_true", help="also print every instruction with its fields")


def run(options: argparse.Namespace) -> list[str]:
    """Return the lines that the command prints. Raises :class:`EtkvError` for a wrong option or file."""
    if options.capacity is not None and options.capacity < 1:
        raise EtkvError(f"capacity is {options.capacity}, the minimum is 1")
    contents = report(options.program, capacity=options.capacity, formats=tuple(options.format or DEFAULT_FORMATS))
    described = describe_program(options.program) if options.instructions else {}
    if options.json:
        chains = ("instructions_at_load", "instructions")
        return [json.dumps(contents | {name: described[name] for name in chains if name in described}, indent=2)]
    printed = list(lines(contents))
    if options.instructions:
        printed += instruction_lines(described)
    return printed
