"""A program of only ``kvcache::update_and_attend``, once for each layer, and functions to run it on a native session.

In the program the delegate runs the same operations that a reference cache runs through the op in PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mlx_programs
import step_programs
from etkv import CacheConfig, DecodeSession, SeqSession, Session, TreeSession, load, op
from step_programs import Operation, Outcome, Step, all_rows

SESSIONS: dict[str, type[Session]] = {session.KIND: session for session in (DecodeSession, SeqSession, TreeSession)}


class Attention(torch.nn.Module):
    """``forward(positions, q0, k0, v0, q1, …) -> attended`` of every layer.

    If the layers are ``shared``, the program calls each layer twice, like two layers of a model that share keys and
    values. The second calls are in reverse order, with other queries, and their outputs follow those of the first
    calls.
    """

    def __init__(self, config: CacheConfig, out_dtype: torch.dtype, shared: bool = False) -> None:
        super().__init__()
        self.scales = [layer.k_head_dim**-0.5 for layer in config.layers]
        self.out_dtype = out_dtype
        self.shared = shared

    def forward(self, positions: Tensor, rows: list[Tensor]) -> list[Tensor]:
        def attend(layer: int, q: Tensor) -> Tensor:
            k, v = rows[3 * layer + 1 : 3 * layer + 3]
            return torch.ops.kvcache.update_and_attend(q, k, v, positions, layer, self.scales[layer], self.out_dtype)

        layers = range(len(self.scales))
        attended = [attend(layer, rows[3 * layer]) for layer in layers]
        if self.shared:
            attended += [attend(layer, -rows[3 * layer]) for layer in reversed(layers)]
        return attended


def export(
    config: CacheConfig,
    path: Path,
    *,
    group: int = 2,
    most_tokens: int = 64,
    out_dtype: torch.dtype = torch.float32,
    shared: bool = False,
) -> Path:
    """Write the program for caches of ``config``, with ``group`` query heads for each KV head, to ``path``."""
    example = Step(positions=list(range(3)), owners=None, seed=0)
    rows = all_rows(config, example, group)
    tokens = torch.export.Dim("tokens", min=1, max=most_tokens)
    dynamic = ({0: tokens}, [{2: tokens}] * len(rows))
    model = Attention(config, out_dtype, shared)
    return mlx_programs.write(model, (torch.arange(3), rows), path, dynamic_shapes=dynamic, strict=True)


def run(operations: list[Operation], kind: str, config: CacheConfig, path: Path, group: int = 2) -> list[Outcome]:
    """Return the outcomes of the operations on a native session."""
    with SESSIONS[kind](config) as session, load(path, session) as program:
        return step_programs.run(operations, session, lambda positions, rows: program.execute(positions, *rows), group)


def run_in_torch(operations: list[Operation], cache: Any, group: int = 2, shared: bool = False) -> list[Outcome]:
    """Return the outcomes of the operations on a reference cache, with the model in PyTorch."""
    model = Attention(cache.config, torch.float32, shared)

    def forward(positions: Tensor, rows: list[Tensor]) -> list[Tensor]:
        # The end of the block rolls back an unfinished forward.
        with op.active(cache):
            attended: list[Tensor] = model(positions, rows)
            return attended

    return step_programs.run(operations, cache, forward, group)
