"""Exports the programs that most tests run, if they are missing or stale, two at a time. Tests export the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import cpu_programs
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


def main() -> None:
    files = (test_export, test_families, test_model_precision, test_outputs, test_passes)
    variants = {variant for file in files for variant in file.VARIANTS} | set(test_model_precision.SMOLLM2)
    reference.programs(sorted(variants, key=str))
    requests = of_cpp.requests(Path(tiny_models.__file__), reference.MODELS / "cpp-tests")
    requests += [cpu_programs.request(variant) for variant in test_cpu_programs.VARIANTS]
    requests.append(test_cpu_programs.draft_request())
    requests += [runners.request_with_longer_context(name, **options) for name, options in runners.LONGER]
    reference.export(requests)


if __name__ == "__main__":
    main()
