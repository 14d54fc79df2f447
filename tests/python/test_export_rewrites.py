"""The exporter's changes to a model or a graph before a backend lowers it."""

from __future__ import annotations

import types

import pytest
import torch

from etkv.export import complex_numbers, mlx_rewrites, sparsity
from etkv.export.cpu import cycles


def _graph(edges: dict[str, list[str]], tags: dict[str, str]) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    for name, given in edges.items():
        nodes[name] = graph.call_function(torch.cat, ([nodes[other] for other in given],), name=name)
        if name in tags:
            nodes[name].meta["delegation_tag"] = tags[name]
    return graph


def _tags(graph: torch.fx.Graph) -> dict[str, str]:
    return {node.name: node.meta["delegation_tag"] for node in graph.nodes if "delegation_tag" in node.meta}


def test_a_delegate_that_needs_a_call_between_its_nodes_is_split():
    # d depends on the call, which depends on a. c does not depend on the call.
    edges = {"a": [], "call": ["a"], "c": ["a"], "d": ["c", "call"], "e": ["d"]}
    graph = _graph(edges, dict.fromkeys("acde", "x"))
    assert cycles.split(graph, {"x"}) == {"x_0": "x", "x_2": "x"}
    assert _tags(graph) == {"a": "x_0", "c": "x_0", "d": "x_2", "e": "x_2"}


def test_delegates_that_need_each_other_are_split():
    # The delegates x and y need each other, but no path of nodes leads from one through the other and back.
    edges = {"a": [], "b": ["a"], "c": [], "d": ["c"]}
    graph = _graph(edges, {"a": "x", "b": "y", "c": "y", "d": "x"})
    cycles.split(graph, {"x", "y"})
    assert not cycles._cycle(graph)
    assert len(set(_tags(graph).values())) == 4


def test_delegates_in_order_stay_whole():
    edges = {"a": [], "call": ["a"], "b": ["call"], "c": ["a", "b"]}
    tags = {"a": "x", "b": "y", "c": "y"}
    graph = _graph(edges, tags)
    assert cycles.split(graph, {"x", "y"}) == {}
    assert _tags(graph) == tags


def _sparse(function) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.activation_sparsity = 0.9
    module._gaussian_topk = function
    return torch.nn.Sequential(module)


def test_a_quantile_becomes_a_constant():
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    given = types.SimpleNamespace(activation_sparsity=0.9)
    model = _sparse(lambda x: Gemma3nTextMLP._gaussian_topk(given, x))
    x = torch.randn(3, 500)
    expected = model[0]._gaussian_topk(x)
    sparsity.settle(model)
    torch.testing.assert_close(model[0]._gaussian_topk(x), expected)
    assert 0.05 < (expected > 0).float().mean() < 0.15


def test_other_sparse_activations_are_refused():
    with pytest.raises(ValueError, match=r"^0: it makes activations sparse in a way that .* does not support$"):
        sparsity.settle(_sparse(torch.relu))


class _Router(torch.nn.Module):
    """Chooses two groups for a token. Reads a mask that an in-place scatter has changed."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(scores)
        mask.scatter_(1, scores.topk(2, dim=-1)[1], 3.0)
        best, where = scores.topk(2, dim=-1)
        written = torch.full_like(scores, -9.0).scatter_(1, where, best)
        return mask + written + torch.zeros_like(scores).scatter(-1, where[:, :1], 1.0)


class _Rows(torch.nn.Module):
    """Selects rows by an index with the same number of axes as the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(50, 6))

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return self.table[scores.argmax(-1, keepdim=True)]


@pytest.mark.parametrize("module", [_Router(), _Rows()], ids=["router", "rows"])
def test_what_takes_the_place_of_scatters_and_indices_on_mlx(module):
    dynamic = {"scores": {0: torch.export.Dim("tokens", min=1, max=16)}}
    traced = torch.export.export(module, (torch.randn(3, 8),), dynamic_shapes=dynamic)
    mlx_rewrites.apply(traced)
    targets = [str(node.target) for node in traced.graph.nodes]
    assert not any("scatter" in target for target in targets)
    assert "aten.any.dim" in targets or "aten.view.default" in targets
    for length in (1, 5):
        scores = torch.randn(length, 8)
        torch.testing.assert_close(traced.module()(scores), module(scores))


class _Rotation(torch.nn.Module):
    """Rotates pairs of elements as complex numbers, as Llama 4 does."""

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angle = position[:, None] * torch.tensor([1.0, 0.1])
        turns = torch.polar(torch.ones_like(angle), angle) * 0.5
        numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * turns[:, None]).flatten(2)


class _Exponential(torch.nn.Module):
    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x).exp())


def test_complex_numbers_become_two_parts():
    given = torch.randn(5, 3, 4), torch.arange(5.0)
    traced = torch.export.export(_Rotation(), given)
    complex_numbers.replace(traced)
    assert not any("complex" in str(node.target) or "polar" in str(node.target) for node in traced.graph.nodes)
    torch.testing.assert_close(traced.module()(*given), _Rotation()(*given))


def test_other_operators_on_complex_numbers_are_refused():
    traced = torch.export.export(_Exponential(), (torch.randn(5, 3, 2), torch.arange(5.0)))
    with pytest.raises(ValueError, match=r"^it computes with complex numbers \(aten\.exp\.default\)$"):
        complex_numbers.replace(traced)


class _Constant(torch.nn.Module):
    """Multiplies complex numbers by complex constants."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * self.factor)


def test_complex_constants_are_refused():
    traced = torch.export.export(_Constant(), (torch.randn(3, 4, 2),))
    with pytest.raises(ValueError, match="it computes with complex constants"):
        complex_numbers.replace(traced)


class _Scatter(torch.nn.Module):
    """Scatters in a way that no router of transformers uses."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = x.topk(2, dim=-1)[1]
        if self.form == "fewer rows":
            return torch.zeros_like(x).scatter(-1, index[:1], 1.0)
        if self.form == "a wider source":
            return torch.zeros_like(x).scatter(-1, index[:, :1], x)
        if self.form == "integers":
            return torch.zeros_like(x, dtype=torch.int32).scatter(-1, index, index.to(torch.int32))
        made = torch.zeros_like(x)
        view = made.view(-1)
        made.scatter_(-1, index, 1.0)
        return view


@pytest.mark.parametrize("form", ["fewer rows", "a wider source", "integers", "a view from before"])
def test_other_scatters_stay(form):
    module, x = _Scatter(form), torch.randn(3, 8)
    traced = torch.export.export(module, (x,))
    mlx_rewrites.apply(traced)
    assert any("scatter" in str(node.target) for node in traced.graph.nodes)
    torch.testing.assert_close(traced.module()(x), module(x))
