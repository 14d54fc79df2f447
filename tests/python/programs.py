"""Exports the programs that most tests run, two at a time, where they are missing or stale. Tests export the rest."""

from __future__ import annotations

import reference
import test_export
import test_families
import test_model_precision


def main() -> None:
    variants = {*test_export.VARIANTS, *test_families.VARIANTS, *test_model_precision.VARIANTS}
    variants |= set(test_model_precision.SMOLLM2)
    reference.programs(sorted(variants, key=str))


if __name__ == "__main__":
    main()
