"""Formulas that are fused to one or two operations of an MLX program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import softplus

from etkv.export import mlx_fusions
from mlx_programs import Function

Formula = Callable[[torch.Tensor], torch.Tensor]


def unit(x: torch.Tensor, axis: int = -1, of: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x`` divided by the norms of its rows, or of the rows of ``of``."""
    other = x if of is None else of
    return x * torch.rsqrt((other * other).sum(axis, keepdim=True) + 1e-6)


def fused(formula: Formula, dtype: torch.dtype = torch.float32) -> tuple[list[str], float]:
    """Return the operators of a fused formula, and the largest difference from the results of the formula."""
    x = torch.linspace(-90, 90, 3 * 5 * 8).reshape(1, 3, 5, 8).to(dtype)
    model = Function(formula)
    program = torch.export.export(model, (x,))
    mlx_fusions.fuse(program)
    operators = [node.target.__name__ for node in program.graph.nodes if node.op == "call_function"]
    made, expected = program.module()(x), model(x)
    assert made.dtype == expected.dtype
    return operators, float((made - expected).abs().max())


def test_a_softplus_is_one_operation():
    operators, off = fused(softplus)
    assert operators == ["full.default", "logaddexp.default"]
    assert off < 1e-5
    assert fused(lambda x: softplus(x, 1, 30))[0] == operators
    assert fused(softplus, torch.bfloat16)[1] < 0.5, "half a step of bfloat16 at 90"


@pytest.mark.parametrize(("beta", "threshold"), [(2, 20), (1, 3)])
def test_a_softplus_of_another_form_stays(beta: float, threshold: float):
    operators, off = fused(lambda x: softplus(x, beta, threshold))
    assert (operators, off) == (["softplus.default"], 0)


@pytest.mark.parametrize("formula", [unit, lambda x: x * torch.rsqrt((x**2).sum(-1, keepdim=True) + 1e-6)])
def test_a_division_by_the_norm_of_a_row_is_two_operations(formula: Formula):
    operators, off = fused(formula)
    assert operators == ["rms_norm.default", "mul.Tensor"]
    assert off < 1e-6


@pytest.mark.parametrize(
    "formula",
    [
        lambda x: unit(x, -2),
        lambda x: unit(x, of=x + 1),
        lambda x: x * torch.rsqrt((x * x).sum((-2, -1), keepdim=True) + 1e-6),
        lambda x: x * torch.rsqrt(torch.add((x * x).sum(-1, keepdim=True), 1e-6, alpha=2)),
        lambda x: x * torch.rsqrt((x * x.abs()).sum(-1, keepdim=True).abs() + 1e-6),
    ],
    ids=["another axis", "of another tensor", "of two axes", "a factor of eps", "no squares"],
)
def test_another_quotient_stays(formula: Formula):
    operators, off = fused(formula)
    assert "rms_norm.default" not in operators
    assert off == 0
