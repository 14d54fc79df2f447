"""Each public header compiles on its own, twice over, and in two files of one library, with every warning an error.

``headers.py INCLUDE CC CXX FLAG...``: FLAGs are what the headers need to find ExecuTorch and MLX.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
C = ["-std=c11", "-pedantic-errors"]
CPP17 = ["-std=c++17"]
CPP20 = ["-std=c++20"]
NEITHER = ["-fno-exceptions", "-fno-rtti"]

# What MLX's headers take: all that these need.
MLX = {"mlx_cache.hpp", "executorch_mlx_cache.hpp"}

# Beyond C++17, which every other header takes.
ALSO = {
    "etkv.h": [("C11", C), ("C++20", CPP20)],
    "log.h": [("C11", C)],
    "report.h": [("C11", C)],
    "etkv.hpp": [("C++17 without exceptions and RTTI", CPP17 + NEITHER), ("C++20", CPP20)],
}


def main(include: Path, cc: str, cxx: str, flags: list[str]) -> int:
    headers = sorted(path for path in (include / "etkv").iterdir() if path.suffix in {".h", ".hpp"})
    passed, failures = 0, []

    def compile_with(what: str, arguments: list[str]) -> None:
        nonlocal passed
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
        if run.returncode == 0:
            passed += 1
        else:
            failures.append(what)
            print(f"failed: {what}\n{run.stderr[:4000]}")

    with tempfile.TemporaryDirectory() as scratch:
        for header in headers:
            line = f'#include "etkv/{header.name}"\n'
            least = ("C++20", CPP20) if header.name in MLX else ("C++17", CPP17)
            for name, standard in [least, *ALSO.get(header.name, [])]:
                compiler, suffix = (cc, "c") if standard is C else (cxx, "cpp")
                # The repeated line is what an include guard is for.
                source = Path(scratch) / f"{header.stem}_{header.suffix[1:]}.{suffix}"
                source.write_text(line + line + "extern int etkv_header_test;\n")
                compile_with(
                    f"{header.name} as {name}",
                    [compiler, *standard, *WARNINGS, f"-I{include}", *flags, "-fsyntax-only", str(source)],
                )

        # A function that is not inline would be there twice.
        everything = "".join(f'#include "etkv/{header.name}"\n' for header in headers)
        sources = [Path(scratch) / name for name in ("one.cpp", "two.cpp")]
        for source in sources:
            source.write_text(everything)
        compile_with(
            "every header in two files of one library",
            [cxx, *CPP20, *WARNINGS, f"-I{include}", *flags, "-fPIC", "-shared", "-o", f"{scratch}/both"]
            + (["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])
            + [str(source) for source in sources],
        )

    print(f"{passed} passed, {len(failures)} failed")
    return 1 if failures or not headers else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
