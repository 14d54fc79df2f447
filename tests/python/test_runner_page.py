"""The output on the page of the runners is real."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

import reference

pytestmark = pytest.mark.runner

PAGE = reference.ROOT / "examples" / "README.md"
BLOCK = re.compile(r"^```\n\$ ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[list[str], str]]:
    """Return the words of each command, and its output."""
    return [(shlex.split(block[1].replace("\\\n", " ")), block[2]) for block in BLOCK.finditer(PAGE.read_text())]


def without_times(output: str) -> str:
    """Return the output without figures that depend on the machine."""
    return re.sub(r"[\d.]+(?= s\b|/s\b| tokens/s\b|% of it for drafts)", "*", output)


def test_the_page_has_every_runner():
    # The first two runners have their own pages. The last one is a tool for tests.
    shown = {words[0].removeprefix("build/bin/") for words, _ in blocks()}
    built = {path.name for path in reference.BIN.glob("etkv_*")}
    assert shown == built - {"etkv_minimal", "etkv_forward", "etkv_tokenize"}
    assert all(output for _, output in blocks())


@pytest.fixture(scope="module")
def programs():
    """Export the programs of the page."""
    for commands in re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        subprocess.run(commands, shell=True, cwd=reference.ROOT, timeout=7200, check=True)


@pytest.mark.real_model
@pytest.mark.long
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("words", "output"), blocks(), ids=lambda value: value[0] if isinstance(value, list) else "")
def test_the_page_shows_the_output_of_runners(words, output):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    done = subprocess.run(words, cwd=reference.ROOT, encoding="utf-8", timeout=1800, check=True, **streams)
    assert without_times(done.stdout) == without_times(output)
