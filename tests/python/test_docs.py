"""docs/python.md does what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

import document
from reference import ROOT


@pytest.mark.real_model
def test_the_page_on_python():
    """In a process of its own, as a reader runs it."""
    done = subprocess.run(
        [sys.executable, document.__file__, "docs/python.md"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "the page is right\n"


def test_a_page_that_is_wrong_is_told(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 2\n```\n\n```python\nprint(x + 1)\n```\n```text\n4\n```\n")
    assert document.run(page) == [f"{page}:6 prints\n3\n\nand the page says\n4\n"]
    page.write_text("```python\nx = 3\nprint(x)\n```\n```text\n3\n```\n\n```console\n$ python\n```\n")
    assert document.run(page) == []
