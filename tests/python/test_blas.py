"""MLX's CPU build multiplies matrices with OpenBLAS, from C++ and Python, unless an environment variable forbids it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import reference
from reference import EVERYTHING, STORY, Program, Variant
from runners import runner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")

OURS = "libetkv_blas.so"
NOWHERE = "/nowhere/libscipy_openblas.so"
"""A path at which there is no library."""
HALF = [Variant("tiny-llama", "f16"), Variant("tiny-llama", "bf16")]
HALF += [Variant("tiny-gemma3", "bf16")] if EVERYTHING else []
PYTHON = """
import etkv
from etkv._capi import lib, text
with etkv.DecodeSession(etkv.CacheConfig([etkv.LayerConfig(1, 8)], capacity=8)):
    pass
import mlx.core as mx
with mx.stream(mx.cpu):
    product = mx.full((40, 50), 2.0) @ mx.full((50, 60), 3.0)
    assert mx.all(product == 300.0).item()
print(text(lib().etkv_mlx_blas()))
"""


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ETKV_BLAS", "LD_"))}
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=120, check=True)


def version(**environment: str) -> str:
    return run([str(runner("chat")), "--version"], **environment).stdout


def test_runners_multiply_by_openblas():
    assert "BLAS OpenBLAS 0.3." in version()


def test_mlx_keeps_its_own_if_the_variable_says_so():
    assert "BLAS MLX's own" in version(ETKV_BLAS="mlx")


def test_a_missing_blas_is_reported():
    done = run([str(runner("chat")), "--version"], ETKV_BLAS=NOWHERE)
    assert "BLAS MLX's own" in done.stdout
    assert f"ETKV_BLAS is {NOWHERE}" in done.stderr


@pytest.mark.parametrize("blas", ["", "mlx"])
def test_python_multiplies_by_it_as_well(blas):
    done = run([sys.executable, "-c", PYTHON], **({"ETKV_BLAS": blas} if blas else {}))
    assert done.stdout.startswith("MLX's own" if blas else "OpenBLAS 0.3.")


def test_mlx_calls_openblas():
    """The dynamic linker reports from which library a symbol came."""
    done = run([sys.executable, "-c", PYTHON], LD_DEBUG="bindings")
    bound = [line for line in done.stderr.splitlines() if "libmlx.so" in line and "`cblas_sgemm'" in line]
    assert bound
    assert all(OURS in line for line in bound), bound


@pytest.fixture(scope="module")
def programs() -> dict[Variant, Program]:
    return reference.programs(HALF)


@pytest.mark.parametrize("variant", HALF, ids=str)
def test_threads_share_products_in_half_precision(programs, variant, monkeypatch):
    """No BLAS computes these products. Several threads compute the same outputs as one thread."""
    program = programs[variant]
    prompt = reference.tokenize(program, STORY)[:40]

    def logits(threads: int) -> np.ndarray:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(threads))
        return reference.forward(program, prompt, decode=4, rows="all").logits

    one = logits(1)
    for threads in (2, 3):
        np.testing.assert_array_equal(logits(threads), one)
