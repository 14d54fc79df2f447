"""Turns a model in memory into an ExecuTorch program whose KV caches are outside the graph."""

from __future__ import annotations

import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError, root_line
from etkv.export import cpu, mlx
from etkv.export.limits import Limits
from etkv.export.progress import Progress
from etkv.export.request import ExportRequest
from etkv.metadata import BACKEND, write_kv_cache_metadata

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager, ExecutorchProgramManager
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

    from etkv.export.draft import DraftForward
    from etkv.export.forward import Forward

METHOD = "forward"


def quantize(model: PreTrainedModel, request: ExportRequest, group_size: int | None) -> None:
    """Quantize the weights of ``model`` in place, as the request says. ``group_size`` counts elements."""
    _target(request.backend).quantize(model, request.quantize, group_size)


def constant_methods(request: ExportRequest, limits: Limits, generation: dict[str, Any]) -> dict[str, Any]:
    """Return the constant methods of the program: name -> value.

    The first six are those of ExecuTorch's MLX exporter. ``get_bos_id`` and ``get_eos_ids`` are those that ExecuTorch's
    own LLM runner reads. ``get_logits_rows`` is 0 for a row of logits a token, and 1 for the last token's row only.
    ``get_tap_layers`` is there if hidden states are an output. ``kv_cache.*`` has the facts of the first four, with a
    version.
    """
    import torch

    layout = limits.layout
    methods: dict[str, Any] = {
        "get_n_caches": len(layout.kv_heads),
        "get_kv_heads": torch.tensor(layout.kv_heads, dtype=torch.int32),
        "get_head_dims": torch.tensor(layout.head_dims, dtype=torch.int32),
        "get_windows": torch.tensor(layout.windows, dtype=torch.int32),
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
        v_head_dim=_once(layout.head_dims),
        window=_once(layout.windows),
        sinks=0,
    )


def _once(facts: list[int]) -> int | list[int]:
    """Return one number if it is the same for all layers, and else ``facts``."""
    return facts[0] if len(set(facts)) == 1 else facts


def _target(backend: str) -> ModuleType:
    """Return the module that exports for ``backend``."""
    return {"mlx": mlx, "cpu": cpu}[backend]


def lower(
    step: Forward | DraftForward, request: ExportRequest, limits: Limits, methods: dict[str, Any], progress: Progress
) -> ExecutorchProgramManager:
    """Return the program of ``step``, with T from 1 to ``limits.prefill_chunk``.

    Raises :class:`EtkvError` if the family cannot be traced, does not route its attention through the KV cache op, or
    has an operator that the backend lacks.
    """
    family = step.model.config.model_type
    target = _target(request.backend)
    target.prepare(step.model, request)
    with progress.step("tracing the graph"):
        try:
            traced = _trace(step, limits.prefill_chunk)
        except Exception as error:
            raise EtkvError(f"model family {family!r} cannot be traced: {_reason(error)}") from error
        _check_caches(traced, limits, family)
    with progress.step(f"delegating to {target.NAME}"):
        edge = target.delegate({METHOD: traced}, methods, request)
        target.check(edge.exported_program(METHOD).graph, family)
    with progress.step("serializing"):
        return _serialize(edge)


def _trace(step: Forward | DraftForward, chunk: int) -> ExportedProgram:
    import torch

    # The tracer treats an example of one token as a static shape.
    inputs = step.inputs(min(3, chunk))
    tokens = torch.export.Dim("tokens", min=1, max=chunk)
    with torch.no_grad():
        return torch.export.export(
            step,
            args=(),
            kwargs=inputs,
            # Tokens are the first axis of positions, and the second of all other inputs.
            dynamic_shapes={name: {min(1, example.dim() - 1): tokens} for name, example in inputs.items()},
            strict=True,
        )


def _reason(error: Exception) -> str:
    """Return the reason why tracing failed, from the message of the tracer."""
    line = root_line(error)
    raised = re.fullmatch(r"raised exception \w+\((['\"])(.*)\1\)", line)
    return raised[2] if raised else line


def _check_caches(traced: ExportedProgram, limits: Limits, family: str) -> None:
    """Raise :class:`EtkvError` unless the program uses every cache that it declares, and no other."""
    import torch

    op = torch.ops.kvcache.update_and_attend.default
    used = {
        node.kwargs["layer_id"] if "layer_id" in node.kwargs else node.args[4]
        for node in traced.graph.nodes
        if node.target is op
    }
    declared = len(limits.layout.kv_heads)
    if not used:
        raise EtkvError(
            f"model family {family!r} cannot be exported: the KV cache op cannot take its attention's place"
        )
    if used != set(range(declared)):
        raise EtkvError(
            f"model family {family!r} cannot be exported: it declares {declared} KV caches, "
            f"and its attention uses {len(used)}"
        )


def _serialize(edge: EdgeProgramManager) -> ExecutorchProgramManager:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    return edge.to_executorch(
        config=ExecutorchBackendConfig(
            extract_delegate_segments=True,
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=True),
        )
    )
