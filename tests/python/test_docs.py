"""Checks of the pages: the runner in README, the links, and the tool with which tests/package runs docs/python.md."""

from __future__ import annotations

import re

import document
import reference


def test_a_wrong_page_is_reported(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 2\n```\n\n```python\nprint(x + 1)\n```\n```text\n4\n```\n")
    assert document.run(page) == [f"{page}:6 prints\n3\nand the page says\n4\n"]
    page.write_text("```python\nx = 3\nprint(x)\n```\n```text\n3\n```\n\n```console\n$ python\n```\n")
    assert document.run(page) == []


def test_the_readme_shows_parts_of_the_shortest_runner():
    page = (reference.ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```cpp\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    runner = (reference.ROOT / "examples" / "minimal.cpp").read_text(encoding="utf-8")
    assert len(blocks) == 2
    assert all(block in runner for block in blocks)


def test_links_of_the_pages_lead_to_files():
    pages = [
        reference.ROOT / "README.md",
        reference.ROOT / "examples" / "README.md",
        *(reference.ROOT / "docs").glob("*.md"),
    ]
    broken = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, heading = link.partition("#")
            if "://" in path:
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                broken.append(f"{page.name}: {link}")
            elif heading and heading not in headings(target):
                broken.append(f"{page.name}: {link} has no such heading")
        defined = set(re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE))
        broken += [f"{page.name}: [{name}]" for name in re.findall(r"\]\[([^\]]+)\]", text) if name not in defined]
    assert not broken


def headings(page):
    """Return the anchors of the headings of `page`, as GitHub generates them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
