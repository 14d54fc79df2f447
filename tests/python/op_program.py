"""A program of only ``kvcache::update_and_attend``, once for each layer, and functions to run it on a native session.

In the program the delegate runs the same operations that a reference cache runs through the op in PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etkv import CacheConfig, DecodeSession, Program, SeqSession, Session, TreeSession, _mlx_serialization, load, op
from etkv.errors import EtkvError, StatusError
from step_programs import Call, Operation, Outcome, Step, answers, declare, one_thread, step_rows

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
    _mlx_serialization.ensure_available()
    from executorch import exir
    from executorch.backends.mlx import MLXPartitioner, ops  # noqa: F401

    example = Step(positions=list(range(3)), owners=None, seed=0)
    rows = [row for layer in range(len(config.layers)) for row in step_rows(config, example, layer, group)]
    tokens = torch.export.Dim("tokens", min=1, max=most_tokens)
    traced = torch.export.export(
        Attention(config, out_dtype, shared),
        (torch.arange(3), rows),
        dynamic_shapes=({0: tokens}, [{2: tokens}] * len(rows)),
        strict=True,
    )
    program = exir.to_edge_transform_and_lower(
        traced,
        partitioner=[MLXPartitioner()],
        compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    ).to_executorch()
    path.write_bytes(program.buffer)
    return path


def run(operations: list[Operation], kind: str, config: CacheConfig, path: Path, group: int = 2) -> list[Outcome]:
    """Return the outcomes of the operations on a native session."""
    with SESSIONS[kind](config) as session, load(path, session) as program, one_thread():
        return [_outcome(operation.action, session, program, group) for operation in operations]


def _outcome(action: Call | Step, session: Session, program: Program, group: int) -> Outcome:
    outputs, refused, message = [], None, ""
    try:
        if isinstance(action, Call):
            getattr(session, action.name)(*action.arguments)
        else:
            declare(session, action)
            rows = [
                row
                for layer in range(len(session.config.layers))
                for row in step_rows(session.config, action, layer, group)
            ]
            outputs = program.execute(torch.tensor(action.positions), *rows)
    except EtkvError as error:
        refused, message = int(getattr(error, "status", -1)), str(error)
    return Outcome(refused, message, outputs, answers(session))


def in_torch(action: Call | Step, cache: Any, model: Attention, group: int = 2) -> tuple[list[Tensor], int | None]:
    """Return the outputs of the model in PyTorch on a reference cache, and the status of a refusal or None."""
    try:
        if isinstance(action, Call):
            getattr(cache, action.name)(*action.arguments)
            return [], None
        declare(cache, action)
        layers = range(len(cache.config.layers))
        rows = [row for layer in layers for row in step_rows(cache.config, action, layer, group)]
        with op.active(cache), one_thread():
            return model(torch.tensor(action.positions), rows), None
    except StatusError as error:
        return [], int(error.status)
