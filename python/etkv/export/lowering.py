"""Lowers a model in memory to an ExecuTorch program whose KV caches are outside the graph."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from etkv.config import Dtype
from etkv.errors import EtkvError
from etkv.export import cpu, mlx
from etkv.export.attention import CacheLayout
from etkv.export.graphs import argument
from etkv.export.limits import Limits
from etkv.export.progress import Progress
from etkv.export.reasons import explained
from etkv.export.request import ExportRequest
from etkv.metadata import BACKEND, VALUES_IN_KEYS, write_kv_cache_metadata

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager, ExecutorchProgramManager
    from torch.export import ExportedProgram

    from etkv.export import packing
    from etkv.export.draft import DraftForward
    from etkv.export.forward import Forward
    from etkv.export.scratch import Scratch

METHOD = "forward"

_DTYPES: dict[str, Dtype] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The dtype of activations -> its name in the metadata."""


def packer(request: ExportRequest, group_size: int | None, scratch: Scratch) -> packing.Packer | None:
    """Return the packer of the request's backend; None if weights are not packed. ``group_size`` counts elements."""
    found: packing.Packer | None = _target(request.backend).packer(request, group_size, scratch)
    return found


def constant_methods(
    request: ExportRequest, limits: Limits, layout: CacheLayout, generation: dict[str, Any]
) -> dict[str, Any]:
    """Return the constant methods of the program: name -> value.

    ExecuTorch's MLX exporter also writes the first six. ExecuTorch's own LLM runner reads ``get_bos_id`` and
    ``get_eos_ids``. ``get_logits_rows`` is 0 for one row of logits for each token, and 1 for only the last token's row.
    ``get_tap_layers`` is present if hidden states are an output. ``kv_cache.*`` repeats the facts of the first four
    methods, with a version.
    """
    of_exporter: dict[str, Any] = {
        "get_n_caches": len(layout.kv_heads),
        "get_kv_heads": torch.tensor(layout.kv_heads, dtype=torch.int32),
        "get_head_dims": torch.tensor(layout.head_dims, dtype=torch.int32),
        "get_windows": torch.tensor(layout.windows, dtype=torch.int32),
    }
    methods: dict[str, Any] = {
        # With these facts, ExecuTorch's runners would run a program with recurrent layers or chunks incorrectly.
        **({} if layout.recurrent or any(layout.chunks) else of_exporter),
        "get_prefill_chunk_size": limits.prefill_chunk,
        "get_max_ctx_len": limits.max_context,
        "get_logits_rows": 1 if request.logits == "last" else 0,
    }
    if request.backend == "cpu":
        methods[BACKEND] = "cpu"
    if request.tap_layers:
        methods["get_tap_layers"] = torch.tensor(request.tap_layers, dtype=torch.int32)
    if generation.get("bos_token_id") is not None:
        methods["get_bos_id"] = generation["bos_token_id"]
    if generation["eos_token_id"]:
        methods["get_eos_ids"] = generation["eos_token_id"]
    return write_kv_cache_metadata(
        methods,
        n_layers=len(layout.kv_heads),
        n_kv_heads=_once(layout.kv_heads),
        head_dim=_once(layout.head_dims),
        v_head_dim=_once(layout.v_head_dims),
        window=_once(layout.windows),
        chunk=_once(layout.chunks) if any(layout.chunks) else None,
        sinks=0,
        dtype=_DTYPES[request.activations],
        recurrent_layers=layout.recurrent,
    )


def _in_keys(caches: list[bool]) -> dict[str, Any]:
    """Return the constant method that lists which caches keep their values in their keys; empty if none does."""
    fact = _once([int(in_keys) for in_keys in caches])
    if not any(caches):
        return {}
    return {VALUES_IN_KEYS: fact if isinstance(fact, int) else torch.tensor(fact, dtype=torch.int32)}


def _once(facts: list[int]) -> int | list[int]:
    """Return one number if ``facts`` are equal in all layers, else ``facts``."""
    return facts[0] if len(set(facts)) == 1 else facts


def _target(backend: str) -> ModuleType:
    """Return the module that exports for ``backend``."""
    return {"mlx": mlx, "cpu": cpu}[backend]


