"""The serialization modules that the wheel lacks are generated once for all processes, outside of the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etkv import _mlx_serialization as serialization
from etkv.errors import EtkvError

_MAKE = "from etkv._mlx_serialization import ensure_available; print(ensure_available())"

_USE = (
    "from etkv._mlx_serialization import ensure_available; folder = ensure_available()\n"
    "from executorch.backends.mlx.serialization import mlx_graph_schema\n"
    "import executorch.backends.mlx._generated_inspector\n"
    "assert mlx_graph_schema.UpdateAndAttendNode\n"
    "print(folder)"
)

pytestmark = pytest.mark.skipif(
    serialization._is_complete(serialization._wheel_folder()), reason="this ExecuTorch has its own serialization files"
)


def _start(cache: str | Path, program: str = _MAKE) -> subprocess.Popen:
    environment = {**os.environ, "ETKV_CACHE_DIR": str(cache)}
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], env=environment, stdout=-1, text=True)


def _finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0
    return output.strip()


def _stamps(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.py")}


@pytest.mark.long
def test_two_processes_at_once_and_a_third_later(tmp_path):
    wheel = serialization._wheel_folder()
    before = sorted(wheel.rglob("*.py"))
    first, second = _start(tmp_path), _start(tmp_path)
    folder = _finish(first)
    assert _finish(second) == folder

    assert list(tmp_path.iterdir()) == [Path(folder)], "neither process leaves its working folder"
    made = _stamps(Path(folder))
    assert made
    assert _finish(_start(tmp_path, _USE)) == folder
    assert _stamps(Path(folder)) == made, "a later process generates nothing"
    assert sorted(wheel.rglob("*.py")) == before, "the installed wheel stays as it is"


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    folder = Path(_finish(_start(tmp_path / "file" / "cache")))
    assert not folder.exists(), "a private folder goes with its process"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_calls_after_the_first_change_nothing():
    folder = serialization.ensure_available()
    finders = list(sys.meta_path)
    assert serialization.ensure_available() == folder
    assert sys.meta_path == finders


def test_another_schema_has_another_folder(tmp_path):
    for schema in ("table A {}", "table B {}"):
        (tmp_path / schema / "serialization").mkdir(parents=True)
        (tmp_path / schema / "serialization" / "schema.fbs").write_text(schema)
    flatc = serialization.flatc()
    digests = {serialization._digest(tmp_path / schema, flatc) for schema in ("table A {}", "table B {}")}
    assert len(digests) == 2


def test_a_compiler_that_fails(tmp_path, monkeypatch):
    flatc = tmp_path / "flatc"
    flatc.write_text("#!/bin/sh\necho this schema is wrong >&2\nexit 1\n")
    flatc.chmod(0o755)
    monkeypatch.setattr(serialization, "flatc", lambda: flatc)
    monkeypatch.setenv("ETKV_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(EtkvError, match="this schema is wrong"):
        serialization._generated_folder(serialization._wheel_folder())
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_without_the_compiler(monkeypatch):
    monkeypatch.setattr(serialization.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EtkvError, match="no data/bin/flatc"):
        serialization.flatc()


def test_without_executorch(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(serialization.importlib.util, "find_spec", missing)
    with pytest.raises(EtkvError, match="is not installed"):
        serialization._wheel_folder()
