"""Checks that CMake's build and the commands of Cargo's tests enable the same features of every package.

If features differ, Cargo compiles the package and its dependents twice.
"""

from __future__ import annotations

import subprocess
import sys

CMAKE = ["--edges", "normal,build", "--package", "etkv-capi", "--package", "etkv-tokenizer"]
CORE = ["--edges", "normal,build,dev", "--package", "etkv-core", "--package", "mlx-sys"]
"""The packages of the first command in tools/test-rust."""
TESTS = ["--edges", "normal,build,dev", "--workspace", "--exclude", "etkv-benches"]


def packages(options: list[str]) -> set[str]:
    """Return each package with its version and features."""
    words = ["cargo", "tree", "--locked", "--prefix", "none", "--format", "{p} [{f}]", *options]
    told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {line.removesuffix(" (*)") for line in told.splitlines() if line}


def main() -> int:
    tests = packages(TESTS)
    same = True
    for what, options in [("CMake builds", CMAKE), ("The core's tests use", CORE)]:
        for package in sorted(packages(options) - tests):
            others = [other for other in tests if other.split(" [")[0] == package.split(" [")[0]]
            print(f"{what} {package}, Cargo's tests {' and '.join(others) or 'nothing'}", file=sys.stderr)
            same = False
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
