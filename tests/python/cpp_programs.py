"""Exports the programs that the C++ tests and the tests of packages run, if they are missing or stale.

It also writes ``greedy.txt`` next to the weights of a model with recurrent layers: a prompt, and transformers' greedy
ids after it.
"""

from __future__ import annotations

import os

import reference
from etkv.export import ExportRequest
from etkv.export.progress import third_party_noise
from reference import Variant
from test_recurrent_programs import Model, recurrent_model
from tiny_programs import ids

VARIANTS = [
    Variant("tiny-llama"),
    Variant("tiny-llama", backend="cpu"),
    Variant("tiny-llama", "bf16"),
    # The same layers and KV heads as the others, with a larger head_dim.
    Variant("tiny-qwen3"),
    Variant("tiny-qwen3", backend="cpu"),
    # Drafts that accept fewer tokens in a step than their targets, or return one row of logits.
    Variant("tiny-llama", prefill_chunk=4),
    Variant("tiny-llama", logits="last"),
    Variant("tiny-mistral-window"),
    # Drafts that consist of the last layer, and targets that return the hidden states for these drafts.
    Variant("tiny-llama", tap_layers=(0,)),
    Variant("tiny-llama", tap_layers=(1, 0)),
    Variant("tiny-llama", draft=1),
    Variant("tiny-llama", draft=1, prefill_chunk=4),
    Variant("tiny-mistral-window", tap_layers=(0,)),
    Variant("tiny-mistral-window", draft=1),
]
RECURRENT = [("qwen3.5", backend) for backend in ("mlx", "cpu")]
"""Models of ``recurrent_models.py``, and backends."""

PROMPT, ANSWER = 150, 80
"""The numbers of ids in ``greedy.txt``: of the prompt, and after it. Anchors lie at multiples of 64."""


def _write_greedy(model: Model) -> None:
    """Write a prompt on one line, and the greedy ids after it on another."""
    file = model.folder / "greedy.txt"
    weights = model.folder / "made-by.txt"
    if file.exists() and file.stat().st_mtime >= weights.stat().st_mtime:
        return
    text = ids(PROMPT)
    for _ in range(ANSWER):
        (best, second), (chosen, _) = model.expected(text)[-1].topk(2)
        if best - second < 1e-3:
            raise ValueError(f"id {len(text)} of {file} is not clear: two logits differ by {best - second}")
        text.append(int(chosen))
    lines = (text[:PROMPT], text[PROMPT:])
    # Another process may write the same.
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
    scratch.replace(file)


def requests() -> list[ExportRequest]:
    """Return the requests of all programs. Write the models if they are missing or stale."""
    recurrent = [recurrent_model(*case) for case in RECURRENT]
    found = [*map(reference.request, VARIANTS), *(model.write() for model in recurrent)]
    _write_greedy(recurrent[0])
    return found


if __name__ == "__main__":
    # Nothing is downloaded from a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with third_party_noise(allowed=False):
        reference.export(requests())
