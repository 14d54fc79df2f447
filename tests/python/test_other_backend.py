"""Programs run on etkv's delegate although there is another MLXBackend, in either order of registration.

ExecuTorch's macOS wheel has such a backend, which ``import executorch.runtime`` registers. Here a small library plays
its role. A backend stays registered until its process ends, so each order runs in its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import etkv
import reference
from etkv import pte
from reference import Variant

SOURCE = Path(__file__).resolve().parents[2]

RUN = """
import contextlib, ctypes, json, sys
import numpy as np
program, out, order = sys.argv[1], sys.argv[2], sys.argv[3:]
import etkv

told = {}
for each in order:
    if each == "runtime":
        import executorch.runtime
    elif each == "etkv":
        etkv.register_backend()
    else:
        ctypes.CDLL(each, mode=ctypes.RTLD_GLOBAL)
told["id"] = etkv.register_backend()
facts = etkv.read_kv_cache_metadata(program)
with etkv.DecodeSession(etkv.CacheConfig(facts.layers, 64, k_format="f32", v_format="f32")) as session:
    with etkv.load(program, session) as loaded:
        rows = [loaded.forward([5, 6, 7], [0, 1, 2]), loaded.forward([8], [3])]
        told["length"] = session.length
np.save(out, np.concatenate(rows))
from executorch.runtime import Runtime
told["names"] = Runtime.get().backend_registry.registered_backend_names
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def program() -> Path:
    return reference.program(Variant("tiny-llama")).path


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Return a library that registers as MLXBackend when it is loaded."""
    package = Path(next(iter(__import__("executorch").__path__)))
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    library = tmp_path_factory.mktemp("other") / f"libother{suffix}"
    includes = [package / "include", package / "include/executorch/runtime/core/portable_type/c10"]
    link = [package / "lib" / f"libexecutorch{suffix}"]
    command = [
        *(os.environ.get("CXX") or "c++").split(),
        *["-std=c++17", "-shared", "-fPIC", "-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED"],
        *(f"-I{folder}" for folder in includes),
        SOURCE / "tests/cpp/other_backend/library.cpp",
        *link,
        *["-o", library],
    ]
    subprocess.run(list(map(str, command)), check=True)
    return library


def in_order(program: Path, out: Path, *order: object) -> tuple[dict, np.ndarray]:
    command = [sys.executable, "-c", RUN, program, out, *order]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), np.load(out)


# cpp.backend_ids tests this order of the libraries in C++, without Python's 15 seconds of imports.
@pytest.mark.long
def test_before_and_after(program, other, tmp_path):
    """The rows are the same whether the other backend is registered before or after etkv's."""
    told, expected = in_order(program, tmp_path / "after.npy", "etkv", "runtime", other)
    assert (told["id"], told["length"]) == ("MLXBackend", 4)
    # On macOS, too, an earlier import of the runtime registers the other backend.
    told, rows = in_order(program, tmp_path / "before.npy", "runtime", other)
    assert (told["id"], told["length"]) == ("EtkvForMLX", 4)
    assert {"MLXBackend", "EtkvForMLX"} <= set(told["names"])
    np.testing.assert_array_equal(rows, expected)


def test_a_program_for_another_id(program):
    """Only the id in the tables changes, and only in memory."""
    before = program.read_bytes()
    renamed = pte.for_backend(program, "EtkvForMLX")
    assert program.read_bytes() == before
    assert len(renamed) == len(before)
    assert renamed.count(b"EtkvForMLX") == 1
    assert renamed.replace(b"EtkvForMLX", b"MLXBackend") == before


def test_an_id_of_another_length(program):
    with pytest.raises(etkv.EtkvError, match="backend is 'EtkvMLXBackend', expected a name of 10 characters"):
        pte.for_backend(program, "EtkvMLXBackend")
