"""The families of models that tests export, and the outcomes: ``families.json``, written by ``family_sweep.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etkv.export.request import BACKENDS

FILE = Path(__file__).with_name("families.json")
"""The version of transformers, and the outcome for each family and backend: kind, reason, and parts of the model."""

EQUAL = "equal"
"""The kind of outcome of a family whose program has the logits of transformers."""


def read() -> dict[str, Any]:
    """Return the contents of :data:`FILE`."""
    contents: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return contents


def runs(outcomes: dict[str, dict[str, Any]]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the families that can be exported: name -> parts of the model, and backends on which the family was
    compared.
    """
    found = {}
    for name, had in outcomes.items():
        backends = [backend for backend in BACKENDS if had.get(backend, {}).get("kind") == EQUAL]
        if backends:
            parts = [part for backend in backends for part in had[backend]["parts"]]
            found[name] = list(dict.fromkeys(parts)), backends
    return found


def table() -> str:
    """Return a table, as text, of the families that can be exported."""
    contents = read()
    rows = [("family", "tested on", "parts")]
    rows += [
        (name, ", ".join(backends), ", ".join(parts)) for name, (parts, backends) in runs(contents["outcomes"]).items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name:{widths[0]}}  {backends:{widths[1]}}  {parts}".rstrip() for name, backends, parts in rows]
    version = contents["transformers"]
    head = [
        f"Families of transformers {version} for which programs of tiny models return the same logits. Other families",
        "with the same parts can be exported too. The exporter refuses parts that it does not support. The name of a",
        "model's family is `model_type` in its config.json.",
        "",
    ]
    return "\n".join([*head, *lines])
