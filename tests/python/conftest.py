"""Shared fixtures: tiny models and their programs, each created once a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# A shell's background jobs ignore SIGINT, and processes inherit ignored signals. With Python's own handler, programs
# that tests start get the default handler instead.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the cores. OpenMP's threads spin while they wait for each other. If each worker had a thread per core,
# most time would be spent waiting.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# Tests compare float32 with float32. Without this, newer GPUs round the factors of products to TF32.
os.environ["MLX_ENABLE_TF32"] = "0"

# Some virtual machines report AMX but cannot run it. PyTorch's bfloat16 products would crash the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import etkv
import reference
import tiny_gguf
from etkv.export.progress import third_party_noise
from reference import PROMPT, Variant, config


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the long tests unless they are asked for.

    Sort files with the real model first. They take longest, and other workers would wait for them at the end.
    """
    if not reference.EVERYTHING:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="make test-long"))
    first = {item.path for item in items if item.get_closest_marker("real_model")}
    items.sort(key=lambda item: item.path not in first)


@pytest.fixture(scope="session", autouse=True)
def quiet():
    with third_party_noise(allowed=False):
        yield


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Path]:
    """Return a function from the name of a tiny model to its Hugging Face folder."""
    return reference.tiny_source


@pytest.fixture(scope="session")
def llama() -> reference.Program:
    return reference.program(Variant("tiny-llama"))


@pytest.fixture
def loaded(llama) -> Iterator[etkv.Program]:
    """The program of tiny-llama, with a session of 200 positions."""
    session = etkv.DecodeSession(config(llama, 200))
    with session, etkv.load(llama.path, session, logits="last") as program:
        yield program


@pytest.fixture(scope="session")
def greedy_ids(llama) -> list[int]:
    """24 greedy ids after ``PROMPT``, by tiny-llama in transformers."""
    return reference.greedy(llama.hf, {"prompt": PROMPT}, 24)["prompt"].ids


@pytest.fixture(scope="session")
def tokenizer(llama) -> etkv.Tokenizer:
    return etkv.Tokenizer.from_pretrained(llama.path)


@pytest.fixture(scope="session")
def tiny_llama_gguf(tiny, tmp_path_factory) -> Path:
    return tiny_gguf.write(tiny("tiny-llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def exported() -> Callable[..., Path]:
    """Return a function from the arguments of a :class:`Variant` to the folder of its program.

    The folder has ``model.pte``, and the exported weights in ``hf/``.
    """
    return lambda *parts, **more: reference.program(Variant(*parts, **more)).path.parent
