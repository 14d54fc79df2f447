"""Speeds up exports in tests.

In each export, torch twice searches all of its operators for composite ones, and several times registers a dozen
kernels for each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._export.utils
import torch.export.decomp_utils
import torch.export.exported_program
from torch._subclasses import fake_impls

_FIND = "_collect_all_valid_cia_ops"
_OVERRIDE = "_override_composite_implicit_decomp"


@functools.cache
def look_up_once() -> None:
    """Search for composite operators again only if this process has more operators than before.

    Also keep the kernels that are registered for them. Programs do not change, and small ones are exported in half of
    the time. Raises an error if a release of torch does not have the replaced functions in these modules.
    """
    find = getattr(torch._export.utils, _FIND)
    found: dict[int, set[Any]] = {}

    def find_once() -> set[Any]:
        n_ops = len(torch._C._dispatch_get_all_op_names())
        if n_ops not in found:
            found[n_ops] = find()
        return found[n_ops]

    for module in (torch.export.decomp_utils, torch.export.exported_program):
        assert hasattr(module, _FIND), f"{module.__name__} lacks {_FIND}"
        setattr(module, _FIND, find_once)

    override = getattr(torch.export.exported_program, _OVERRIDE)
    setattr(torch.export.exported_program, _OVERRIDE, _remembering(override))


@dataclasses.dataclass(frozen=True)
class _Registered:
    """What torch registers for an operator: its kernels before and within the block, and the rule for fake tensors."""

    decomposition: Any
    before: dict[Any, Any]
    inside: dict[Any, Any]
    fake: Any


def _remembering(
    override: Callable[[Mapping[Any, Any]], contextlib.AbstractContextManager[None]],
) -> Callable[[Mapping[Any, Any]], contextlib.AbstractContextManager[None]]:
    """Return a function like torch's ``override`` that reuses earlier registrations.

    Registrations depend only on the operator, its kernels and its decomposition.
    """
    known: dict[Any, _Registered] = {}
    rules: dict[Any, Any] = fake_impls.op_implementations_dict

    def is_known(op: Any, decomposition: Any) -> bool:
        it = known.get(op)
        return it is not None and it.decomposition is decomposition and it.before == op.py_kernels and op not in rules

    @contextlib.contextmanager
    def overriding(decompositions: Mapping[Any, Any]) -> Iterator[None]:
        again = [op for op, decomposition in decompositions.items() if is_known(op, decomposition)]
        first = {op: decompositions[op] for op in decompositions.keys() - set(again)}
        before = {op: dict(op.py_kernels) for op in first if op not in rules}
        with override(first):
            for op in before:
                known[op] = _Registered(first[op], before[op], dict(op.py_kernels), rules[op])
            for op in again:
                op.py_kernels.update(known[op].inside)
                op._dispatch_cache.clear()
                rules[op] = known[op].fake
            try:
                yield
            finally:
                for op in again:
                    op.py_kernels.clear()
                    op.py_kernels.update(known[op].before)
                    op._dispatch_cache.clear()
                    rules.pop(op, None)

    return overriding
