"""The digest of the code that affects an export. If the code changes, a program is exported again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import etkv
from etkv.export import manifest
from etkv.export.request import BACKENDS
from reference import EVERYTHING

PACKAGE = Path(etkv.__file__).parent

_DIRECT = {"etkv.op", "etkv.recurrent_op", "etkv.recurrent_layer", "etkv._mlx_serialization", "etkv.metadata"}
"""Modules outside of the exporter that write parts of a program."""


@pytest.fixture
def copied(tmp_path) -> Path:
    """Return a copy of the package's modules, which a test may change."""
    copy = tmp_path / "etkv"
    for file in (*PACKAGE.rglob("*.py"), *PACKAGE.glob("*.fbs")):
        to = copy / file.relative_to(PACKAGE)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to)
    return copy


def digest(backend: str, package: Path, monkeypatch) -> str:
    sources = manifest.sources
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "sources", lambda backend: sources(backend, package))
        return manifest._exporter_digest.__wrapped__(backend)


FIRST, *OTHERS = BACKENDS


@pytest.mark.parametrize("backend", [FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_every_module_that_the_exporter_imports_counts(backend, copied, monkeypatch):
    """`make test` changes two of the modules, because a digest takes half a second."""
    before = digest(backend, copied, monkeypatch)
    sources = manifest.sources(backend, copied)
    direct = _DIRECT | {"etkv.export.attention", f"etkv.export.{backend}", "mlx_nodes.fbs"}
    assert sources.keys() >= direct
    for name in direct if EVERYTHING else ("etkv.op", "mlx_nodes.fbs"):
        text = sources[name].read_text()
        is_code = sources[name].suffix == ".py"
        sources[name].write_text(text + ("\nchanged = 1\n" if is_code else "// changed\n"))
        assert digest(backend, copied, monkeypatch) != before, name
        sources[name].write_text(text)
    with sources["etkv.op"].open("a") as file:
        file.write("\n# A comment.\n")
    assert digest(backend, copied, monkeypatch) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_that_is_imported_by_a_new_line_counts(backend, copied):
    """The import is within a function, and the module is imported through another module."""
    (copied / "first.py").write_text("def run():\n    from etkv import second\n")
    (copied / "second.py").write_text("import etkv.third\n")
    (copied / "third.py").touch()
    new = {"etkv.first", "etkv.second", "etkv.third"}
    assert not new & manifest.sources(backend, copied).keys()
    with (copied / "op.py").open("a") as file:
        file.write("\nfrom etkv.first import run\n")
    assert manifest.sources(backend, copied).keys() >= new


def test_every_module_of_the_exporter_is_for_a_backend():
    """Every module is reached by imports, and no module is left over."""
    found = {module for backend in BACKENDS for module in manifest.sources(backend)} | manifest._OUTWARD
    files = (file.relative_to(PACKAGE.parent).with_suffix("") for file in (PACKAGE / "export").rglob("*.py"))
    assert {".".join(file.parts).removesuffix(".__init__") for file in files} <= found


def test_a_backend_is_not_exported_again_for_another():
    mlx, cpu = (manifest.sources(backend).keys() for backend in ("mlx", "cpu"))
    assert "etkv.export.mlx" not in cpu
    assert not any(module.startswith("etkv.export.cpu") for module in mlx)
    assert mlx & cpu >= _DIRECT
