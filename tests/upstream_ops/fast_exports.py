"""Makes exports in tests faster, without changing the programs.

Each function replaces one of torch's functions by name, and fails if a release does not have that name.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import math
import types
from typing import Any
from unittest import mock

import numpy as np
import torch._dynamo.guards
import torch.fx.traceback

from . import composite_ops


@functools.cache
def prepare() -> None:
    """Speed up the exports of this process."""
    composite_ops.look_up_once()
    _leave_guards_as_they_are()
    _share_origins()
    # An export creates millions of objects that live until its end, and imported objects stay alive. Garbage
    # collection of these objects takes an eighth of the export's time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _leave_guards_as_they_are() -> None:
    """Skip the search for common subexpressions in guards, which an export never runs. It takes a tenth of the
    time."""
    of_guards = torch._dynamo.guards.PyExprCSEPass
    assert hasattr(of_guards, "count") and hasattr(of_guards, "replace")
    of_guards.count = lambda self, exprs: None  # type: ignore[method-assign]
    of_guards.replace = lambda self, expr: ([], expr)  # type: ignore[method-assign]


def _share_origins() -> None:
    """Share the list of a node's origins, which never changes, instead of copying it."""
    origins: Any = torch.fx.traceback
    assert origins.copy is copy and hasattr(origins, "NodeSource")
    names = {name: value for name, value in vars(copy).items() if not name.startswith("__")}
    origins.copy = types.SimpleNamespace(**{**names, "deepcopy": list})


@functools.cache
def solve_codebooks_faster() -> None:
    """Speed up ExecuTorch's TurboQuant codebooks, which take ten seconds each because scipy checks every number."""
    codebooks: Any = importlib.import_module("executorch.extension.llm.modules.turboquant.codebook")
    solve = codebooks._solve_lloyd_max_cached

    def solving(*arguments: Any) -> Any:
        with mock.patch("scipy.stats.norm", types.SimpleNamespace(pdf=_density)):
            return solve(*arguments)

    codebooks._solve_lloyd_max_cached = solving


def _density(at: float, loc: float, scale: float) -> Any:
    """Return scipy's density of a normal distribution, with the same operations."""
    place = (at - loc) / scale
    return np.exp(-(place**2) / 2.0) / math.sqrt(2 * math.pi) / scale
