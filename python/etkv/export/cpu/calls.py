"""The calls of a graph that etkv runs, each in a delegate of its own.

``kvcache::update_and_attend`` writes and reads a layer of the cache. ``etkv::select_rows`` returns the rows of which
the head of the model computes logits: all, or the last, as the load says. ``etkv::select_by_capacity`` returns one of
two tensors by the capacity of the cache. ``crates/etkv-cpu/src/program/payload.rs`` reads the payloads.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

VERSION = 1
"""The version of the payloads."""

_ATTEND = "update_and_attend"
_SELECT = "select_rows"
_BY_CAPACITY = "select_by_capacity"
_TENSORS = 4
"""Tensors of ``update_and_attend``: queries, keys, values and positions."""


@torch.library.custom_op(f"etkv::{_SELECT}", mutates_args=())
def select_rows(hidden: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``hidden`` [1, T, hidden] of which the head computes logits: all, in plain PyTorch."""
    return hidden.clone()


@select_rows.register_fake
def _(hidden: torch.Tensor) -> torch.Tensor:
    # At run time the result has one row or T. Nothing after it depends on the number.
    return torch.empty_like(hidden)


def select_rows_before_head(model: PreTrainedModel) -> None:
    """Make the head of ``model`` compute logits of the rows that :func:`select_rows` returns."""
    head = model.get_output_embeddings()
    if head is None:
        return

    def select(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return select_rows(inputs[0]), *inputs[1:]

    head.register_forward_pre_hook(select)


class EtkvForCPU(BackendDetails):  # type: ignore[misc] # ExecuTorch's classes have no types.
    """Writes the payload of a call. ExecuTorch finds a backend by the name of its class."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Return the payload: the call as the partitioner describes it, and the input of each argument."""
        (call,) = (node for node in edge_program.graph.nodes if node.op == "call_function")
        payload = json.loads(compile_specs[0].value)
        if payload["op"] == _ATTEND:
            # An input that serves as two arguments appears once.
            given = [node for node in edge_program.graph.nodes if node.op == "placeholder"]
            payload["inputs"] = [given.index(argument) for argument in call.args[:_TENSORS]]
        return PreprocessResult(processed_bytes=json.dumps(payload).encode())


def tag(program: ExportedProgram, logits: str) -> dict[str, DelegationSpec]:
    """Give each call in the graph of ``program`` a tag and a payload of its own. Return the payloads by tag.

    ``logits`` are the rows that the request asks for.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    attends = [node for node in nodes if _ATTEND in str(node.target)]
    selects = [node for node in nodes if _SELECT in str(node.target)]
    common = {
        "program": uuid.uuid5(uuid.NAMESPACE_OID, str(program.graph)).hex,
        "n_calls": len(attends),
        "n_layers": len({_argument(node, 4, "layer_id") for node in attends}),
        "logits": "last" if logits == "last" else "selected" if selects else "all",
    }
    specs = {}
    for call, node in enumerate(attends):
        layer, scale = _argument(node, 4, "layer_id"), _argument(node, 5, "scale")
        name = node.meta["delegation_tag"] = f"{_ATTEND}_{call}"
        specs[name] = _spec({"op": _ATTEND, **common, "call": call, "layer": layer, "scale": float(scale)})
    for number, node in enumerate(selects):
        name = node.meta["delegation_tag"] = f"{_SELECT}_{number}"
        specs[name] = _spec({"op": _SELECT})
    for number, node in enumerate(node for node in nodes if _BY_CAPACITY in str(node.target)):
        name = node.meta["delegation_tag"] = f"{_BY_CAPACITY}_{number}"
        specs[name] = _spec({"op": _BY_CAPACITY, "limit": _argument(node, 2, "limit")})
    return specs


def _argument(node: torch.fx.Node, index: int, name: str) -> Any:
    return node.kwargs[name] if name in node.kwargs else node.args[index]


def _spec(payload: dict[str, Any]) -> DelegationSpec:
    value = json.dumps({**payload, "version": VERSION}).encode()
    return DelegationSpec(EtkvForCPU.__name__, [CompileSpec("payload", value)])
