"""Makes torch's part of an export faster, without changing the program."""

from __future__ import annotations

import contextlib
import copy
import gc
import types
from collections.abc import Iterator
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
    """Skip work of torch that an export does not need. Whatever a release of torch lacks is left as it is."""
    with _without_work_on_guards(), _sharing_origins():
        yield


@contextlib.contextmanager
def _without_work_on_guards() -> Iterator[None]:
    """Skip the search for common subexpressions in guards. An export never runs its guards."""
    import torch._dynamo.guards

    of_guards = getattr(torch._dynamo.guards, "PyExprCSEPass", None)
    if not (hasattr(of_guards, "count") and hasattr(of_guards, "replace")):
        yield
        return
    with (
        mock.patch.object(of_guards, "count", lambda self, exprs: None),
        mock.patch.object(of_guards, "replace", lambda self, expr: ([], expr)),
    ):
        yield


@contextlib.contextmanager
def _sharing_origins() -> Iterator[None]:
    """Share the list of a node's origins, which never changes, instead of copying it with all its elements."""
    import torch.fx.traceback

    origins: Any = torch.fx.traceback
    if getattr(origins, "copy", None) is not copy:
        # Another block shares them already.
        yield
        return
    names = {name: value for name, value in vars(copy).items() if not name.startswith("__")}
    with mock.patch.object(origins, "copy", types.SimpleNamespace(**{**names, "deepcopy": list})):
        yield
