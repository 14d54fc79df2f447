"""libetkv exports what the headers of C declare and one symbol for the delegate, and tests in C call all of it.

``exports.py NM LIBRARY HEADERS TEST.c...``: HEADERS is their folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PRIVATE = "etkv_private_"
"""What libetkv_mlx_backend asks for, which the two agree on between them."""


def declared(headers: Path) -> set[str]:
    """The functions that the headers of C in this folder mark as exported."""
    whole = "".join(header.read_text() for header in sorted(headers.glob("*.h")))
    text = re.sub(r"/\*.*?\*/|^#.*?$", "", whole, flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"\bETKV_API\b[^;(]*?\b(\w+)\s*\(", text))


def exported(nm: str, library: Path) -> set[str]:
    """The symbols that others can link to; Mach-O's have an underscore before them."""
    if sys.platform == "darwin":
        listing = [nm, "-gU", "-j", str(library)]
    else:
        listing = [nm, "-D", "--defined-only", "--format=just-symbols", str(library)]
    symbols = subprocess.run(listing, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    names = {symbol.removeprefix("_") if sys.platform == "darwin" else symbol for symbol in symbols}
    return {name for name in names if not name.startswith(PRIVATE)}


def main(nm: str, library: Path, headers: Path, *tests: Path) -> int:
    functions = declared(headers)
    symbols = exported(nm, library)
    called = {name for test in tests for name in re.findall(r"\b(etkv_\w+)\s*\(", test.read_text())}
    failures = [
        *(f"{name} is declared, but not exported" for name in sorted(functions - symbols)),
        *(f"{name} is exported, but not declared" for name in sorted(symbols - functions)),
        *(f"{name} is called in no test" for name in sorted(functions - called)),
    ]
    if not functions:
        failures.append(f"no function is found in {headers}")
    for failure in failures:
        print(f"failed: {failure}")
    print(f"{len(functions & symbols & called)} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(Path, sys.argv[2:])))
