"""The calls in a graph that etkv runs, each in a separate delegate.

``kvcache::update_and_attend`` writes and reads a layer of the cache. ``etkv::select_rows`` returns the rows for which
the head of the model computes logits: all rows or only the last one, depending on an option given when the program is
loaded. ``etkv::select_by_capacity`` returns one of two tensors, depending on the capacity of the cache.
``crates/etkv-cpu/src/program/payload.rs`` reads the payloads.

The overload ``kvcache::update_and_attend.sinks`` is a separate op in payloads, so that earlier builds refuse it.
``softcap`` is null without a softcap; the last of its ``inputs`` are the sinks, or null::

    {"op": "update_and_attend_sinks", "program": "5f...", "call": 0, "n_calls": 5, "n_layers": 5,
     "logits": "selected", "layer": 0, "scale": 0.25, "softcap": 50.0, "version": 1, "inputs": [0, 1, 2, 3, null]}

``kvcache::update_and_convolve`` and ``kvcache::update_and_scan`` run a recurrent layer. Their payloads have the fields
that all calls of a forward share, the number of the recurrent ``layer``, and the constants of the call::

    {"op": "update_and_convolve", "program": "5f...", "call": 0, "n_calls": 5, "n_layers": 1, "n_recurrent": 4,
     "logits": "selected", "layer": 0, "activation": "silu", "channels": 160, "width": 4,
     "version": 1, "inputs": [0, 1, null, 2]}
    {"op": "update_and_scan", "program": "5f...", "call": 1, "n_calls": 5, "n_layers": 1, "n_recurrent": 4,
     "logits": "selected", "layer": 1, "scale": 0.25, "k_heads": 2, "heads": 4, "k_dim": 16, "v_dim": 24,
     "channel_decay": false, "version": 1, "inputs": [0, 1, 2, 3, 4, 5]}

``call`` and ``n_calls`` count the calls of all ops of a forward, in the order of the program. ``n_layers`` counts
attention layers, and ``n_recurrent`` recurrent layers. Calls of ``update_and_attend`` have ``n_recurrent`` only in
programs with recurrent layers. ``activation`` is ``silu`` or ``none``. ``inputs`` maps the tensor arguments of the op,
in order, to inputs of the delegate, with null for None: x, weight, bias and positions; or q, k, v, g, beta and
positions. A tensor that is two arguments is one input.

``etkv::routed_experts`` computes the experts that a router chose, and needs no cache. Its weights are inputs of the
delegate in the program's file. ExecuTorch maps the weights into memory, and nothing copies them::

    {"op": "routed_experts", "n_experts": 128, "hidden": 2048, "intermediate": 768, "weights": "int4",
     "group_size": 32, "activation": "silu", "gated": true, "alpha": 1.0,
     "limit": null, "offset": 0.0, "version": 1, "inputs": [0, 1, 2, 3, 4, null, null]}

``inputs`` are x, the experts of each token, the factors of their outputs, and the packed weights and the biases of both
products. ``intermediate`` is rounded up to whole tiles of :mod:`etkv.packed_weights`. ``limit`` is null if nothing is
clamped. If the weights of the two products have different formats, ``weights`` and ``group_size`` are pairs:
``["int4_float16", "int4"]`` and ``[32, 64]``. Earlier builds refuse pairs and the names of formats that they lack.

``etkv::linear`` multiplies by packed weights, and ``etkv::embedding`` reads rows of packed weights. Products with the
same input and the same format are one call, with an output for each matrix. The ``inputs`` of ``linear`` are the input,
and for each matrix its weights and its bias, or null. The ``inputs`` of ``embedding`` are the ids and the weights::

    {"op": "linear", "columns": 576, "weights": "int4", "group_size": 32, "rows": [576, 192, 192],
     "version": 1, "inputs": [0, 1, null, 2, null, 3, null]}
    {"op": "embedding", "rows": 49152, "width": 576, "weights": "int4", "group_size": 32,
     "version": 1, "inputs": [0, 1]}
"""

from __future__ import annotations

import json
import math
import uuid
from typing import TYPE_CHECKING, Any

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec

from etkv.export.graphs import argument, delegates, shape
from etkv.packed_weights import ROWS

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

VERSION = 1
"""The version of the payloads."""

