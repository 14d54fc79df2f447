"""Refuses import circles between the files of a crate, except between a module and its submodules."""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Module = tuple[str, ...]


def modules(source: Path) -> dict[Module, str]:
    """Return the code of each module under a folder, without comments and tests."""
    found = {}
    for file in sorted(source.rglob("*.rs")):
        parts = file.relative_to(source).with_suffix("").parts
        if "tests" in parts:
            continue
        name = parts[:-1] if parts[-1] in ("lib", "mod") else parts
        code = re.sub(r"//.*", "", file.read_text())
        found[name] = code.partition("#[cfg(test)]\nmod tests {")[0]
    return found


def used(name: Module, code: str, known: dict[Module, str]) -> set[Module]:
    """Return the modules that a module names, except its parents and submodules."""
    paths = [path.split("::") for path in re.findall(r"\bcrate::([\w:]+)", code)]
    for start, names in re.findall(r"\bcrate::([\w:]*?):*\{([^}]*)\}", code):
        paths += [[*start.split("::"), *item.strip().split("::")] for item in names.split(",")]
    for supers, path in re.findall(r"((?:\bsuper::)+)([\w:]+)", code):
        paths.append([*name[: len(name) - supers.count("super")], *path.split("::")])
    found = set()
    for path in paths:
        ends = (tuple(path[:n]) for n in range(len(path), 0, -1))
        other = next((end for end in ends if end in known), None)
        if other is not None and other[: len(name)] != name and name[: len(other)] != other:
            found.add(other)
    return found


def main() -> int:
    status = 0
    for source in [ROOT / "src", *sorted(ROOT.glob("crates/*/src"))]:
        known = modules(source)
        try:
            TopologicalSorter({name: used(name, code, known) for name, code in known.items()}).prepare()
        except CycleError as error:
            circle = " -> ".join("::".join(name) for name in reversed(error.args[1]))
            print(f"{source.relative_to(ROOT)}: a circle of files: {circle}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
