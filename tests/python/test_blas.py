"""The matrix products of MLX's CPU build are OpenBLAS's, from C++ and from Python, unless it is told otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runners import runner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")

OURS = "libetkv_blas.so"
NOWHERE = "/nowhere/libscipy_openblas.so"
"""Names of Linux."""
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


def test_it_is_what_mlx_calls():
    """The linker tells which library a symbol came from."""
    done = run([sys.executable, "-c", PYTHON], LD_DEBUG="bindings")
    bound = [line for line in done.stderr.splitlines() if "libmlx.so" in line and "`cblas_sgemm'" in line]
    assert bound
    assert all(OURS in line for line in bound), bound
