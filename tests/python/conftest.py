"""Shared fixtures: tiny models and exports of them, each made once a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

# A process ignores what its parent ignores, and a shell's background jobs ignore Ctrl-C: programs that tests start
# would not see it. With Python's own handler here, they begin with the default one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the cores. Threads of OpenMP wait for each other without sleep: where each worker has as many as there
# are cores, most of their time goes into waiting.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# float32 is compared with float32: newer GPUs round the factors of products to TF32 otherwise.
os.environ["MLX_ENABLE_TF32"] = "0"

# Some virtual machines announce AMX and cannot run it: PyTorch's bfloat16 products end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import reference
import tiny_gguf
from etkv.export.progress import third_party_noise
from reference import Variant


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the real model go first: they take longest, and no worker should be alone with one at the end."""
    long = {item.path for item in items if item.get_closest_marker("real_model")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def quiet():
    with third_party_noise(allowed=False):
        yield


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Path]:
    """Function: name of a tiny model -> its Hugging Face folder."""
    return reference.tiny_source


@pytest.fixture(scope="session")
def tiny_llama_gguf(tiny, tmp_path_factory) -> Path:
    return tiny_gguf.write(tiny("tiny-llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def exported() -> Callable[..., Path]:
    """Function: what makes a program -> the folder with ``model.pte`` and, in ``hf/``, the exported weights."""
    return lambda *parts, **more: reference.program(Variant(*parts, **more)).path.parent
