"""Families of transformers in a tiny form are equal to transformers, or refused with a sentence.

All of them run in `make test-long`.
"""

from __future__ import annotations

import pytest

import family_sweep
import tiny_families
from reference import EVERYTHING

SHORT = {
    # Masks of its own, attention of its own, no attention, layers of other kinds.
    ("doge", "mlx"): "refused",
    ("bloom", "cpu"): "refused",
    ("rwkv", "mlx"): "refused",
    ("llama4_text", "cpu"): "refused",
    # Positions that no attention is passed; a part of each head rotated, and all of it; sizes by layer.
    ("persimmon", "cpu"): "equal",
    ("gpt_neox", "cpu"): "equal",
    ("phi3", "cpu"): "equal",
    ("gemma4_text", "mlx"): "equal",
    # Norms that are written out, and a factor after the head.
    ("cohere", "mlx"): "equal",
}
"""What runs in `make test` -> its outcome."""

CASES = (
    [(family, backend) for family in tiny_families.names() for backend in family_sweep.BACKENDS]
    if EVERYTHING
    else list(SHORT)
)


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    family_sweep.prepare()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "backend"), CASES)
def test_family(family, backend):
    found = family_sweep.outcome(family, backend)
    assert not found.is_fault, found
    assert found.kind == SHORT.get((family, backend), found.kind), found
    assert "\n" not in found.reason
