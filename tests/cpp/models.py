"""Exports the programs of the C++ tests, if they are missing or would be exported differently now.

``models.py TINY_MODELS.py OUTDIR`` writes ``OUTDIR/<name>/model.pte`` for every name in PROGRAMS.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etkv.export import ExportRequest

PROGRAMS = {
    "llama-f32": ("tiny-llama", {}),
    "llama-cpu": ("tiny-llama", {"backend": "cpu"}),
    "llama-bf16": ("tiny-llama", {"dtype": "bfloat16"}),
    # The same layers and KV heads as the others, with a larger head_dim.
    "qwen3-f32": ("tiny-qwen3", {}),
    "qwen3-cpu": ("tiny-qwen3", {"backend": "cpu"}),
    # Drafts that accept fewer tokens than their targets, or hold fewer.
    "llama-chunk4": ("tiny-llama", {"prefill_chunk": 4}),
    "llama-last": ("tiny-llama", {"logits": "last"}),
    "mistral-window": ("tiny-mistral-window", {}),
    # Drafts of their last layer, and targets that return the hidden states for them.
    "llama-tapped": ("tiny-llama", {"tap_layers": (0,)}),
    "llama-taps": ("tiny-llama", {"tap_layers": (1, 0)}),
    "llama-draft": ("tiny-llama", {"draft": 1}),
    "llama-draft-chunk4": ("tiny-llama", {"draft": 1, "prefill_chunk": 4}),
    "mistral-window-tapped": ("tiny-mistral-window", {"tap_layers": (0,)}),
    "mistral-window-draft": ("tiny-mistral-window", {"draft": 1}),
}
"""Name -> tiny model, and its differences from :data:`DEFAULTS`."""

DEFAULTS = {"dtype": "float32", "prefill_chunk": 32}


def _tiny_models(path: Path):
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requests(tiny_models: Path, outdir: Path) -> list[ExportRequest]:
    """Return the export functions. Write the models' weights if they are missing or stale."""
    from etkv.export import ExportRequest
    from etkv.export.progress import third_party_noise

    tiny = _tiny_models(tiny_models)
    found = []
    for name, (model, options) in PROGRAMS.items():
        weights = outdir / "hf" / model
        stamp = weights / ".written"
        if not stamp.exists() or stamp.stat().st_mtime < tiny_models.stat().st_mtime:
            with third_party_noise(allowed=False):
                tiny.write(model, weights)
            stamp.touch()
        found.append(ExportRequest(model=weights, output=outdir / name / "model.pte", **{**DEFAULTS, **options}))
    return found


def main(tiny_models: Path, outdir: Path) -> int:
    # Nothing is downloaded from a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from etkv.export import Progress, export_program, is_current
    from etkv.export.progress import third_party_noise

    stale = [request for request in requests(tiny_models, outdir) if not is_current(request)]
    for request in stale:
        with third_party_noise(allowed=False):
            export_program(request, Progress(sys.stderr))
    print(f"{len(stale)} written, {len(PROGRAMS) - len(stale)} current")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
