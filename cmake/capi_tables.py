"""Writes the tables of ``etkv.h`` for cffi, so that Python parses no header: ``capi_tables.py CC INCLUDE OUTPUT``.

OUTPUT is a module whose ``ffi`` has the types and functions. It is the same on every platform and for every CPython.
"""

import subprocess
import sys
from pathlib import Path

import cffi


def declarations(cc: str, include: Path) -> str:
    """Return ``etkv.h`` and the headers of etkv that it includes, preprocessed. cffi knows the types of the others."""
    # Freestanding: the compiler's own headers then include none of a system, whose place it might not know.
    command = [cc, "-E", "-ffreestanding", "-DETKV_STATIC", f"-I{include}", str(include / "etkv" / "etkv.h")]
    declared, is_ours = [], False
    for line in subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines():
        if line.startswith("#"):
            # `# 12 "/include/etkv/cache.h"`: the file that the next lines are of.
            is_ours = str(include / "etkv") in line
        elif is_ours:
            declared.append(line)
    return "\n".join(declared)


def main(cc: str, include: Path, output: Path) -> None:
    ffi = cffi.FFI()
    ffi.cdef(declarations(cc, include))
    # None: nothing is compiled, and Python opens the library.
    ffi.set_source("etkv.capi_tables", None)
    ffi.emit_python_code(str(output))
    # cffi does not write an unchanged file, but the build compares times.
    output.touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]))
