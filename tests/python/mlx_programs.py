"""Programs of small modules for the MLX delegate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from etkv import _mlx_serialization


class Function(torch.nn.Module):
    """Wraps a function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def write(module: torch.nn.Module, inputs: Sequence[Any], path: Path, *, delegated: bool = True, **how: Any) -> Path:
    """Write the program of ``module`` to ``path``. ``how`` has arguments of ``torch.export.export``."""
    _mlx_serialization.ensure_available()
    from executorch import exir
    from executorch.backends.mlx import MLXPartitioner, ops  # noqa: F401

    edge = exir.to_edge_transform_and_lower(
        torch.export.export(module, tuple(inputs), **how),
        partitioner=[MLXPartitioner()] if delegated else [],
        compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    path.write_bytes(edge.to_executorch().buffer)
    return path
