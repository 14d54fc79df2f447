"""Makes the parts of an export in torch and ExecuTorch faster, without changing the program."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Search for unreachable objects less often: an export creates millions of objects that live until its end.

    Where the garbage collector is off, it stays off.
    """
    before = gc.get_threshold()
    if before[0] > 0:
        gc.set_threshold(max(before[0], 50_000), max(before[1], 20), max(before[2], 100))
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def without_needless_work() -> Iterator[None]:
    """Skip work that an export does not need. A release of torch or ExecuTorch with other internals does all the
    work."""
    with _sharing_origins(), _without_idle_passes():
        yield


@contextlib.contextmanager
def _sharing_origins() -> Iterator[None]:
    """Share the list of a node's origins, which never changes, instead of copying it with all its elements."""
    import torch.fx.traceback

    origins: Any = torch.fx.traceback
    if getattr(origins, "copy", None) is not copy:
        # Another block shares the lists already.
        yield
        return
    names = {name: value for name, value in vars(copy).items() if not name.startswith("__")}
    with mock.patch.object(origins, "copy", types.SimpleNamespace(**{**names, "deepcopy": list})):
        yield


@contextlib.contextmanager
def _without_idle_passes() -> Iterator[None]:
    """Skip those of ExecuTorch's passes that have nothing to replace. Each traces the whole graph again."""
    with contextlib.ExitStack() as patches:
        for name, has_work in _HAS_WORK.items():
            module, _, pass_name = name.rpartition(".")
            try:
                kind = getattr(importlib.import_module(f"executorch.exir.passes.{module}"), pass_name)
            except (ImportError, AttributeError):
                continue
            patches.enter_context(mock.patch.object(kind, "call", _call(kind, kind.call, has_work)))
        yield


def _call(kind: type, call: Callable[..., Any], has_work: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return the method ``call`` of the pass ``kind``, which does nothing if no node of a graph has work for the pass.

    A pass that runs also computes the nodes' values again. The passes around these four do so too.
    """
    from torch.fx import GraphModule
    from torch.fx.passes.infra.pass_base import PassResult

    def calling(self: Any, module: Any) -> Any:
        graphs = [each for each in module.modules() if isinstance(each, GraphModule)]
        # Branches and loops are graphs of their own.
        if type(self) is not kind or graphs != [module]:
            return call(self, module)
        if any(has_work(node) for node in module.graph.nodes if node.op == "call_function"):
            return call(self, module)
        return PassResult(module, False)

    return calling


def _is_transpose(node: Any) -> bool:
    import torch

    return bool(node.target == torch.ops.aten.t.default)


def _is_view(node: Any) -> bool:
    return bool(getattr(node.target, "is_view", False))


def _takes_symbol(node: Any) -> bool:
    """Return whether an operator gets a number that the export does not know where it expects a tensor."""
    import torch

    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    numbers = [argument for argument in node.all_input_nodes if isinstance(argument.meta.get("val"), symbols)]
    schema = getattr(node.target, "_schema", None)
    if schema is None or not numbers:
        return False
    given = {argument.name: node.kwargs.get(argument.name) for argument in schema.arguments}
    given |= {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
    return any("Tensor" in str(one.type) and _has(given[one.name], numbers) for one in schema.arguments)


def _has(argument: Any, nodes: list[Any]) -> bool:
    return any(_has(one, nodes) for one in argument) if isinstance(argument, list | tuple) else argument in nodes


def _mixes_dtypes(node: Any) -> bool:
    """Return whether an operator may promote its arguments to another dtype."""
    import torch

    aten = torch.ops.aten
    promoting = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.div.Tensor_mode)
    if node.target not in (*promoting, aten.minimum.default):
        return False
    values = [argument.meta.get("val") if hasattr(argument, "meta") else None for argument in node.args]
    dtypes = {value.dtype if isinstance(value, torch.Tensor) else None for value in values}
    return len(dtypes) > 1 or not all(dtype is not None and dtype.is_floating_point for dtype in dtypes)


_HAS_WORK: dict[str, Callable[[Any], bool]] = {
    "normalize_transpose_pass.NormalizeTransposePass": _is_transpose,
    "replace_broken_ops_with_function_ops_pass.ReplaceBrokenOpsWithFunctionalOpsPass": _is_view,
    "sym_to_tensor_pass.SymToTensorPass": _takes_symbol,
    "remove_mixed_type_operators.RemoveMixedTypeOperators": _mixes_dtypes,
}
"""Passes, and whether a node has work for them. A pass that has work somewhere runs as ExecuTorch wrote it."""
