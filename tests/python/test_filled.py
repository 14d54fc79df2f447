"""Tensors that a graph fills part by part become concatenations, where nothing reads them before they are full."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from etkv.export import filled


class _Module(torch.nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)


def _rewritten(compute: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """Return the outputs of ``compute`` and of its rewritten graph, and the operators of the latter."""
    x = torch.arange(24.0).reshape(2, 3, 4)
    program = torch.export.export(
        _Module(compute), (x,), dynamic_shapes={"x": {1: torch.export.Dim("n", min=2, max=8)}}, strict=True
    )
    filled.apply(program)
    nodes = (node for node in program.graph.nodes if node.op == "call_function")
    return compute(x), program.module(check_guards=False)(x), {str(node.target) for node in nodes}


def _all(x):
    made = x.new_empty(2, x.shape[1], 10)
    made[..., 4:].copy_(torch.cat([x, x[..., :2]], dim=-1))
    made[..., :4].copy_(x + 1)
    return made * 2


def _expanded(x):
    made = x.new_empty(2, x.shape[1], 5)
    made[..., :4].copy_(x)
    made[..., 4:].copy_(x[..., :1])
    return made.transpose(0, 1)


@pytest.mark.parametrize("compute", [_all, _expanded])
def test_filled_tensors_are_concatenations(compute):
    expected, found, operators = _rewritten(compute)
    assert torch.equal(found, expected)
    assert "aten.cat.default" in operators
    assert not operators & {"aten.new_empty.default", "aten.copy_.default"}


def _broadcast(x):
    made = x.new_empty(2, x.shape[1], 8)
    made[..., :4].copy_(x)
    made[..., 4:].copy_(x[..., :1])
    return made


def _read_between(x):
    made = x.new_empty(2, x.shape[1], 8)
    made[..., :4].copy_(x)
    made[..., 4:].copy_(made[..., :4] + 1)
    return made


def _written_twice(x):
    made = x.new_empty(2, x.shape[1], 8)
    made[..., :6].copy_(torch.cat([x, x[..., :2]], dim=-1))
    made[..., 4:].copy_(x)
    return made


@pytest.mark.parametrize("compute", [_broadcast, _read_between, _written_twice])
def test_others_stay(compute):
    expected, found, operators = _rewritten(compute)
    assert torch.equal(found, expected)
    assert "aten.copy_.default" in operators
