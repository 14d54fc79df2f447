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
def faster() -> Iterator[None]:
    """Save a sixth of the time of an export that runs in the block.

    Raises :class:`AttributeError` if this release of torch lacks one of the replaced functions.
    """
    with _without_work_on_guards(), _sharing_origins(), _collecting_rarely():
        yield


@contextlib.contextmanager
def _without_work_on_guards() -> Iterator[None]:
    """Skip the search for common subexpressions in guards. An export never runs its guards."""
    import torch._dynamo.guards

    of_guards = torch._dynamo.guards.PyExprCSEPass
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
    if origins.copy is not copy:
        raise AttributeError("torch.fx.traceback does not copy origins with the module copy")
    names = {name: value for name, value in vars(copy).items() if not name.startswith("__")}
    with mock.patch.object(origins, "copy", types.SimpleNamespace(**{**names, "deepcopy": list})):
        yield


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Search for unreachable objects less often: an export creates millions of objects that live until its end."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
