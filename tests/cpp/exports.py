"""libetkv exports what the C headers declare and one symbol for the delegate; the tests of the C interface call it all.

``exports.py NM LIBRARY INCLUDE TEST...``, of which the last are executables
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PRIVATE = "etkv_private_"
"""What libetkv_mlx_backend asks for, which the two agree on between them."""


def declared(include: Path) -> set[str]:
    """The functions that the C headers mark as exported. ``etkv.h`` includes all of these headers."""
    umbrella = (include / "etkv" / "etkv.h").read_text()
    headers = {path for path in (include / "etkv").glob("*.h") if path.name != "etkv.h"}
    included = {include / name for name in re.findall(r'^#include "(etkv/\w+\.h)"$', umbrella, re.MULTILINE)}
    if headers != included:
        raise SystemExit(f"etkv.h includes other headers than there are: {sorted(map(str, headers ^ included))}")
    text = "\n".join(path.read_text() for path in sorted(headers))
    text = re.sub(r"/\*.*?\*/|^#.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
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


def called_by(nm: str, test: Path) -> set[str]:
    """The symbols that a program takes from its libraries."""
    listing = [nm, "-u", "-j"] if sys.platform == "darwin" else [nm, "-D", "-u", "--format=just-symbols"]
    symbols = subprocess.run([*listing, str(test)], check=True, capture_output=True, text=True, timeout=120)
    return {symbol.removeprefix("_") if sys.platform == "darwin" else symbol for symbol in symbols.stdout.split()}


def main(nm: str, library: Path, include: Path, *tests: Path) -> int:
    functions = declared(include)
    symbols = exported(nm, library)
    called = {name for test in tests for name in called_by(nm, test)}
    failures = [
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
    sys.exit(main(sys.argv[1], *map(Path, sys.argv[2:])))
