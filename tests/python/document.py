"""Runs the Python blocks of a page, one after the other in one namespace, and compares their output.

Blocks marked ``python`` are run. A ``text`` block right after a Python block is the expected output.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield line, code and expected output of each Python block; None if the page shows no output."""
    found = list(_BLOCK.finditer(page))
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block[1] != "python":
            continue
        behind = after is not None and after[1] == "text" and page[block.end() : after.start()].strip() == ""
        yield page.count("\n", 0, block.start()) + 2, block[2], after[2] if behind else None


def run(path: Path) -> list[str]:
    """Return the differences from the page, one for each block with a difference."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    wrong = []
    for line, code, expected in blocks(path.read_text(encoding="utf-8")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # With leading newlines, a traceback has the line numbers of the page.
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)
        if expected is not None and printed.getvalue() != expected:
            wrong.append(f"{path}:{line} prints\n{printed.getvalue()}and the page says\n{expected}")
    return wrong


if __name__ == "__main__":
    problems = run(Path(sys.argv[1]))
    print("\n".join(problems) or "the page is right")
    sys.exit(bool(problems))
