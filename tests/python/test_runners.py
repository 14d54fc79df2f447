"""The example runners: their answers are those of plain decoding, and they leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import reference
from etkv.export import ExportRequest, export_program, is_current
from reference import Program, Variant

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

RUNNERS = {
    "admission": [],
    "agent_fork": ["--context-tokens", 100],
    "batch": [],
    "prefix": [],
    "rollback": [],
    "speculative": ["--depth", 3, "--width", 2],
}
"""Name -> what it is asked besides, so that it is done soon on a tiny model."""

EACH = pytest.mark.parametrize("name", RUNNERS)

FORMATS = [
    *("f32", "f16", "bf16", "mxfp8", "mxfp4", "nvfp4", "row-int4", "row-fp4"),
    *(f"affine{bits}g32" for bits in (2, 3, 4, 5, 6, 8)),
]
"""Those that fit rows of 32 elements."""

QUESTIONS = [f"Question {i}: what comes after {'abcdefghij'[i] * (i + 1)}?" for i in range(10)]
MOST = 64
"""Tokens of an answer."""
CONTEXT = 2048


def runner(name: str) -> Path:
    return reference.BUILD / "bin" / f"etkv_{name}"


@pytest.fixture(scope="module")
def llama() -> Program:
    return with_longer_context("tiny-llama")


@pytest.fixture(scope="module")
def qwen3() -> Program:
    """Rows of 32 elements, which every format takes."""
    return with_longer_context("tiny-qwen3")


def with_longer_context(name: str) -> Program:
    """The program of a tiny model for conversations of ``CONTEXT`` bytes: its weights do not depend on that."""
    short = reference.program(Variant(name))
    folder = reference.MODELS / f"{name}-long"
    hf = folder / "hf"
    file = hf / "config.json"
    if not file.is_file() or file.stat().st_mtime < (short.hf / "config.json").stat().st_mtime:
        shutil.copytree(short.hf, hf, dirs_exist_ok=True)
        file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": CONTEXT}))
    request = ExportRequest(
        model=hf, output=folder / "model.pte", dtype="float32", prefill_chunk=reference.TINY_CHUNK, keep_hf=None
    )
    if not is_current(request):
        export_program(request)
    return Program(short.variant, request.output, hf)


def command(name: str, program: Program, *options: object) -> list[object]:
    return [runner(name), "--model", program.path, *RUNNERS[name], *options]


def succeed(name: str, program: Program, *options: object) -> subprocess.CompletedProcess[str]:
    done = reference.run(command(name, program, *options))
    assert done.returncode == 0, (done.args, done.returncode, done.stderr)
    return done


def answers(output: str) -> list[list[int]]:
    """The ids of every answer, in the order they were written in."""
    return [[int(word) for word in line.split()] for line in re.findall(r"^ids:(.*)$", output, re.MULTILINE)]


def checked(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """How many answers and tokens the runner has found to be those of plain decoding, all of them."""
    found = re.findall(r"^check: (\d+) answers?, (\d+) tokens? as plain decoding chooses them$", done.stderr, re.M)
    assert len(found) == done.stderr.count("check: ") > 0, done.stderr
    return sum(int(n_answers) for n_answers, _ in found), sum(int(n_tokens) for _, n_tokens in found)


# ---- Answers --------------------------------------------------------------------------------------------------------


@EACH
def test_answers_are_those_of_plain_decoding(llama, name):
    """By the runner's own check."""
    done = succeed(name, llama, "--max-new-tokens", MOST, "--check", "--ids")
    n_answers, n_tokens = checked(done)
    assert n_answers == len(answers(done.stdout)) >= 3
    assert n_tokens == sum(map(len, answers(done.stdout)))
    reference.note(f"{name}: {n_answers} answers, {n_tokens} tokens")


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [
        *(("batch", kv_format) for kv_format in FORMATS),
        *((name, kv_format) for name in RUNNERS if name != "batch" for kv_format in ("f16", "affine4g32", "row-int4")),
    ],
)
def test_answers_in_every_format(qwen3, name, kv_format):
    """Keys and values that are stored in few bits make the same answer whichever way they came in."""
    done = succeed(name, qwen3, "--max-new-tokens", 24, "--check", "--ids", "--kv-format", kv_format)
    assert checked(done)[1] == sum(map(len, answers(done.stdout)))


