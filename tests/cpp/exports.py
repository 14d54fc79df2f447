"""libetkv exports the functions of the C headers, and one symbol for the delegate. The tests call every function.

``exports.py NM CC LIBRARY INCLUDE TEST...``: each TEST is an executable.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from abi_table import Headers

PRIVATE = "etkv_private_"
"""The symbol that libetkv_mlx_backend needs, private to the two libraries."""


def declared(include: Path, cc: str, names: list[str]) -> set[str]:
    """The functions of some headers, and of the headers that they include."""
    return set(Headers(include, cc, names).functions)


def exported(nm: str, library: Path) -> set[str]:
    """The exported symbols; in Mach-O they begin with an underscore."""
    if sys.platform == "darwin":
        listing = [nm, "-gU", "-j", str(library)]
    else:
        listing = [nm, "-D", "--defined-only", "--format=just-symbols", str(library)]
    symbols = subprocess.run(listing, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    names = {symbol.removeprefix("_") if sys.platform == "darwin" else symbol for symbol in symbols}
    return {name for name in names if not name.startswith(PRIVATE)}


def called_by(nm: str, test: Path) -> set[str]:
    """The symbols that a program imports."""
    listing = [nm, "-u", "-j"] if sys.platform == "darwin" else [nm, "-D", "-u", "--format=just-symbols"]
    symbols = subprocess.run([*listing, str(test)], check=True, capture_output=True, text=True, timeout=120)
    return {symbol.removeprefix("_") if sys.platform == "darwin" else symbol for symbol in symbols.stdout.split()}


def main(nm: str, cc: str, library: Path, include: Path, *tests: Path) -> int:
    functions = declared(include, cc, sorted(path.name for path in (include / "etkv").glob("*.h")))
    in_umbrella = declared(include, cc, ["etkv.h"])
    symbols = exported(nm, library)
    called = {name for test in tests for name in called_by(nm, test)}
    failures = [
        *(f"{name} is declared, and etkv.h does not include it" for name in sorted(functions - in_umbrella)),
        *(f"{name} is declared, but not exported" for name in sorted(functions - symbols)),
        *(f"{name} is exported, but not declared" for name in sorted(symbols - functions)),
        *(f"{name} is called in no test" for name in sorted(functions - called)),
    ]
    if not functions:
        failures.append(f"no function is found in the C headers of {include}")
    for failure in failures:
        print(f"failed: {failure}")
    print(f"{len(functions & symbols & called)} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], *map(Path, sys.argv[3:])))
