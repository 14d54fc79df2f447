"""Exports the programs that most tests run, if they are missing or stale, two at a time. Tests export the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import reference
import runners
import test_cpu_programs
import test_export
import test_families
import test_model_precision
import test_outputs
import test_passes
import tiny_models

sys.path.append(str(reference.ROOT / "tests/cpp"))
import models as of_cpp

FILES = (runners, test_cpu_programs, test_export, test_families, test_model_precision, test_outputs, test_passes)


def main() -> None:
    variants = {variant for file in FILES for variant in file.VARIANTS} | set(test_model_precision.SMOLLM2)
    requests = [reference.request(variant) for variant in sorted(variants, key=str)]
    of_tests = of_cpp.requests(Path(tiny_models.__file__), reference.MODELS / "cpp-tests")
    reference.export([*requests, *of_tests])


if __name__ == "__main__":
    main()
