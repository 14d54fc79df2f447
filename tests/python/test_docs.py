"""What checks docs/python.md, which tests/package runs on the installed wheel."""

from __future__ import annotations

import document


def test_a_page_that_is_wrong_is_told(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 2\n```\n\n```python\nprint(x + 1)\n```\n```text\n4\n```\n")
    assert document.run(page) == [f"{page}:6 prints\n3\nand the page says\n4\n"]
    page.write_text("```python\nx = 3\nprint(x)\n```\n```text\n3\n```\n\n```console\n$ python\n```\n")
    assert document.run(page) == []
