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

FILES = (runners, test_cpu_programs, test_export, test_families, test_model_precision, test_outputs, test_passes)


def main() -> None:
    variants = {variant for file in FILES for variant in file.VARIANTS} | set(test_model_precision.SMOLLM2)
    requests = [reference.request(variant) for variant in sorted(variants, key=str)]
    reference.export(list(dict.fromkeys([*requests, *cpp_programs.requests()])))


if __name__ == "__main__":
    main()