_ATTEND = "update_and_attend"
_ATTEND_SINKS = "update_and_attend_sinks"
_CONVOLVE = "update_and_convolve"
_SCAN = "update_and_scan"
_SELECT = "select_rows"
_BY_CAPACITY = "select_by_capacity"
_EXPERTS = "routed_experts"
_LINEAR = "linear"
_EMBEDDING = "embedding"
_TENSORS = {_ATTEND: 4, _ATTEND_SINKS: 4, _CONVOLVE: 4, _SCAN: 6}
"""The ops of a forward -> the number of first arguments that are tensors."""
_SINKS = 7
"""The index of the further tensor argument of :data:`_ATTEND_SINKS`."""
_WITH_INPUTS = {**_TENSORS, _EXPERTS: 7, _EMBEDDING: 2}
"""The ops whose payloads have ``inputs`` -> the number of first arguments that are tensors."""


@torch.library.custom_op(f"etkv::{_SELECT}", mutates_args=())
def select_rows(hidden: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``hidden`` [1, T, hidden] for which the head computes logits: all rows in plain PyTorch."""
    return hidden.clone()


# At run time the result has one row or T rows. No later node depends on the number.
select_rows.register_fake(lambda hidden: torch.empty_like(hidden))


def select_rows_before_head(model: PreTrainedModel) -> None:
    """Let the head of ``model`` compute logits only for the rows that :func:`select_rows` returns."""
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
        """Return the payload: the partitioner's description of the call, and the input of each tensor argument."""
        payload = json.loads(compile_specs[0].value)
        if payload["op"] == _LINEAR:
            payload |= _products(edge_program)
            return PreprocessResult(processed_bytes=json.dumps(payload).encode())
        (call,) = (node for node in edge_program.graph.nodes if node.op == "call_function")
        if payload["op"] in _WITH_INPUTS:
            # A tensor that is two arguments is one input.
            given = [node for node in edge_program.graph.nodes if node.op == "placeholder"]
            arguments = call.args[: _WITH_INPUTS[payload["op"]]]
            if payload["op"] == _ATTEND_SINKS:
                arguments = (*arguments, argument(call, _SINKS, "sinks"))
            payload["inputs"] = [None if tensor is None else given.index(tensor) for tensor in arguments]
        return PreprocessResult(processed_bytes=json.dumps(payload).encode())


def tag(program: ExportedProgram, logits: str) -> dict[str, DelegationSpec]:
    """Tag each call in the graph of ``program`` separately. Return the payload of each tag.

    ``logits`` is the field of the request that selects the rows of logits of a step.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    calls = [(op, node) for node in nodes if (op := _op(node)) is not None]
    attends = [node for op, node in calls if op in (_ATTEND, _ATTEND_SINKS)]
    common = {
        "program": uuid.uuid5(uuid.NAMESPACE_OID, str(program.graph)).hex,
        "n_calls": len(calls),
        "n_layers": len({argument(node, 4, "layer_id") for node in attends}),
        "logits": "last"
        if logits == "last"
        else "selected"
        if any(_SELECT in str(node.target) for node in nodes)
        else "all",
    }
    if len(calls) > len(attends):
        common["n_recurrent"] = len(calls) - len(attends)
    specs = {}
    for call, (op, node) in enumerate(calls):
        name = node.meta["delegation_tag"] = f"{op}_{call}"
        specs[name] = _spec({"op": op, **common, "call": call, **_CONSTANTS[op](node)})
    for op, constants in _APART.items():
        for number, node in enumerate(node for node in nodes if f"etkv.{op}." in str(node.target)):
            name = node.meta["delegation_tag"] = f"{op}_{number}"
            specs[name] = _spec({"op": op, **constants(node)})
    # Products with the same input are one call, which rounds the input once.
    together: dict[Any, str] = {}
    for node in (node for node in nodes if f"etkv.{_LINEAR}." in str(node.target)):
        name = together.setdefault((node.args[0], *node.args[3:5]), f"{_LINEAR}_{len(together)}")
        node.meta["delegation_tag"] = name
        specs[name] = _spec({"op": _LINEAR, **_of_linear(node)})
    return specs


def number(program: ExportedProgram) -> None:
    """Number the calls of a forward in the order in which the delegates of ``program`` run.

    Independent delegates, such as attention in parallel with a recurrent layer, may run in another order than the nodes
    that they replace.
    """
    call = 0
    for delegate in delegates(program):
        payload = json.loads(delegate.processed_bytes) if delegate.backend_id == EtkvForCPU.__name__ else {}
        if payload.get("op") in _TENSORS:
            delegate._processed_bytes = json.dumps({**payload, "call": call}).encode()
            call += 1


def _op(node: torch.fx.Node) -> str | None:
    """Return the name of the op of a forward that ``node`` calls, or None."""
    name = str(node.target)
    if f"{_ATTEND}.sinks" in name:
        return _ATTEND_SINKS
    return next((op for op in _TENSORS if op in name), None)


def _of_attention(node: torch.fx.Node) -> dict[str, Any]:
    return {"layer": argument(node, 4, "layer_id"), "scale": float(argument(node, 5, "scale"))}


def _of_attention_with_sinks(node: torch.fx.Node) -> dict[str, Any]:
    return {**_of_attention(node), "softcap": float(argument(node, 8, "softcap")) or None}


def _of_convolution(node: torch.fx.Node) -> dict[str, Any]:
    channels, width = shape(node, 1)
    activation = argument(node, 5, "activation")
    return {"layer": argument(node, 4, "layer_id"), "activation": activation, "channels": channels, "width": width}


def _of_recurrence(node: torch.fx.Node) -> dict[str, Any]:
    (_, k_heads, _, k_dim), (_, heads, _, v_dim) = shape(node, 1), shape(node, 2)
    return {
        "layer": argument(node, 6, "layer_id"),
        "scale": float(argument(node, 7, "scale")),
        "k_heads": k_heads,
        "heads": heads,
        "k_dim": k_dim,
        "v_dim": v_dim,
        "channel_decay": len(shape(node, 3)) == 4,
    }


def _of_linear(node: torch.fx.Node) -> dict[str, Any]:
    """Return the fields that the products of one call have in common."""
    return {"columns": shape(node, 0)[-1], "weights": node.args[3], "group_size": node.args[4]}


def _products(program: ExportedProgram) -> dict[str, Any]:
    """Return the rows and the inputs of the products of a call, in the order of its outputs."""
    given = [node for node in program.graph.nodes if node.op == "placeholder"]
    products: Any = program.graph.output_node().args[0]
    tensors = [products[0].args[0], *(tensor for product in products for tensor in product.args[1:3])]
    inputs = [None if tensor is None else given.index(tensor) for tensor in tensors]
    return {"rows": [product.args[5] for product in products], "inputs": inputs}


def _of_embedding(node: torch.fx.Node) -> dict[str, Any]:
    width = node.meta["val"].shape[-1]
    return {"rows": node.args[4], "width": width, "weights": node.args[2], "group_size": node.args[3]}


def _of_experts(node: torch.fx.Node) -> dict[str, Any]:
    first = _WITH_INPUTS[_EXPERTS]
    pairs: list[Any] = [node.args[first : first + 4 : 2], node.args[first + 1 : first + 4 : 2]]
    if all(of_first == of_second for of_first, of_second in pairs):
        pairs = [of_first for of_first, _ in pairs]
    names = ("activation", "gated", "alpha", "limit", "offset")
    fields = {name: argument(node, at, name) for at, name in enumerate(names, start=first + 4)}
    # JSON has no infinity.
    fields["limit"] = fields["limit"] if math.isfinite(fields["limit"]) else None
    n_experts, tiles = shape(node, 3)[:2]
    hidden = tiles * ROWS // (2 if fields["gated"] else 1)
    sizes = {"n_experts": n_experts, "hidden": shape(node, 0)[1], "intermediate": hidden}
    return {**sizes, "weights": pairs[0], "group_size": pairs[1], **fields}


_CONSTANTS = {
    _ATTEND: _of_attention,
    _ATTEND_SINKS: _of_attention_with_sinks,
    _CONVOLVE: _of_convolution,
    _SCAN: _of_recurrence,
}
"""The ops of a forward -> functions that return the fields that only this op has."""

_APART = {
    _SELECT: lambda node: {},
    _BY_CAPACITY: lambda node: {"limit": argument(node, 2, "limit")},
    _EXPERTS: _of_experts,
    _EMBEDDING: _of_embedding,
}
"""Other ops whose calls are separate delegates -> functions that return their fields."""


def _spec(payload: dict[str, Any]) -> DelegationSpec:
    value = json.dumps({**payload, "version": VERSION}).encode()
    return DelegationSpec(EtkvForCPU.__name__, [CompileSpec("payload", value)])
