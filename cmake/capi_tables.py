"""Compiles ``etkv.h`` to tables for cffi, so that Python parses no header: ``capi_tables.py CC INCLUDE OUTPUT``.

OUTPUT is a module whose ``ffi`` has the types and functions. It is the same for every platform and CPython.
"""

import subprocess
import sys
from pathlib import Path

import cffi


def declarations(cc: str, include: Path) -> str:
    """Return ``etkv.h`` and etkv's headers that it includes, preprocessed. cffi has the types of system headers."""
    # With -ffreestanding the compiler's headers include no system headers, whose folder may be unknown.
    command = [cc, "-E", "-ffreestanding", "-DETKV_STATIC", f"-I{include}", str(include / "etkv" / "etkv.h")]
    declared, is_ours = [], False
    for line in subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines():
        if line.startswith("#"):
            # `# 12 "/include/etkv/cache.h"`: the next lines come from this file.
            is_ours = str(include / "etkv") in line
        elif is_ours:
            declared.append(line)
    return "\n".join(declared)


def main(cc: str, include: Path, output: Path) -> None:
    ffi = cffi.FFI()
    ffi.cdef(declarations(cc, include))
    # None: no C code is compiled; Python opens the library.
    ffi.set_source("etkv.capi_tables", None)
    ffi.emit_python_code(str(output))
    # cffi does not write an unchanged file, but the build system compares modification times.
    output.touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]))
