"""The exports of configurations: the folder and the record of each, and whether it is current."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from etkv.export.manifest import _code

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("ETKV_UPSTREAM_OPS_DIR") or ROOT / "build" / "upstream_ops")
"""The folder of the exports and the report. ``ETKV_UPSTREAM_OPS_DIR`` selects another one, which a test uses."""
RECORD = "case.json"
INDEX = "configurations.json"
"""The file with the list of all configurations. With it, a run with current exports need not import the wheel's
tests."""


@dataclasses.dataclass
class Case:
    """A configuration and its export: the contents of ``case.json``."""

    folder: str
    """The name of the export's folder: index and name, since some configurations share a name."""
    test: str = ""
    """The class of the test."""
    rtol: float = 0.0
    atol: float = 0.0
    timeout: float = 0.0
    """The time limit of a run in seconds."""
    comparable: bool = True
    """False if the test compares nothing, because its outputs are random."""
    kv_cache: str | None = None
    """The cache that the program needs: ``capacity,n_layers,n_kv_heads,head_dim[,dtype]``."""
    expected_segments: int = 0
    """The number of delegates in the program that the test expects."""
    expected_nodes: dict[str, int] | None = None
    """The counts of nodes that the test expects."""
    segments: int = 0
    nodes: dict[str, int] = dataclasses.field(default_factory=dict)
    """The count of each type of node in the program."""
    seconds: float = 0.0
    """Seconds of the export."""
    error: str | None = None
    """The reason why the configuration cannot be exported."""
    stamp: str = ""

    @property
    def path(self) -> Path:
        """Return the folder with ``model.pte``, ``input.bin`` and ``expected_output.bin``."""
        return FOLDER / self.folder

    @property
    def ops(self) -> list[str]:
        """Return the types of nodes, under the names that the delegate uses."""
        return sorted(name.removesuffix("Node") for name in self.nodes)

    def write(self) -> None:
        write_json(self.path / RECORD, dataclasses.asdict(self))


def folder_name(index: int, name: str) -> str:
    """Return the name of a configuration's folder, without characters that are special in a shell."""
    return f"{index:03}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}"


def listed() -> list[str] | None:
    """Return the folders of all configurations in order; None if the list is stale."""
    known = read_json(FOLDER / INDEX)
    return known["folders"] if known and known["stamp"] == stamp() else None


def read(folder: str) -> Case | None:
    """Return the case in a folder; None if there is none or it is stale."""
    record = read_json(FOLDER / folder / RECORD)
    if not record or record.get("stamp") != stamp():
        return None
    case = Case(**record)
    return case if case.error or (case.path / "model.pte").is_file() else None


@functools.cache
def stamp() -> str:
    """Return a digest of everything that affects an export: packages, the wheel's tests and the code that exports."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for package in ("executorch", "torch", "torchao", "transformers"):
        digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    wheel = Path(str(importlib.metadata.distribution("executorch").locate_file("executorch/backends/mlx/test")))
    for file in (wheel / "test_ops.py", wheel / "test_utils.py"):
        digest.update(file.read_bytes())
    here = Path(__file__).parent
    for file in (here / "wheel.py", here / "export_worker.py"):
        digest.update(_code(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:16]


def read_json(path: Path) -> Any:
    """Return the contents of a file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a file atomically: a reader finds the old or the new contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
