"""A shared library exports only its interface. It exports no symbols of Rust's standard library or of cxx's runtime.

``symbols.py NM LIBRARY PREFIX...``: each exported symbol begins with one of the prefixes, and each prefix occurs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from exports import exported


def main(nm: str, library: Path, *prefixes: str) -> int:
    symbols = exported(nm, library)
    failures = [f"{name} is exported" for name in sorted(symbols) if not name.startswith(prefixes)]
    failures += [f"no {each} is exported" for each in prefixes if not any(name.startswith(each) for name in symbols)]
    for failure in failures:
        print(f"failed: {failure}")
    print(f"{len(symbols)} symbols, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
