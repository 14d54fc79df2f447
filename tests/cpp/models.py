"""Exports the programs of the C++ tests, if they are missing or stale.

``models.py TINY_MODELS.py OUTDIR`` writes ``OUTDIR/<name>/model.pte`` for every name in PROGRAMS. For models with
recurrent layers it also writes ``OUTDIR/hf/<model>/greedy.txt``: a prompt, and transformers' greedy ids after it.
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
    # Drafts that accept fewer tokens in a step than their targets, or have a shorter context.
    "llama-chunk4": ("tiny-llama", {"prefill_chunk": 4}),
    "llama-last": ("tiny-llama", {"logits": "last"}),
    "mistral-window": ("tiny-mistral-window", {}),
    # Drafts that consist of the last layer, and targets that return the hidden states for these drafts.
    "llama-tapped": ("tiny-llama", {"tap_layers": (0,)}),
    "llama-taps": ("tiny-llama", {"tap_layers": (1, 0)}),
    "llama-draft": ("tiny-llama", {"draft": 1}),
    "llama-draft-chunk4": ("tiny-llama", {"draft": 1, "prefill_chunk": 4}),
    "mistral-window-tapped": ("tiny-mistral-window", {"tap_layers": (0,)}),
    "mistral-window-draft": ("tiny-mistral-window", {"draft": 1}),
    "qwen3.5-f32": ("qwen3.5", {}),
    "qwen3.5-cpu": ("qwen3.5", {"backend": "cpu"}),
}
"""Name -> tiny model, and its differences from :data:`DEFAULTS`."""

RECURRENT = ("qwen3.5",)
"""The models of ``recurrent_models.py``, in the folder of ``TINY_MODELS.py``."""

PROMPT, ANSWER = 150, 80
"""The numbers of ids in ``greedy.txt``: of the prompt, and after it. Anchors lie at multiples of 64."""

DEFAULTS = {"dtype": "float32", "prefill_chunk": 32}


def _module(path: Path):
    # The module imports other modules of its folder.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_greedy(model, file: Path) -> None:
    """Write a prompt on one line, and the greedy ids after it on another."""
    import torch

    ids = [(number * 37 + 11) % 250 for number in range(PROMPT)]
    for _ in range(ANSWER):
        with torch.no_grad():
            (best, second), (chosen, _) = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        if best - second < 1e-3:
            raise ValueError(f"id {len(ids)} of {file} is not clear: two logits differ by {best - second}")
        ids.append(int(chosen))
    lines = (ids[:PROMPT], ids[PROMPT:])
    file.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))


def _write(name: str, tiny_models: Path, weights: Path) -> None:
    """Write the weights of a model, and the ids that tests compare its programs with."""
    if name not in RECURRENT:
        _module(tiny_models).write(name, weights)
        return
    recurrent = _module(tiny_models.with_name("recurrent_models.py"))
    recurrent.write(name, weights)
    _write_greedy(recurrent.model(name), weights / "greedy.txt")


def requests(tiny_models: Path, outdir: Path) -> list[ExportRequest]:
    """Return the export functions. Write the models' weights if they are missing or stale."""
    from etkv.export import ExportRequest
    from etkv.export.progress import third_party_noise

    sources = [tiny_models, *(tiny_models.with_name(f"{name}.py") for name in ("tiny_families", "recurrent_models"))]
    found = []
    for name, (model, options) in PROGRAMS.items():
        weights = outdir / "hf" / model
        stamp = weights / ".written"
        made_by = sources if model in RECURRENT else sources[:1]
        if not stamp.exists() or stamp.stat().st_mtime < max(source.stat().st_mtime for source in made_by):
            with third_party_noise(allowed=False):
                _write(model, tiny_models, weights)
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