def test_batch_answers_are_those_of_transformers(llama):
    """By another implementation altogether."""
    done = succeed("batch", llama, "--max-new-tokens", MOST, "--ids", *prompts(QUESTIONS))
    assert by_title(done.stdout) == expected(llama, QUESTIONS, MOST)


def prompts(texts: list[str]) -> list[str]:
    return [word for text in texts for word in ("--prompt", text)]


def by_title(output: str) -> dict[str, list[int]]:
    """The ids of every answer by what it answers."""
    found = {}
    for block in re.split(r"^## ", output, flags=re.M)[1:]:
        title, _, rest = block.partition("\n")
        (found[title],) = answers(rest)
    return found


def expected(program: Program, questions: list[str], most: int) -> dict[str, list[int]]:
    """The greedy ids of transformers, up to the id that ends an answer."""
    found = reference.greedy(program.hf, encoded(program, questions), most)
    ends = json.loads((program.hf / "generation_config.json").read_text())["eos_token_id"]
    return {question: up_to_end(greedy.ids, ends) for question, greedy in found.items()}


def up_to_end(ids: list[int], ends: list[int]) -> list[int]:
    first = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: first + 1]


def encoded(program: Program, questions: list[str]) -> dict[str, list[int]]:
    """The ids of questions, as transformers reads them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(program.hf, local_files_only=True)
    messages = {question: [{"role": "user", "content": question}] for question in questions}
    return {
        question: tokenizer.apply_chat_template(said, add_generation_prompt=True).input_ids
        for question, said in messages.items()
    }


# ---- The real model -------------------------------------------------------------------------------------------------

EVERYTHING = os.environ.get("ETKV_TEST_LONG") == "1"
"""As much as can be asked; a part of it otherwise, which takes minutes less."""
REAL_QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "What do bees make?",
    "Name three animals that live in the sea.",
    "How do you make a cup of tea?",
    "What is the opposite of cold?",
    "Who wrote Hamlet?",
    "Give me a word that rhymes with moon.",
    "How many days does a week have?",
    "What is a library?",
][: 10 if EVERYTHING else 3]
REAL_MOST = 64 if EVERYTHING else 12


@pytest.fixture(scope="module")
def smollm2() -> Program:
    return reference.program(Variant("smollm2-135m"))


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("batch", []),
        ("admission", []),
        ("speculative", []),
        ("speculative", ["--depth", 3, "--width", 2]),
    ],
    ids=["batch", "admission", "guesses", "more guesses"],
)
def test_the_real_model_answers_as_in_transformers(smollm2, name, options):
    words = ["--max-new-tokens", REAL_MOST, "--ids", *prompts(REAL_QUESTIONS)]
    done = reference.run([runner(name), "--model", smollm2.path, *options, *words], timeout=1800)
    assert done.returncode == 0, done.stderr
    assert by_title(done.stdout) == expected(smollm2, REAL_QUESTIONS, REAL_MOST)
    reference.note(done.stderr)


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("agent_fork", ["--context-tokens", 1024 if EVERYTHING else 64]),
        ("prefix", []),
        ("rollback", []),
        ("batch", ["--kv-format", "affine4g64"]),
    ],
    ids=["fork", "prefix", "rollback", "4 bits"],
)
def test_the_real_model_answers_as_by_itself(smollm2, name, options):
    """Conversations, contexts and short storage, which transformers does not have alike."""
    asked = prompts(REAL_QUESTIONS if EVERYTHING else REAL_QUESTIONS[:2])
    most = REAL_MOST if EVERYTHING else 8
    words = [runner(name), "--model", smollm2.path, "--max-new-tokens", most, "--check", "--ids", *asked, *options]
    done = reference.run(words, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert checked(done)[1] == sum(map(len, answers(done.stdout)))
    reference.note(done.stderr)


@pytest.mark.real_model
def test_repetition_is_guessed_from_the_text(smollm2):
    """More than two ids a step are right where a text repeats itself."""
    text = "The cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The cat sat"
    words = [runner("speculative"), "--model", smollm2.path, "--raw", "--prompt", text, "--draft", "ngram"]
    done = reference.run([*words, "--depth", 5, "--width", 1, "--max-new-tokens", 24, "--check"])
    assert done.returncode == 0, done.stderr
    assert checked(done)[0] == 1
    ((ids, accepted),) = re.findall(r"([\d.]+) a step, ([\d.]+) of", done.stderr)
    assert float(accepted) > 2, (ids, accepted)
    reference.note(done.stderr)


# ---- Capacity -------------------------------------------------------------------------------------------------------


def test_batch_at_capacity(llama):
    """What does not fit at once goes in rounds; an answer that does not fit at all ends with a word, the rest go on."""
    free = by_title(succeed("batch", llama, "--max-new-tokens", MOST, "--ids", *prompts(QUESTIONS)).stdout)
    lengths = sorted(map(len, encoded(llama, QUESTIONS).values()))
    capacity = lengths[4] + MOST - 1
    done = succeed("batch", llama, "--max-new-tokens", MOST, "--ids", "--capacity", capacity, *prompts(QUESTIONS))
    full = by_title(done.stdout)
    cut = {title for title in free if full[title] != free[title]}
    assert len(cut) == 5
    assert done.stderr.count(f"stopped: the cache is full at {capacity} positions (--capacity)") == len(cut)
    for title in cut:
        assert 0 < len(full[title]) < len(free[title])
        assert full[title] == free[title][: len(full[title])]


LETTERS = [word for letter in "abc" for word in ("--prompt", 30 * letter)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("admission", ["--capacity", 90]),
        ("agent_fork", ["--capacity", 400]),
        ("batch", ["--capacity", 90]),
        ("prefix", ["--capacity", 220, *LETTERS]),
        (
            "rollback",
            ["--capacity", 155, "--max-new-tokens", 40, *(word for x in "abc" for word in ("--prompt", 30 * x))],
        ),
        ("speculative", ["--capacity", 110]),
    ],
)
def test_a_full_cache_ends_an_answer_and_not_the_runner(llama, name, options):
    """It is told, what is taken back makes room, and all that there is of every answer is right."""
    words = [str(word) for word in command(name, llama, "--max-new-tokens", MOST, "--check", *options)]
    # Both streams as they come, for the order of things.
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, **streams, encoding="utf-8", timeout=60, check=True)
    _, _, after = done.stdout.partition(f"stopped: the cache is full at {options[1]} positions (--capacity)\n")
    assert "## " in after, "there are more answers"
    assert re.search(r"^check: \d+ answers, \d+ tokens as plain decoding chooses them$", after, re.M)


@EACH
def test_a_prompt_longer_than_the_capacity(llama, name):
    done = reference.run(command(name, llama, "--capacity", 10, "--prompt", "Where?"))
    assert done.returncode == FAILED
    assert re.fullmatch(
        rf"etkv_{name}: the prompt is \d+ tokens long, and the cache holds 10 \(--capacity\)\n", done.stderr
    )


# ---- Forks ----------------------------------------------------------------------------------------------------------


def test_a_fork_costs_what_its_branches_have_for_themselves(llama):
    """Eight branches on a context of 1024 tokens: it is read once, and held once."""
    done = succeed("agent_fork", llama, "--context-tokens", 1024, "--max-new-tokens", 16)
    (prefill,) = re.findall(
        r"^prefill: (\d+) tokens, (\d+) of them shared; 8 runs would read (\d+), (\d+) are spared$", done.stderr, re.M
    )
    read, shared, apart, spared = map(int, prefill)
    assert shared >= 1024
    assert spared == apart - read == 7 * shared
    (held,) = re.findall(
        r"^cache: (\d+) positions, (\d+) of them the branches' own, the longest of (\d+); "
        r"([\d.]+) MiB in use, ([\d.]+) MiB held; 8 runs would use ([\d.]+) MiB",
        done.stderr,
        re.M,
    )
    positions, own, longest = map(int, held[:3])
    used, allocated, used_apart = map(float, held[3:])
    assert positions == shared + own
    bytes_each = (allocated + 0.05) / positions
    assert used <= allocated < 1.2 * longest * bytes_each + own * bytes_each
    assert used_apart > 4 * used
    reference.note(f"{held[0]} positions in {allocated} MiB; one branch is {longest} long, all have {own} of their own")


# ---- Guesses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[], ["--depth", 5, "--width", 3]], ids=["auto", "fixed"])
@pytest.mark.parametrize("kv_format", ["f32", "row-int4"])
@pytest.mark.parametrize("draft", ["itself", "another", "ngram"])
def test_guesses_leave_the_answer_alone(llama, qwen3, draft, kv_format, shape):
    path = {"itself": qwen3.path, "another": llama.path, "ngram": "ngram"}[draft]
    words = [runner("speculative"), "--model", qwen3.path, "--draft", path, "--kv-format", kv_format, *shape]
    done = reference.run([*words, "--max-new-tokens", MOST, "--check", "--ids"])
    assert done.returncode == 0, done.stderr
    assert checked(done) == (3, sum(map(len, answers(done.stdout))))
    steps = [float(found) for found in re.findall(r"([\d.]+) a step, ", done.stderr)]
    assert len(steps) == 3
    if draft == "itself" and shape:
        assert min(steps) > 5.5, "its own guesses are all right"


def test_chance_is_repeatable(llama):
    words = ["--draft", llama.path, "--temperature", 0.8, "--ids", "--max-new-tokens", 16, "--seed"]
    first, same, other = (succeed("speculative", llama, *words, seed).stdout for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_guesses_that_cannot_be(llama, tmp_path):
    refused(command("speculative", llama, "--temperature", -1), MISUSED, "--temperature", "from 0.0 to 100.0", '"-1"')
    refused(command("speculative", llama, "--temperature", "nan"), MISUSED, '"nan"')
    refused(command("speculative", llama, "--temperature", 1, "--check"), MISUSED, "--check", "--temperature")
    refused(command("speculative", llama, "--depth", "deep"), MISUSED, "--depth takes auto or a whole number from 0")
    refused(command("speculative", llama, "--width", 0), MISUSED, "--width takes auto or a whole number from 1")
    refused(command("speculative", llama, "--draft", tmp_path / "no.pte"), FAILED, "there is no program at")
    refused(command("speculative", llama, "--draft", tmp_path), FAILED, "is a folder")


# ---- etkv_chat ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", ["f32", "nvfp4", "row-int4", "affine8g32"])
def test_chat_answers_the_same_on_every_kind_of_cache(qwen3, llama, kv_format):
    words = [reference.CHAT, "--model", qwen3.path, "--prompt", "Well?", "--ids", "--max-new-tokens", 40]
    words += ["--kv-format", kv_format]
    kinds = [[], *(["--session", kind] for kind in ("contiguous", "seq", "tree"))]
    drafts = [["--draft", "ngram"], ["--draft", qwen3.path, "--depth", 4, "--session", "tree"]]
    done = [reference.run([*words, *more]) for more in (*kinds, *drafts)]
    assert [one.returncode for one in done] == [0] * len(done), [one.stderr for one in done]
    assert len({one.stdout for one in done}) == 1
    assert "a step" in done[-1].stderr
    assert f"({kv_format})" in done[0].stderr


def test_chat_goes_on_with_a_draft(llama):
    """What is taken back is taken back from the draft, too."""
    lines = "hi\nand then?\n/undo\nand now?\n/reset\nhi\n"
    words = [reference.CHAT, "--model", llama.path, "--ids", "--max-new-tokens", 24]
    plain, guessed = (
        reference.run([*words, *more], input=lines, stdin=None)
        for more in ([], ["--draft", llama.path, "--depth", 3, "--width", 2])
    )
    assert (plain.returncode, guessed.returncode) == (0, 0)
    assert guessed.stdout == plain.stdout
    ids = answers(plain.stdout)
    assert len(ids) == 4
    assert ids[0] == ids[3]


def test_chat_with_a_draft_on_another_kind_of_cache(llama):
    words = [reference.CHAT, "--model", llama.path, "--prompt", "hi", "--draft", "ngram", "--session", "seq"]
    refused(words, MISUSED, "--draft takes --session tree, not seq")
    refused([*words[:-1], "ring"], MISUSED, "--session takes one of contiguous, seq, tree", '"ring"')


# ---- The command line -----------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--capacity", 0], ["--capacity takes a whole number from 1"]),
        (["--capcity", 5], ["no option --capcity", "did you mean --capacity?"]),
        (["--kv-format", "int4"], ["--kv-format: no storage format `int4`", "row-int4"]),
        (["--max-new-tokens", "few"], ["--max-new-tokens", '"few"']),
        (["--prompt", ""], ["a prompt is empty"]),
        (["--prompt"], ["--prompt needs a value"]),
        (["extra"], ['"extra"']),
    ],
)
def test_command_lines_that_cannot_be(llama, name, options, told):
    refused(command(name, llama, *options), MISUSED, *told)


def refused(words: list[object], status: int, *told: str, **how) -> None:
    """A runner refuses with one line that tells each of ``told``."""
    done = reference.run(words, timeout=60, **how)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    line = done.stderr.removesuffix("\n")
    assert line.startswith(f"{Path(str(words[0])).name}: "), line
    assert line.isprintable(), line
    for word in told:
        assert word in line


@EACH
def test_files_that_cannot_be(llama, name, tmp_path):
    refused([runner(name)], FAILED, "no model at build/models", "`make model`", "--model", cwd=tmp_path)
    refused([runner(name), "--model", tmp_path / "no.pte"], FAILED, "there is no program at")
    refused(command(name, llama, "--tokenizer", tmp_path), FAILED, "there is no tokenizer at")
    refused(command(name, llama, "--capacity", CONTEXT + 1), FAILED, f"--capacity {CONTEXT + 1} is above {CONTEXT}")
    # Rows of 16 elements are no whole group.
    refused(command(name, llama, "--kv-format", "affine4g64"), FAILED, "affine4g64", "head_dim 16")


@EACH
def test_help_and_version(name):
    told = reference.run([runner(name), "--help"])
    assert told.returncode == 0
    assert told.stdout.startswith(f"usage: etkv_{name} [options]\n")
    for option in ("--model", "--tokenizer", "--capacity", "--kv-format", "--prompt", "--max-new-tokens", "--check"):
        assert option in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert reference.run([runner(name), "--version"]).stdout.startswith(f"etkv_{name} ")


# ---- What is left behind --------------------------------------------------------------------------------------------


@EACH
def test_memory_returns_to_where_it_was(llama, name):
    done = succeed(name, llama, "--max-new-tokens", 4, "--repeat", 50)
    line = r"^round \d+: (\d+) handles, (\d+) bytes in MLX, ([\d.]+) MiB in the process$"
    rounds = re.findall(line, done.stderr, re.M)
    assert len(rounds) == 50
    assert {(handles, in_mlx) for handles, in_mlx, _ in rounds} == {("0", "0")}
    process = [float(mebibytes) for _, _, mebibytes in rounds]
    reference.note(f"{name}: {process[0]} MiB after one round, {process[9]} after 10, {process[-1]} after 50")
    # What a heap has in pieces may move a little; 13 KiB a round would be seen.
    assert process[-1] < process[9] + 0.5


@EACH
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_within_a_step(llama, name, tmp_path, number):
    """No file is left, and Ctrl-C ends a runner in its own words."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    words = [str(word) for word in command(name, llama, "--repeat", 100_000, "--max-new-tokens", 8)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, **streams) as run:
        # In the middle of a round: the first is over, and so many more are to come.
        told = run.stderr.readline()
        while not told.startswith(b"round"):
            told = run.stderr.readline()
        time.sleep(0.1)
        run.send_signal(number)
        rest = run.stderr.read().decode()
    if number == signal.SIGINT:
        assert run.returncode == INTERRUPTED, rest
        assert rest.endswith("stopped: interrupted\n")
    else:
        assert run.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
