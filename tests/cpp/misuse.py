"""Misuses of the C++ interface do not compile, and the correct use in place of each misuse does.

``misuse.py INCLUDE CXX``
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]

HEAD = """
#include "etkv/etkv.hpp"

etkv::Result<int> number();
etkv::Result<void> done();
"""

USE = """
int use{number}(etkv::Cache& cache, etkv::SeqCache& sequences, const etkv::Result<int>& found) {{
  static_cast<void>(cache);
  static_cast<void>(sequences);
  static_cast<void>(found);
  {body}
  return 0;
}}
"""

# A misuse, the correct use, and a word of the compiler's message for the misuse.
MISUSES = {
    "a Result that is ignored": ("number();", "if (!number()) return 1;", "nodiscard"),
    "a Result<void> that is ignored": ("done();", "if (!done()) return 1;", "nodiscard"),
    "a method whose Result is ignored": ("cache.rewind(0);", "if (!cache.rewind(0)) return 1;", "nodiscard"),
    "a Result<bool> as a condition": (
        "while (cache.can_extend()) {}",
        "while (cache.can_extend().value_or(false)) {}",
        "a Result<bool> is not a condition",
    ),
    "a Result<bool> that is negated": (
        "if (!cache.can_extend()) return 1;",
        "if (!*cache.can_extend()) return 1;",
        "a Result<bool> is not a condition",
    ),
    "a Result instead of its value": (
        "int32_t length = cache.length();",
        "int32_t length = *cache.length(); return length;",
        "int32_t",
    ),
    "a change of a const value": ("*found = 3;", "return *found;", "read-only|assign"),
    "a copy of a face": (
        "etkv::Cache other = cache;",
        "etkv::Cache other = cache.share(); return other.capacity();",
        "delete|deleted",
    ),
    "a method of another face": ("auto x = cache.seq_rm(0);", "auto x = sequences.seq_rm(0); return x.ok();", "seq_rm"),
}


def main(include: Path, cxx: str) -> int:
    passed, failed = 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        source, head = Path(scratch) / "misuse.cpp", Path(scratch) / "head.hpp"
        head.write_text(HEAD)
        # All programs begin with the same headers, which are compiled once.
        precompiled = [cxx, *FLAGS[:-1], f"-I{include}", "-x", "c++-header", str(head), "-o", f"{head}.gch"]
        subprocess.run(precompiled, check=True, timeout=300)

        def said(*bodies: str) -> str | None:
            """The compiler's output for a program with these bodies; None if it compiles."""
            uses = (USE.format(number=number, body=body) for number, body in enumerate(bodies))
            source.write_text("".join(uses))
            command = [cxx, *FLAGS, f"-I{include}", "-include", str(head), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            return None if done.returncode == 0 else done.stderr

        # One program per misuse: a compiler reports a template's error once per program.
        for what, (mistake, _, words) in MISUSES.items():
            found = said(mistake)
            holds = found is not None and any(word in found for word in words.split("|"))
            passed, failed = passed + holds, failed + (not holds)
            if not holds:
                print(f"failed: {what}: `{mistake}` {'compiles' if found is None else found[:2000]}")
        found = said(*(meant for _, meant, _ in MISUSES.values()))
        passed, failed = passed + (found is None), failed + (found is not None)
        if found is not None:
            print(f"failed: what is meant does not compile: {found[:2000]}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
