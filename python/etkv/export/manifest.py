"""``export.json``: the sources of a program. The program is exported again only when they change."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from etkv.export.limits import Limits
from etkv.export.request import BACKENDS, ExportRequest
from etkv.export.source import Source

NAME = "export.json"

_OUTWARD = {"etkv", *(f"{__package__}.{name}" for name in ("__main__", "progress", "check", "families", "reasons"))}
"""Modules that do not affect the program: the package's ``__init__``, and modules for messages, lists and checks."""

_PACKAGES = ("executorch", "torch", "torchao", "transformers", "gguf")


def describe(request: ExportRequest, source: Source) -> dict[str, Any]:
    """Return everything that affects an export. Exports with equal descriptions write the same program."""
    return {
        "request": {
            field.name: _plain(getattr(request, field.name))
            for field in dataclasses.fields(request)
            # Moving the folder does not make its files stale, and a check does not change them.
            if field.name not in ("output", "verify")
        },
        "source": [[file.name, *_stamp(file)] for file in source.files()],
        "versions": {
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            **{package: _version(package) for package in _PACKAGES},
            "exporter": _exporter_digest(request.backend),
        },
    }


def is_current(request: ExportRequest, source: Source) -> bool:
    """Return whether all files of ``request`` exist and were exported from the same sources."""
    file = request.output.parent / NAME
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        wanted = {"program": request.output.name, **describe(request, source)}
        return (
            all(manifest.get(key) == value for key, value in wanted.items())
            and (manifest.get("checked") or not request.verify)
            and request.output.stat().st_size == manifest["bytes"]
            and all((request.output.parent / name).is_file() for name in manifest["companions"])
            and (request.keep_hf is None or (request.keep_hf / "config.json").is_file())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """The result of an export: a program of ``size`` bytes, and the files ``companions`` next to it.

    ``checked`` is whether the program was compared with the model. ``parts`` are the names of the model's parts.
    """

    size: int
    companions: list[str]
    checked: bool
    parts: list[str]


def write(folder: Path, request: ExportRequest, source: Source, limits: Limits, made: ExportResult) -> None:
    """Write the manifest to ``folder``."""
    manifest = {
        "program": request.output.name,
        "bytes": made.size,
        "companions": made.companions,
        "checked": made.checked,
        "parts": made.parts,
        "limits": dataclasses.asdict(limits),
        **describe(request, source),
    }
    (folder / NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@functools.cache
def _exporter_digest(backend: str) -> str:
    """Return a digest of the code that affects an export for ``backend``. Comments and docstrings do not count."""
    digest = hashlib.sha256()
    for module, file in sources(backend).items():
        digest.update(module.encode())
        text = file.read_text(encoding="utf-8")
        digest.update((_code(text) if file.suffix == ".py" else text).encode())
    return digest.hexdigest()[:16]


def sources(backend: str, package: Path = Path(__file__).parents[1]) -> dict[str, Path]:
    """Return the files that affect an export for ``backend``, by their names in order.

    These are the exporter, the modules of etkv that it imports directly or indirectly, and the schemas of ``package``,
    the folder of etkv.
    """
    others = {f"{__package__}.{known}" for known in BACKENDS if known != backend}
    found: dict[str, Path] = {}
    left = [__package__]
    while left:
        module = left.pop()
        file = _file(module, package)
        is_other = any(module == other or module.startswith(f"{other}.") for other in others)
        if file is None or module in found or module in _OUTWARD or is_other:
            continue
        found[module] = file
        left += _imports(file)
    found |= {file.name: file for file in package.glob("*.fbs")}
    return dict(sorted(found.items()))


def _file(module: str, package: Path) -> Path | None:
    """Return the file of a module of etkv; None for other names."""
    top, *parts = module.split(".")
    if top != "etkv":
        return None
    path = package.joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py") if parts else (path / "__init__.py",)
    return next((file for file in candidates if file.is_file()), None)


def _imports(file: Path) -> list[str]:
    """Return the names that a module imports, at the top level or within a function."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # An imported name may itself be a module.
            names += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return names


def _code(source: str) -> str:
    """Return Python source as a syntax tree, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [line for line in node.body if not _is_text(line)]
    return ast.dump(tree)


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
