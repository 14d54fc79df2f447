"""Makes exports in tests faster, as :mod:`etkv.export.faster` does, and in more ways. Programs stay the same."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import types
from typing import Any
from unittest import mock

import numpy as np

from etkv.export import faster

from . import composite_ops

_KEPT = contextlib.ExitStack()


@functools.cache
def prepare() -> None:
    """Speed up the exports of this process."""
    composite_ops.look_up_once()
    # The rest of this process exports, so nothing is restored.
    _KEPT.enter_context(faster.collecting_rarely())
    _KEPT.enter_context(faster.without_needless_work())
    # Imported objects stay alive. Garbage collection need not look at them.
    gc.freeze()


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
