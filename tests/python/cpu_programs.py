"""Runs programs in Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import etkv

CAPACITY = 256


def session(path: Path) -> etkv.DecodeSession:
    """Return a session for the program at ``path``, with keys and values in float32."""
    facts = etkv.read_kv_cache_metadata(path)
    config = etkv.CacheConfig(facts.layers, CAPACITY, k_format="f32", v_format="f32")
    return etkv.DecodeSession(config, backend=facts.backend)


def run(path: Path, ids: Sequence[int], *others: torch.Tensor, logits: str = "all", step: int = 40) -> list[Any]:
    """Return every output of the program at ``path``, [rows, ...], with the rows of its steps concatenated.

    Steps have ``step`` tokens. ``others`` are the inputs [1, T, ...] after tokens and positions.
    """
    made = []
    with session(path) as cache, etkv.load(path, cache, logits=logits) as loaded:
        for start in range(0, len(ids), step):
            part = slice(start, min(start + step, len(ids)))
            given = [torch.tensor([ids[part]]), torch.arange(part.start, part.stop)]
            made.append(loaded.execute(*given, *(other[:, part].contiguous() for other in others)))
    return [torch.cat(outputs, dim=1)[0] for outputs in zip(*made, strict=True)]


def greedy(path: Path, prompt: Sequence[int], count: int, step: int = 40) -> tuple[list[int], torch.Tensor]:
    """Return ``count`` greedy ids after ``prompt``, and the rows of logits of all tokens except the last.

    The prompt runs in steps of ``step`` tokens, and the answer in steps of one token.
    """
    with session(path) as cache, etkv.load(path, cache) as loaded:
        rows, ids = [], list(prompt)
        for start in range(0, len(prompt), step):
            part = ids[start : start + step]
            rows.append(loaded.forward(torch.tensor(part), torch.arange(start, start + len(part))))
        while True:
            ids.append(int(rows[-1][-1].argmax()))
            if len(ids) == len(prompt) + count:
                return ids[len(prompt) :], torch.cat(rows)
            rows.append(loaded.forward(torch.tensor(ids[-1:]), torch.tensor([len(ids) - 1])))
