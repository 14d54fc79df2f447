"""Shared fixtures: tiny models and exports of them, each made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_gguf
import tiny_models
from etkv.export import ExportRequest, export_program
from etkv.export.progress import third_party_noise


@pytest.fixture(scope="session", autouse=True)
def quiet():
    with third_party_noise(allowed=False):
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[[str], Path]:
    """Function: name of a tiny model -> its Hugging Face folder."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = root / name
        return path if path.exists() else tiny_models.write(name, path)

    return folder


@pytest.fixture(scope="session")
def tiny_llama_gguf(tiny, tmp_path_factory) -> Path:
    return tiny_gguf.write(tiny("tiny-llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def exported(tiny, tmp_path_factory) -> Callable[..., Path]:
    """Function: name, what is asked for -> folder with ``model.pte`` and, in ``hf/``, the exported weights."""
    root = tmp_path_factory.mktemp("exports")

    def export(name: str, dtype: str = "float32", quantize: str | None = None, **more: Any) -> Path:
        folder = root / "-".join(str(part) for part in (name, dtype, quantize, *more.items()))
        if not folder.exists():
            export_program(
                ExportRequest(
                    model=tiny(name),
                    output=folder / "model.pte",
                    dtype=dtype,
                    quantize=quantize,
                    prefill_chunk=64,
                    keep_hf=folder / "hf",
                    **more,
                )
            )
        return folder

    return export
