"""Exports that fail, are interrupted or are killed leave nothing, or only what the next export removes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

import pytest

import export_signals
import reference
from etkv.export import staging

FILES = [
    *("chat_template.jinja", "export.json", "generation_config.json", "hf/chat_template.jinja", "hf/config.json"),
    *("hf/generation_config.json", "hf/model.safetensors", "hf/tokenizer.json", "hf/tokenizer_config.json"),
    *("model.pte", "tokenizer.json", "tokenizer_config.json"),
]
"""The files of an export."""

TEMPORARY = [".temporary", "hf/.temporary"]
"""The temporary folders of an export that has written the weights."""


@pytest.fixture(scope="module")
def found(tiny, tmp_path_factory) -> dict:
    """Return what exports left that signals ended."""
    script = [sys.executable, export_signals.__file__, tiny("tiny-llama"), tmp_path_factory.mktemp("signals")]
    done = reference.run(script)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "said": done.stderr.splitlines()}


@pytest.mark.long
def test_the_next_export_removes_what_a_killed_one_left(found):
    """Each export also removes what the one before it left."""
    left = {
        "reading the weights": [".temporary"],
        "writing the weights": TEMPORARY,
        "serializing": TEMPORARY,
        "comparing": [".temporary", *TEMPORARY],
    }
    for step in export_signals.KILLED:
        assert found[f"killed {step}"] == [-signal.SIGKILL, *left[step]], step


@pytest.mark.long
def test_an_export_leaves_a_living_one_alone(found):
    assert found["alive"] == TEMPORARY
    assert found["beside"] == [0, *sorted(FILES + TEMPORARY)]
    assert found["continued"] == [0, *FILES]


@pytest.mark.long
def test_an_interrupted_export_leaves_nothing(found):
    for step in export_signals.ENDED:
        is_there = False
        assert found[f"ended {step}"] == [130, is_there], step
    assert found["said"][:3] == ["interrupted; the program was not written"] * 3


@pytest.mark.long
def test_an_interrupt_does_not_mix_files_of_two_exports(found):
    is_new = True
    assert found[export_signals.PUBLISHING] == [130, is_new, *FILES]
    assert found["said"][3:] == ["interrupted; the program was already written"]


def test_a_folder_is_removed_with_the_parents_that_it_needed(tmp_path):
    with staging.TemporaryFolder(tmp_path / "a" / "b") as temporary:
        (temporary.path / "file").touch()
        assert staging.remove_leftovers(tmp_path / "a" / "b") == [], "it is in use"
    assert list(tmp_path.iterdir()) == []
    with staging.TemporaryFolder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "file").touch()
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "file"]
    with pytest.raises(OSError, match="Not a directory"):
        staging.TemporaryFolder(tmp_path / "a" / "file" / "c")


def test_leftovers_are_removed(tmp_path):
    dead = staging.TemporaryFolder(tmp_path)
    (dead.path / "weights").touch()
    dead._lock.close()
    empty = tmp_path / f"{staging._PREFIX}empty"
    empty.mkdir()
    other = tmp_path / f"{staging._PREFIX}other"
    other.mkdir()
    (other / "file").touch()
    assert staging.remove_leftovers(tmp_path) == sorted([dead.path.parent, empty])
    assert list(tmp_path.iterdir()) == [other], "no export has written it"


@pytest.mark.parametrize("removed", ["before its file exists", "before its file is locked"])
def test_a_folder_that_is_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch, removed):
    """Another export cannot tell such a folder from that of a dead export."""
    create, lock = staging.tempfile.mkdtemp, staging.fcntl.flock
    names = []

    def created(**arguments):
        names.append(create(**arguments))
        if removed == "before its file exists" and len(names) == 1:
            assert staging.remove_leftovers(tmp_path)
        return names[-1]

    def locked(file, operation):
        if removed == "before its file is locked" and len(names) == 1:
            shutil.rmtree(names[0])
        lock(file, operation)

    monkeypatch.setattr(staging.tempfile, "mkdtemp", created)
    monkeypatch.setattr(staging.fcntl, "flock", locked)
    with staging.TemporaryFolder(tmp_path) as temporary:
        assert len(names) == 2
        assert temporary.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = False
    with pytest.raises(KeyboardInterrupt), staging.deferred_interrupts():
        with staging.deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
