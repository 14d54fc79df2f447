"""Exports the programs that most tests run, if they are missing or stale, two at a time. Tests export the rest."""

from __future__ import annotations

import cpp_programs
import reference
import runners
import test_cpu_programs
import test_export
import test_families
import test_model_precision
import test_outputs
import test_passes

FILES = (
    cpp_programs,
    runners,
    test_cpu_programs,
    test_export,
    test_families,
    test_model_precision,
    test_outputs,
    test_passes,
)


def main() -> None:
    # Exports of models with recurrent layers run the program, which needs the library. It may not be built yet.
    variants = {reference.REAL_MODEL, *(variant for file in FILES for variant in file.VARIANTS)}
    if reference.EVERYTHING:
        variants |= set(test_model_precision.SMOLLM2)
    reference.programs(sorted(variants, key=str))


if __name__ == "__main__":
    main()
