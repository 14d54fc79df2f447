"""The exporter leaves out work of torch and ExecuTorch, and restores both afterwards."""

from __future__ import annotations

import gc
import hashlib
import importlib
import inspect
import sys

import pytest
import torch
import torch.fx.traceback
from executorch.exir import EdgeCompileConfig, to_edge
from executorch.exir.pass_base import ExportPass

import etkv
from etkv.export import ExportRequest, export_program, faster

PASSES = "93c761299a176613eb1b8ea5d4893f0943ad8c1b016d9021097e3810c8aaf60a"
"""The digest of the files of the passes that may be skipped."""


def state() -> tuple[object, ...]:
    return torch.fx.traceback.copy, gc.get_threshold(), *(one.call for one in passes())


def passes() -> list[type]:
    """Return the passes of ExecuTorch that may be skipped."""
    names = [name.rpartition(".") for name in faster._HAS_WORK]
    return [getattr(importlib.import_module(f"executorch.exir.passes.{module}"), name) for module, _, name in names]


@pytest.fixture
def before(monkeypatch):
    """What torch and Python have by themselves. Exports of this process may have changed it for good."""
    import copy

    monkeypatch.setattr(torch.fx.traceback, "copy", copy)
    for one in passes():
        monkeypatch.setattr(one, "call", ExportPass.call)
    threshold = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield state()
    gc.set_threshold(*threshold)


def test_all_of_it_is_left_out_and_comes_back(before):
    """It fails if a release of torch renames a replaced function."""
    with faster.collecting_rarely(), faster.without_needless_work():
        within = state()
        assert all(inner != outer for inner, outer in zip(within, before, strict=True))
        with faster.collecting_rarely(), faster.without_needless_work():
            assert torch.fx.traceback.copy.deepcopy([1]) == [1]
        assert state() == within
    assert state() == before


def test_a_refused_export_restores_torch(before, tiny, tmp_path, monkeypatch):
    def refuse(*arguments):
        assert state()[0] != before[0]
        raise etkv.EtkvError("refused here")

    monkeypatch.setattr("etkv.export.rope.settle", refuse)
    request = ExportRequest(model=tiny("tiny-llama"), output=tmp_path / "model.pte")
    with pytest.raises(etkv.EtkvError, match="refused here"):
        export_program(request)
    assert state() == before


def test_a_collector_that_is_off_stays_off(before):
    gc.set_threshold(0)
    with faster.collecting_rarely():
        assert gc.get_threshold()[0] == 0
    gc.set_threshold(100_000, 10, 10)
    with faster.collecting_rarely():
        assert gc.get_threshold() == (100_000, 20, 100)


class Work(torch.nn.Module):
    """A model with work for some of the passes that may be skipped, or for none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.kind == "symbol":
            return x * x.shape[0] + torch.full_like(x, x.shape[0])
        if self.kind == "dtypes":
            return x + ids.unsqueeze(1)
        if self.kind == "integers":
            return (ids / ids).unsqueeze(1)
        if self.kind == "branch":
            return torch.cond(x.sum() > 0, lambda x, ids: x + ids.unsqueeze(1), lambda x, ids: x * 2.0, (x, ids))
        return torch.relu(x) + 2.0


@pytest.mark.parametrize("kind", ["symbol", "dtypes", "integers", "branch", "none"])
def test_graphs_are_the_same_without_the_skipped_passes(kind, monkeypatch):
    ran = []

    def edge() -> list[tuple[object, ...]]:
        tokens = torch.export.Dim("tokens", min=2, max=64)
        inputs = (torch.randn(3, 8), torch.arange(3))
        traced = torch.export.export(Work(kind), inputs, dynamic_shapes=({0: tokens}, {0: tokens}))
        program = to_edge(traced, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        nodes = program.exported_program().graph.nodes
        return [(node.name, str(node.target), str(node.args), str(node.meta.get("val"))) for node in nodes]

    def call(self, module):
        ran.append(type(self))
        return ExportPass.call(self, module)

    for one in passes():
        monkeypatch.setattr(one, "call", call)
    expected, every = edge(), len(ran)
    ran.clear()
    with faster.without_needless_work():
        assert edge() == expected
    assert every >= len(passes())
    # A graph in a graph is not looked at, so every pass runs.
    assert len(ran) == every if kind == "branch" else len(ran) < every
    assert bool(ran) == (kind != "none")


def test_ops_that_earlier_passes_replace_count_as_work():
    aten = torch.ops.aten
    targets = {"NormalizeTransposePass": aten.t.default, "ReplaceBrokenOpsWithFunctionalOpsPass": aten.unfold.default}
    for name, has_work in faster._HAS_WORK.items():
        graph = torch.fx.Graph()
        tensor = graph.placeholder("tensor")
        target = targets.get(name.rpartition(".")[2])
        assert not has_work(graph.call_function(aten.relu.default, (tensor,)))
        assert target is None or has_work(graph.call_function(target, (tensor,)))


def test_the_rules_of_the_passes_are_those_that_were_read():
    """If this fails, compare the predicates in ``faster.py`` with the passes of the new release."""
    sources = "".join(inspect.getsource(sys.modules[one.__module__]) for one in passes())
    assert hashlib.sha256(sources.encode()).hexdigest() == PASSES
