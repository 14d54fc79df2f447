"""Errors of the example runners, and what remains after they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest

import reference
from runners import (
    EACH,
    FAILED,
    INTERRUPTED,
    MISUSED,
    command,
    refused,
    runner,
    succeed,
)
from tiny_models import CONTEXT

# ---- The command line -----------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--capacity", 0], ["--capacity takes a whole number from 1"]),
        (["--capcity", 5], ["no option --capcity", "did you mean --capacity?"]),
        (["--kv-format", "int4"], ["--kv-format: unknown storage format `int4`", "row-int4"]),
        (["--max-tokens", "few"], ["--max-tokens", '"few"']),
        (["--prompt", ""], ["a prompt is empty"]),
        (["--prompt"], ["--prompt needs a value"]),
        (["extra"], ['"extra"']),
    ],
)
def test_invalid_command_lines_are_refused(llama, name, options, told):
    refused(command(name, llama, *options), MISUSED, *told)


@EACH
def test_invalid_files_are_refused(llama, name, tmp_path):
    refused([runner(name)], FAILED, "no model at build/models", "`make model`", "--model", cwd=tmp_path)
    refused([runner(name), "--model", tmp_path / "no.pte"], FAILED, "there is no program at")
    refused(command(name, llama, "--tokenizer", tmp_path), FAILED, "there is no tokenizer at")
    refused(command(name, llama, "--capacity", CONTEXT + 1), FAILED, f"--capacity {CONTEXT + 1} is above {CONTEXT}")
    # A row of 16 elements is less than a group of 64.
    refused(command(name, llama, "--kv-format", "affine4g64"), FAILED, "affine4g64", "head_dim 16")


def test_invalid_contexts_are_refused(llama, tmp_path):
    words = [runner("agent_fork"), "--model", llama.path, "--context"]
    refused([*words, tmp_path], FAILED, f"cannot read a context from {tmp_path}: Is a directory")
    refused([*words, tmp_path / "no"], FAILED, f"cannot read a context from {tmp_path / 'no'}: No such file")
    empty = tmp_path / "empty.txt"
    empty.touch()
    refused([*words, empty], FAILED, f"the context in {empty} is empty")
    refused([*words, empty, "--context-tokens", 9], MISUSED, "--context", "--context-tokens")


def test_a_context_from_a_file(llama, tmp_path):
    """The file is longer than one read."""
    file = tmp_path / "context.txt"
    file.write_text("A line of the context.\n" * 60)
    words = [runner("agent_fork"), "--model", llama.path, "--context", file, "--max-tokens", 4, "--check"]
    done = reference.run([*words, "--prompt", "a", "--prompt", "b"])
    assert done.returncode == 0, done.stderr
    ((shared,),) = (map(int, [found]) for found in re.findall(r"(\d+) of them shared", done.stderr))
    assert shared > file.stat().st_size


@EACH
def test_help_and_version(name):
    told = reference.run([runner(name), "--help"])
    assert told.returncode == 0
    assert told.stdout.startswith(f"usage: etkv_{name} [options]\n")
    for option in ("--model", "--tokenizer", "--capacity", "--kv-format", "--prompt", "--max-tokens", "--check"):
        assert option in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert reference.run([runner(name), "--version"]).stdout.startswith(f"etkv_{name} ")


# ---- What is left behind --------------------------------------------------------------------------------------------


@EACH
def test_memory_returns_to_where_it_was(llama, name):
    n = 50 if reference.EVERYTHING else 25
    done = succeed(name, llama, "--max-tokens", 4, "--repeat", n)
    line = r"^round \d+: (\d+) handles, (\d+) bytes in MLX, ([\d.]+) MiB in the process$"
    rounds = re.findall(line, done.stderr, re.M)
    assert len(rounds) == n
    assert {(handles, in_mlx) for handles, in_mlx, _ in rounds} == {("0", "0")}
    process = [float(mebibytes) for _, _, mebibytes in rounds]
    reference.note(f"{name}: {process[0]} MiB after one round, {process[9]} after 10, {process[-1]} after {n}")
    # Heap fragmentation may vary a little. A leak of 13 KiB a round would be found in 50 rounds.
    assert process[-1] < process[9] + 0.5


@EACH
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_within_a_step(llama, name, tmp_path, number):
    """No file is left behind, and after Ctrl-C a runner prints its own message."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    words = command(name, llama, "--repeat", 100_000, "--max-tokens", 8)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with reference.started(words, cwd=tmp_path, env=environment, **streams) as run:
        # Stop in the middle of a round: after the first round, with many more to come.
        told = run.stderr.readline()
        while not told.startswith(b"round"):
            assert told, "it ended by itself"
            told = run.stderr.readline()
        time.sleep(0.1)
        run.send_signal(number)
        rest = run.communicate(timeout=60)[1].decode()
    if number == signal.SIGINT:
        assert run.returncode == INTERRUPTED, rest
        assert rest.endswith("stopped: interrupted\n")
    else:
        assert run.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_rollback_stops_between_scenes(llama):
    """After Ctrl-C within an answer, no further answer begins, and no further heading is printed."""
    words = command("rollback", llama, "--max-tokens", 400)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    with reference.started(words, errors="replace", **streams) as run:
        told = run.stdout.readline()
        while not told.startswith("## "):
            assert told, "it ended by itself"
            told = run.stdout.readline()
        run.send_signal(signal.SIGINT)
        written, told = run.communicate(timeout=60)
    assert run.returncode == INTERRUPTED, told
    headings = re.findall(r"^## .*\n(?=(.?))", written, re.M)
    assert len(headings) <= 1, written
    assert all(text.strip() for text in headings), written
    assert told == "stopped: interrupted\n"
