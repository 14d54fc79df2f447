"""Each public header compiles with warnings as errors: alone, included twice, and in two files of one library.

``headers.py INCLUDE CC CXX FLAG...``: with the FLAGs the headers find ExecuTorch and MLX.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
C = ["-std=c11", "-pedantic-errors"]
CPP17 = ["-std=c++17"]
CPP20 = ["-std=c++20"]
NEITHER = ["-fno-exceptions", "-fno-rtti"]

# Headers that need no include path except MLX's.
MLX = {"mlx_cache.hpp", "executorch_mlx_cache.hpp"}

# Headers that need ExecuTorch or MLX, and therefore exceptions and a newer standard.
OF_HOSTS = {"backend_id.hpp", *MLX}


def is_of_host(header: str) -> bool:
    return header in OF_HOSTS or header.startswith("executorch")


def standards(header: str) -> list[tuple[str, list[str]]]:
    """The ways to compile a header: a C header as C and C++, a C++ header without exceptions and RTTI."""
    if header in MLX:
        return [("C++20", CPP20)]
    if is_of_host(header):
        return [("C++17", CPP17)]
    if header.endswith(".h"):
        return [("C11", C), ("C++17", CPP17), ("C++20", CPP20)]
    return [("C++17 without exceptions and RTTI", CPP17 + NEITHER), ("C++20", CPP20)]


EVERYTHING = os.environ.get("ETKV_TEST_LONG") == "1"
"""Whether to compile each header in every way. Otherwise all are compiled together in the newest standard. Those that
need neither ExecuTorch nor MLX, whose headers take seconds, are also compiled alone, in their oldest standard.
"""


def chosen(header: str) -> list[tuple[str, list[str]]]:
    """The ways in which the header is compiled alone."""
    if EVERYTHING:
        return standards(header)
    return [] if is_of_host(header) else standards(header)[:1]


# The expansion of ETKV_API by the defined macros. For Windows only the text is checked.
EXPORTS = {
    ("-D_WIN32", "-DETKV_BUILDING"): "__declspec(dllexport)",
    ("-D_WIN32",): "__declspec(dllimport)",
    ("-D_WIN32", "-DETKV_STATIC"): "",
    ("-U_WIN32",): '__attribute__((visibility("default")))',
    ("-U_WIN32", "-DETKV_BUILDING"): '__attribute__((visibility("default")))',
    ("-U_WIN32", "-DETKV_STATIC"): "",
}


def main(include: Path, cc: str, cxx: str, flags: list[str]) -> int:
    headers = sorted(path for path in (include / "etkv").iterdir() if path.suffix in {".h", ".hpp"})
    passed, failures = 0, []

    def compile_with(what: str, arguments: list[str]) -> bool:
        nonlocal passed
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
        if run.returncode == 0:
            passed += 1
        else:
            failures.append(what)
            print(f"failed: {what}\n{run.stderr[:4000]}")
        return run.returncode == 0

    with tempfile.TemporaryDirectory() as scratch:
        for header in headers:
            line = f'#include "etkv/{header.name}"\n'
            for name, standard in chosen(header.name):
                compiler, suffix = (cc, "c") if standard is C else (cxx, "cpp")
                # The second include tests the include guard.
                source = Path(scratch) / f"{header.stem}_{header.suffix[1:]}.{suffix}"
                source.write_text(line + line + "extern int etkv_header_test;\n")
                compile_with(
                    f"{header.name} as {name}",
                    [compiler, *standard, *WARNINGS, f"-I{include}", *flags, "-fsyntax-only", str(source)],
                )

        for defines, expected in EXPORTS.items():
            source = Path(scratch) / "export.c"
            source.write_text('#include "etkv/export.h"\n[ETKV_API]\n')
            command = [cc, *defines, f"-I{include}", "-E", "-P", str(source)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if run.stdout.strip() == f"[{expected}]":
                passed += 1
            else:
                what = f"ETKV_API with {' '.join(defines)}"
                failures.append(what)
                print(f"failed: {what} is {run.stdout.strip()}, expected [{expected}]\n{run.stderr[:4000]}")

        # A function that is not inline is defined in each file that includes it. Copies of one object are such files.
        source, one, two = (Path(scratch) / name for name in ("every.cpp", "one.o", "two.o"))
        source.write_text("".join(f'#include "etkv/{header.name}"\n' for header in headers))
        compiled = [cxx, *CPP20, *WARNINGS, f"-I{include}", *flags, "-fPIC", "-c", str(source), "-o", str(one)]
        if compile_with("every header in one file", compiled):
            shutil.copy(one, two)
            undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
            compile_with(
                "every header in two files of one library",
                [cxx, "-shared", *undefined, str(one), str(two), "-o", f"{scratch}/both"],
            )

    print(f"{passed} passed, {len(failures)} failed")
    return 1 if failures or not headers else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
