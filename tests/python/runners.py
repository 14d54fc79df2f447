"""Runs the example runners for tests, with programs and options, and parses their answers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import reference
from reference import EVERYTHING, Program, Variant

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

RUNNERS = {
    "admission": [],
    "agent_fork": ["--context-tokens", 100],
    "batch": [],
    "prefix": [],
    "rollback": [],
    "speculative": ["--depth", 3, "--width", 2],
}
"""Name of a runner -> options for a short run on a tiny model."""

EACH = pytest.mark.parametrize("name", RUNNERS)

FORMATS = [
    *("f32", "f16", "bf16", "mxfp8", "mxfp4", "nvfp4", "row-int4", "row-fp4"),
    *(f"affine{bits}g32" for bits in (2, 3, 4, 5, 6, 8)),
]
"""The storage formats that fit rows of 32 elements."""

QUESTIONS = [f"Question {i}: what comes after {'abcdefghij'[i] * (i + 1)}?" for i in range(10)]
MAX = 64
"""Maximum tokens of an answer."""

LETTERS = [word for letter in "abc" for word in ("--prompt", 30 * letter)]
"""Options for three different prompts."""

DRAFTED = ("tiny-gemma3", "tiny-llama", "tiny-qwen3") if EVERYTHING else ("tiny-llama",)
TARGET_AND_DRAFT = ({"tap_layers": (0,)}, {"draft": 1})


def runner(name: str) -> Path:
    return reference.BIN / f"etkv_{name}"


VARIANTS = [
    *(Variant("tiny-llama", logits=logits) for logits in ("all", "last")),
    Variant("tiny-qwen3"),
    Variant("tiny-qwen3", layers=1),
    Variant("tiny-mistral-window"),
    *(Variant(name, backend="cpu") for name in ("tiny-llama", "tiny-qwen3", "tiny-mistral-window")),
    *(Variant(name, **options) for name in DRAFTED for options in TARGET_AND_DRAFT),
    Variant("tiny-llama", draft=1, prefill_chunk=4),
]
if EVERYTHING:
    VARIANTS += [Variant("tiny-llama", prefill_chunk=512), Variant("tiny-llama", tap_layers=(1,))]
    VARIANTS += [Variant("tiny-gemma3")]
"""The programs in tests of the runners."""


def command(name: str, program: Program, *options: object) -> list[object]:
    return [runner(name), "--model", program.path, *RUNNERS[name], *options]


def succeed(name: str, program: Program, *options: object) -> subprocess.CompletedProcess[str]:
    done = reference.run(command(name, program, *options))
    assert done.returncode == 0, (done.args, done.returncode, done.stderr)
    return done


def answers(output: str) -> list[list[int]]:
    """Return the ids of every answer in ``output``, in order."""
    return [[int(word) for word in line.split()] for line in re.findall(r"^ids:(.*)$", output, re.MULTILINE)]


def checked(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """Return the numbers of answers and tokens that the runner checked. Fails unless all equal reference decoding."""
    found = re.findall(r"^check: (\d+) answers?, (\d+) tokens? as reference decoding chooses them$", done.stderr, re.M)
    assert len(found) == done.stderr.count("check: ") > 0, done.stderr
    return sum(int(n_answers) for n_answers, _ in found), sum(int(n_tokens) for _, n_tokens in found)


def prompts(texts: list[str]) -> list[str]:
    return [word for text in texts for word in ("--prompt", text)]


def by_title(output: str) -> dict[str, list[int]]:
    """Return the ids of every answer by its title in ``output``."""
    found = {}
    for block in re.split(r"^## ", output, flags=re.M)[1:]:
        title, _, rest = block.partition("\n")
        (found[title],) = answers(rest)
    return found


def refused(words: list[object], status: int, *told: str, **how) -> None:
    """Check that a runner ends with ``status`` and prints only one line, on stderr, that contains each of
    ``told``.
    """
    done = reference.run(words, timeout=60, **how)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    line = done.stderr.removesuffix("\n")
    assert line.startswith(f"{Path(str(words[0])).name}: "), line
    assert line.isprintable(), line
    for word in told:
        assert word in line
