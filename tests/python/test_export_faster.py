"""The exporter leaves out work of torch, and restores torch afterwards."""

from __future__ import annotations

import gc

import pytest
import torch._dynamo.guards
import torch.fx.traceback

import etkv
from etkv.export import ExportRequest, export_program, faster


def state() -> tuple[object, ...]:
    guards = torch._dynamo.guards.PyExprCSEPass
    return guards.count, guards.replace, torch.fx.traceback.copy, gc.get_threshold()


@pytest.fixture
def before(monkeypatch):
    """What torch and Python have by themselves. Exports of this process may have changed it for good."""
    import copy

    guards = torch._dynamo.guards.PyExprCSEPass
    monkeypatch.setattr(guards, "count", lambda self, exprs: "all")
    monkeypatch.setattr(guards, "replace", lambda self, expr: "all")
    monkeypatch.setattr(torch.fx.traceback, "copy", copy)
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
            assert torch._dynamo.guards.PyExprCSEPass.count(None, []) is None
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
