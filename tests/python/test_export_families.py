"""``python -m etkv.export --list`` and the page of models show the families that the sweep compared."""

from __future__ import annotations

import subprocess
import sys

import family_sweep
import tiny_families
from etkv.export import families


def test_the_page_is_that_of_the_outcomes():
    assert family_sweep.PAGE.read_text() == family_sweep.page(families.read())


def test_every_family_has_an_outcome_on_both_backends_and_none_is_a_fault():
    outcomes = families.read()["outcomes"]
    assert sorted(outcomes) == tiny_families.names()
    for name, had in outcomes.items():
        assert sorted(had) == sorted(family_sweep.BACKENDS), name
        for found in had.values():
            assert not family_sweep.Outcome(**found).is_fault, (name, found)
            assert found["kind"] == families.EQUAL or not found["parts"], (name, found)


def test_the_list_has_families_with_their_parts_and_needs_no_large_package():
    program = (
        "import sys; from etkv.export.__main__ import main\n"
        "try: main(['--list'])\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'executorch.exir'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    rows = [
        line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("llama ", "bert ", "gpt_oss "))
    ]
    assert [name for name, _ in rows] == ["gpt_oss", "llama"]
    assert rows[1][1].split(maxsplit=2) == ["mlx,", "cpu", "full attention"]
    assert "sinks, experts" in rows[0][1]


def test_a_family_that_runs_on_one_backend_has_its_parts():
    found = {"mlx": {"kind": "equal", "parts": ["windows"]}, "cpu": {"kind": "refused", "parts": []}}
    refused = {"mlx": {"kind": "refused", "parts": []}}
    assert families.runs({"a": found, "b": refused}) == {"a": (["windows"], ["mlx"])}
