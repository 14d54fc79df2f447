"""Runs programs of ExecuTorch's own exporters in the same way as ExecuTorch's runners."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

import etkv
import upstream_programs
from reference import STORY
from upstream_programs import OFF_GRAPH, Export

PROMPT, DECODE, STEP = 60, 64, 40
"""Number of tokens of the prompt, number of greedy steps after the prompt, and maximum tokens of a step."""


def prompt(count: int = PROMPT) -> list[int]:
    return list(STORY.encode())[:count]


@contextlib.contextmanager
def loaded(made: Export, method: str = "forward") -> Iterator[etkv.Program]:
    """Load a program, with a session if its cache is outside of the graph."""
    with contextlib.ExitStack() as stack:
        session = None
        if OFF_GRAPH[0] in made.options:
            layers = etkv.read_kv_cache_metadata(made.path).layers
            config = etkv.CacheConfig(layers, upstream_programs.CONTEXT, k_format="f32", v_format="f32")
            session = stack.enter_context(etkv.DecodeSession(config))
        yield stack.enter_context(etkv.load(made.path, session, method=method))


def read(program: etkv.Program, ids: Sequence[int], start: int = 0, step: int = STEP) -> list[torch.Tensor]:
    """Run ``ids``, the first at position ``start``, as ExecuTorch's runner does. Return every output, [T, width]."""
    made = []
    for first in range(0, len(ids), step):
        part = list(ids[first : first + step])
        at = start + first
        made.append(program.execute(torch.tensor([part]), torch.arange(at, at + len(part))))
    return [torch.cat(outputs, dim=1)[0].float() for outputs in zip(*made, strict=True)]


def greedy(program: etkv.Program, ids: list[int], count: int, step: int = STEP) -> tuple[list[int], np.ndarray]:
    """Return ``count`` greedy ids after ``ids``, and the rows of logits of all tokens except the last."""
    rows, chosen = read(program, ids, step=step)[:1], []
    while True:
        chosen.append(int(rows[-1][-1].argmax()))
        if len(chosen) == count:
            return chosen, torch.cat(rows).numpy()
        rows.append(read(program, chosen[-1:], len(ids) + len(chosen) - 1)[0])
