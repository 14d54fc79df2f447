"""Damaged programs with every operation of ExecuTorch's exporter: each program runs or is refused.

``make fuzz-programs`` runs more programs, with other seeds.
"""

from __future__ import annotations

import re
import sys

import pytest

import reference
from reference import EVERYTHING

sys.path.insert(0, str(reference.ROOT))

from tests.upstream_ops import damage

PROGRAMS = 10_000 if EVERYTHING else 200


@pytest.mark.skipif(sys.platform != "linux", reason="processes are limited as on Linux")
@pytest.mark.timeout(3600)
def test_damaged_programs_of_every_operation():
    ended = damage.run(PROGRAMS, everything=EVERYTHING)
    assert ended.returncode == 0, ended.stdout
    told = re.search(rf"{PROGRAMS} damaged programs, .*", ended.stdout)
    assert told, ended.stdout
    # The test is only meaningful if some damage is refused and some is not.
    for count in (r"(\d+) ran", r"(\d+) were refused when loaded", r"(\d+) when run"):
        assert int(re.search(count, told[0])[1]) > PROGRAMS // 20, told[0]
    reference.note(told[0])
