"""Programs of tiny models of transformers' families equal transformers, or the export is refused with a sentence."""

from __future__ import annotations

import sys

import pytest

import family_sweep
import reference
import tiny_families
from etkv.export import families

pytestmark = pytest.mark.long

CASES = [(family, backend) for family in tiny_families.names() for backend in family_sweep.BACKENDS]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, family_sweep.Outcome]]:
    """Return all outcomes, from a separate process: a process that has loaded programs cannot be forked."""
    file = tmp_path_factory.mktemp("sweep") / "outcomes.json"
    command = [sys.executable, family_sweep.__file__, file, *(f"{family}:{backend}" for family, backend in CASES)]
    done = reference.run(command, timeout=120 * len(CASES))
    assert done.returncode in (0, 1), done.stderr
    return family_sweep.read(file)


@pytest.mark.timeout(120 * len(CASES))
@pytest.mark.parametrize(("family", "backend"), CASES)
def test_family(outcomes, family, backend):
    found = outcomes[family][backend]
    assert not found.is_fault, found
    assert found.kind == families.read()["outcomes"][family][backend]["kind"]
    assert "\n" not in found.reason
