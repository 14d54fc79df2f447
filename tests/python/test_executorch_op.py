"""ExecuTorch's own tests of the op, on this package's op and caches."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def names_in(file: Path) -> set[str]:
    """Return the names of the tests in a file, without running it."""
    return {
        f"{group.name}.{test.name}"
        for group in ast.parse(file.read_text()).body
        if isinstance(group, ast.ClassDef)
        for test in group.body
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test")
    }


@pytest.mark.long
def test_all_of_them_pass():
    """The tests run in a process without ExecuTorch's op. No test of the file is omitted or skipped.
    ``executorch_adapter.py`` lists the differences that it translates.
    """
    spec = importlib.util.find_spec("executorch")
    file = next(
        Path(folder, "extension/llm/cache/test_update_and_attend.py") for folder in spec.submodule_search_locations
    )
    there = names_in(file)
    assert len(there) == 38

    script = Path(__file__).with_name("executorch_adapter.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["not passed"] == {}
    assert set(told["passed"]) == there
    assert len(told["passed"]) == len(there)
