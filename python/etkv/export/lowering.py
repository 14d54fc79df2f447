"""Turns a model in memory into an ExecuTorch program with one MLX delegate and its KV caches outside the graph."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError, root_line
from etkv.export.limits import Limits
from etkv.export.progress import Progress
from etkv.export.request import ExportRequest
from etkv.metadata import write_kv_cache_metadata

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager, ExecutorchProgramManager
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

    from etkv.export.draft import DraftForward
    from etkv.export.forward import Forward

METHOD = "forward"


def quantize(model: PreTrainedModel, name: str, group_size: int | None) -> None:
    """Quantize every linear and embedding weight of ``model`` in place. A tied output layer stays tied.

    ``group_size`` counts elements; ``None`` is one scale a row.
    """
    from executorch.backends.mlx.llm.quantization import quantize_model_

    # 0 asks for one scale a row; None would take ExecuTorch's default.
    size = group_size or 0
    quantize_model_(
        model,
        qlinear_config=name,
        qlinear_group_size=size,
        qembedding_config=name,
        qembedding_group_size=size,
        tie_word_embeddings=bool(model.config.get_text_config().tie_word_embeddings),
    )


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


def lower(
    step: Forward | DraftForward, limits: Limits, methods: dict[str, Any], progress: Progress
) -> ExecutorchProgramManager:
    """Return the program of ``step``, with T from 1 to ``limits.prefill_chunk``.

    Raises :class:`EtkvError` if the family cannot be traced, does not route its attention through the KV cache op, or
    has an operator that the MLX backend lacks.
    """
    family = step.model.config.model_type
    with progress.step("tracing the graph"):
        try:
            traced = _trace(step, limits.prefill_chunk)
        except Exception as error:
            raise EtkvError(f"model family {family!r} cannot be traced: {_reason(error)}") from error
        _check_caches(traced, limits, family)
    with progress.step("delegating to MLX"):
        edge = _delegate(traced, methods)
        _check_delegation(edge, family)
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


def _delegate(traced: ExportedProgram, methods: dict[str, Any]) -> EdgeProgramManager:
    from executorch import exir
    from executorch.backends.mlx import MLXPartitioner
    from executorch.backends.mlx.passes import get_default_passes

    return exir.to_edge_transform_and_lower(
        {METHOD: traced},
        transform_passes=get_default_passes(),
        partitioner=[MLXPartitioner()],
        constant_methods=methods,
        # The KV cache op is not part of the edge dialect, and MLX has its own dimension order.
        compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )


def _check_delegation(edge: EdgeProgramManager, family: str) -> None:
    """Raise :class:`EtkvError` unless the whole graph is one delegate. Portable kernels lack the KV cache op."""
    from executorch.exir.delegate import executorch_call_delegate

    calls = [node.target for node in edge.exported_program(METHOD).graph.nodes if node.op == "call_function"]
    delegates = [call for call in calls if call is executorch_call_delegate]
    left = sorted({call.__name__ for call in calls if call not in (executorch_call_delegate, operator.getitem)})
    if left:
        raise EtkvError(f"model family {family!r} has operators that the MLX backend lacks: {', '.join(left)}")
    if len(delegates) != 1:
        raise EtkvError(f"model family {family!r} splits into {len(delegates)} delegates, and a program has one")


def _serialize(edge: EdgeProgramManager) -> ExecutorchProgramManager:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    return edge.to_executorch(
        config=ExecutorchBackendConfig(
            extract_delegate_segments=True,
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=True),
        )
    )
