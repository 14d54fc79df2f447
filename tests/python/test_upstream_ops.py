"""ExecuTorch's own tests of MLX operations have the outcomes in ``tests/upstream_ops/expected.json``."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys

import pytest
import torch

import reference
from test_run import packed, unpacked

sys.path.append(str(reference.ROOT))
from tests.upstream_ops import cases, expected, export, outcomes, part, table, workers
from tests.upstream_ops.cases import Case
from tests.upstream_ops.outcomes import Outcome


@pytest.fixture(scope="module")
def ended() -> list[Outcome]:
    """Return the outcomes of all configurations. Their exports take minutes."""
    found = export.export(2, lambda folder: True, reference.note)
    return outcomes.run(found, "default", 1)


@pytest.mark.long
def test_every_configuration_ends_as_expected(ended):
    outcomes.write(ended, "default")
    reference.note(outcomes.text(ended).splitlines()[-1])
    assert len(ended) == 895
    different = expected.differences(ended, everything=True)
    assert not different, "\n".join(
        [*different, "after a change for the better: make upstream-ops UPSTREAM=--write-expected"]
    )


@pytest.mark.long
def test_the_page_of_operations_is_current(ended):
    assert table.PAGE.read_text() == table.text(ended), "make upstream-ops UPSTREAM=--write-expected"


@pytest.mark.long
def test_a_part_has_every_operation(ended):
    """The part covers every operation that has a test in the wheel."""
    assert part.choose(ended) == part.read(), "make upstream-ops UPSTREAM=--write-expected"


@pytest.mark.long
@pytest.mark.parametrize("passes", ["none", "gpu"])
def test_other_passes_change_no_outcome(ended, passes):
    ran = [outcome for outcome in ended if outcome.kind in ("passed", "not comparable")]
    again = outcomes.run([outcome.case for outcome in ran], passes, 1)
    assert [
        (outcome.case.folder, outcome.reason) for outcome in again if outcome.kind not in ("passed", "not comparable")
    ] == []


# ---- The harness itself ---------------------------------------------------------------------------------------------


def test_the_page_names_every_operation_and_its_file():
    rows = [re.findall(r"^\| (\w+) \| (`[^`]+`) \|", text, re.M) for text in (table.PAGE.read_text(), table.text([]))]
    assert rows[0] == rows[1], "make upstream-ops UPSTREAM=--write-expected"


def case(folder: str, *, nodes: tuple[str, ...] = (), comparable: bool = True) -> Case:
    return Case(
        folder=folder,
        test="",
        rtol=1e-5,
        atol=1e-5,
        timeout=60,
        comparable=comparable,
        kv_cache=None,
        expected_segments=1,
        expected_nodes=None,
        segments=1,
        nodes=dict.fromkeys(nodes, 1),
    )


def refusal(folder: str, *missing: str) -> Outcome:
    listed = ", ".join(f"{name} (1 times)" for name in missing)
    reason = f"the program needs operations that this build lacks: {listed}"
    return Outcome(case(folder, nodes=tuple(f"{name}Node" for name in missing)), "refused", reason)


def test_differences_in_either_direction(tmp_path, monkeypatch):
    monkeypatch.setattr(expected, "FILE", tmp_path / "expected.json")
    before = [
        Outcome(case("000-a"), "passed", ""),
        Outcome(case("001-b"), "failed", "values"),
        refusal("002-c", "Sort", "Tan"),
        Outcome(case("003-d"), "refused", "buffers"),
        Outcome(case("004-e", comparable=False), "not comparable", "random"),
        Outcome(case("005-f"), "not exported", "AttributeError"),
    ]
    expected.write(before)
    assert expected.differences(before, everything=True) == []
    after = [
        Outcome(case("000-a"), "failed", "values"),
        Outcome(case("001-b"), "passed", ""),
        refusal("002-c", "Tan"),
        Outcome(case("003-d"), "passed", ""),
        Outcome(case("004-e", comparable=False), "failed", "SIGSEGV"),
        Outcome(case("005-f"), "passed", ""),
    ]
    assert expected.differences(after, everything=True) == [
        "000-a: expected passed, failed: values",
        "001-b: expected failed, passed",
        "003-d: expected refused, passed",
        "004-e: expected not comparable, failed: SIGSEGV",
        "005-f: expected not exported, passed",
        "Sort: listed as missing, but no program is refused for it",
    ]
    # Writing the file keeps handwritten reasons.
    text = expected.FILE.read_text().replace("values", "rounds otherwise on a CPU")
    expected.FILE.write_text(text)
    expected.write(before)
    assert expected.FILE.read_text() == text


def test_refused_programs_count_for_their_missing_operations():
    table = outcomes.by_operation([refusal("000-a", "Sort"), Outcome(case("001-b", nodes=("AddNode",)), "passed", "")])
    assert {name: (counts["passed"], counts["refused"]) for name, counts in table.items()} == {
        "Add": (1, 0),
        "Sort": (0, 1),
    }


TRIAL = """
import os, sys, time
from tests.upstream_ops import worker