def lower(
    step: Forward | DraftForward,
    request: ExportRequest,
    limits: Limits,
    layout: CacheLayout,
    methods: dict[str, Any],
    scratch: Scratch,
    progress: Progress,
) -> tuple[ExecutorchProgramManager, list[str]]:
    """Return the program of ``step``, with T from 1 to ``limits.prefill_chunk`` and the caches of ``layout``.

    Also returns the names of the program's parts, see :mod:`etkv.export.parts`.

    Raises :class:`EtkvError` if the family cannot be traced, if its calls of the KV cache op do not match ``layout``,
    if its tokens depend on each other outside of the ops of the cache, or if the backend lacks one of its operators.
    """
    from etkv.export import complex_numbers, parts, streaming, tokens, values_in_keys
    from etkv.export.forward import samples

    family = step.model.config.model_type
    target = _target(request.backend)
    with progress.step("tracing the graph"), explained(family, "traced", step.model):
        target.prepare(step.model, request, scratch)
        traced = _trace(step, limits.prefill_chunk)
        _check_caches(traced, layout, family)
        methods = {**methods, **_in_keys(values_in_keys.of(traced, len(layout.kv_heads)))}
    with progress.step("checking that tokens interact only in the cache"), explained(family, "checked", step.model):
        tokens.check(traced, samples(step, 3), limits.max_context, family, scratch.used)
        scratch.release()
        complex_numbers.replace(traced)
    found = parts.of(traced, layout)
    with (
        progress.step(f"delegating to {target.NAME}"),
        explained(family, f"delegated to {target.NAME}"),
        streaming.streaming(scratch),
    ):
        edge = target.delegate({METHOD: traced}, methods, request)
        target.check(edge.exported_program(METHOD).graph, family)
    with progress.step("serializing"), explained(family, "serialized"), streaming.streaming(scratch):
        return _serialize(edge), found


def _trace(step: Forward | DraftForward, chunk: int) -> ExportedProgram:
    # The tracer treats an example of one token as a static shape.
    inputs = step.inputs(min(3, chunk))
    length = torch.export.Dim("tokens", min=1, max=chunk)
    with torch.no_grad():
        traced = torch.export.export(
            step,
            args=(),
            kwargs=inputs,
            # Tokens are the first axis of positions, and the second of all other inputs.
            dynamic_shapes={name: {min(1, example.dim() - 1): length} for name, example in inputs.items()},
        )
    # If a model reads only the dtype of packed weights, the trace has unpacked them for nothing.
    traced.graph.eliminate_dead_code()
    traced.graph_module.recompile()
    return traced


def _check_caches(traced: ExportedProgram, layout: CacheLayout, family: str) -> None:
    """Raise :class:`EtkvError` unless the graph calls the KV cache op with the layers and sizes of ``layout``."""
    packet = torch.ops.kvcache.update_and_attend
    attentions = (packet.default, packet.sinks)
    sizes: dict[int, set[tuple[int, int, int]]] = {}
    for node in traced.graph.nodes:
        if node.target in attentions:
            _, key, value = (given.meta["val"] for given in node.args[:3])
            sizes.setdefault(argument(node, 4, "layer_id"), set()).add((key.shape[1], key.shape[3], value.shape[3]))
    _check_states(traced, layout, family)
    declared = dict(enumerate(zip(layout.kv_heads, layout.head_dims, layout.v_head_dims, strict=True)))
    if sizes != {layer: {size} for layer, size in declared.items()}:
        raise EtkvError(
            f"model family {family!r} cannot be exported: in the trace, its attention uses the caches {sizes} (heads, "
            f"and elements of a key and a value), but in plain PyTorch {declared}"
        )


def _check_states(traced: ExportedProgram, layout: CacheLayout, family: str) -> None:
    """Raise :class:`EtkvError` unless the graph calls the ops of recurrent layers once for each layer, in order."""
    ops: Any = torch.ops.kvcache
    numbers = {}
    if layout.recurrent:
        numbers = {ops.update_and_convolve.default: 4, ops.update_and_scan.default: 6}
    nodes = (node for node in traced.graph.nodes if node.target in numbers)
    called = [argument(node, numbers[node.target], "layer_id") for node in nodes]
    if called != list(range(len(layout.recurrent))):
        raise EtkvError(
            f"model family {family!r} cannot be exported: in the trace, it calls its recurrent layers {called}, but in "
            f"plain PyTorch {len(layout.recurrent)} in order"
        )


def _serialize(edge: EdgeProgramManager) -> ExecutorchProgramManager:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite
    from executorch.exir.passes import MemoryPlanningPass

    from etkv.export import memory

    return edge.to_executorch(
        config=ExecutorchBackendConfig(
            extract_delegate_segments=True,
            memory_planning_pass=MemoryPlanningPass(MemoryPlanningAlgorithmSuite([memory.plan])),
        )
    )