def answer(task):
    if task == "crash":
        print("last words", file=sys.stderr, flush=True)
        os.abort()
    if task == "hang":
        time.sleep(60)
    print("noise that is no answer")
    return f"{task} done"

worker.serve(lambda: answer)
"""


def test_a_worker_that_ends_costs_its_own_task_only(tmp_path, monkeypatch):
    (tmp_path / "trial_worker.py").write_text(TRIAL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    told = {}
    tasks = [("good", 60.0), ("crash", 60.0), ("again", 60.0), ("hang", 1.0), ("last", 60.0)]
    workers.answer("trial_worker", tasks, lambda task, answer: told.update({task: answer}), 1)
    assert told == {
        "good": "good done",
        "crash": workers.Death("the process ended with SIGABRT: last words"),
        "again": "again done",
        "hang": workers.Death("no answer within 1 s"),
        "last": "last done",
    }


def test_a_worker_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "trial_worker.py").write_text("raise SystemExit('no wheel')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(RuntimeError, match="trial_worker does not start: the process ended with status 1: no wheel"):
        workers.answer("trial_worker", [("task", 60.0)], lambda task, answer: None, 1)


EXPORTER = """
import dataclasses, os
from tests.upstream_ops import cases, worker

def export(index):
    if index == 0:
        os.abort()
    fields = {field.name: None for field in dataclasses.fields(cases.Case)}
    cases.Case(**{**fields, "folder": "001-b", "error": "no such op", "stamp": cases.stamp()}).write()

worker.serve(lambda: export)
"""


def test_an_export_that_ends_its_process_is_tried_again(tmp_path, monkeypatch):
    (tmp_path / "trial_worker.py").write_text(EXPORTER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("ETKV_UPSTREAM_OPS_DIR", str(tmp_path))
    monkeypatch.setattr(cases, "FOLDER", tmp_path)
    monkeypatch.setattr(export, "_WORKER", "trial_worker")
    cases.write_json(tmp_path / cases.INDEX, {"stamp": cases.stamp(), "folders": ["000-a", "001-b"]})
    for stale in ("2 of 2", "1 of 2"):
        notes = []
        found = export.export(1, lambda folder: True, notes.append)
        assert notes[0] == f"exporting {stale} configurations"
        assert [case.error for case in found] == ["the process ended with SIGABRT", "no such op"]


@pytest.mark.long
def test_outputs_are_compared_at_the_tolerances_of_the_test(tmp_path, monkeypatch):
    """A program adds two tensors. Expected outputs are equal, nearly equal, and different."""
    (add,) = export.export(1, lambda folder: folder == "000-add", reference.note)
    (output,) = unpacked((cases.FOLDER / "000-add" / "expected_output.bin").read_bytes())
    near, far, nan = output.clone(), output.clone(), output.clone()
    near[0, 0, 0] += 5e-6
    far[0, 0, 0] += 1e-3
    nan[0, 0, 0] = torch.nan
    wanted = {
        "same": ([output], "passed", ""),
        "near": ([near], "passed", ""),
        "far": ([far], "failed", "Output 0 values do not match"),
        "nan": ([nan], "failed", "Output 0 values do not match"),
        "shape": ([output[0]], "failed", "Output 0 shape mismatch"),
        "count": ([output, output], "failed", "Output count mismatch"),
        "random": ([far], "not comparable", "the test compares nothing"),
        "nodes": ([output], "failed", "1 nodes AddNode, the test expects 2"),
        "parts": ([output], "failed", "1 delegates, the test expects 2"),
    }
    changes = {
        "random": {"comparable": False},
        "nodes": {"expected_nodes": {"AddNode": 2}},
        "parts": {"expected_segments": 2},
    }
    found = []
    for name, (tensors, _, _) in wanted.items():
        shutil.copytree(cases.FOLDER / "000-add", tmp_path / name)
        (tmp_path / name / "expected_output.bin").write_bytes(packed(tensors))
        found.append(dataclasses.replace(add, folder=name, **changes.get(name, {})))
    monkeypatch.setenv("ETKV_UPSTREAM_OPS_DIR", str(tmp_path))
    for outcome in outcomes.run(found, "default", 1):
        _, kind, reason = wanted[outcome.case.folder]
        assert outcome.kind == kind
        assert outcome.reason.startswith(reason)
