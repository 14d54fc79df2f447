"""The example runners: answers equal reference decoding, and a full cache ends only one answer."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

import reference
from reference import EVERYTHING, Program, Variant
from runners import (
    EACH,
    FAILED,
    FORMATS,
    LETTERS,
    MAX,
    MISUSED,
    QUESTIONS,
    RUNNERS,
    answers,
    by_title,
    checked,
    command,
    prompts,
    refused,
    runner,
    succeed,
)

pytestmark = pytest.mark.runner


@pytest.fixture(scope="module")
def qwen3() -> Program:
    """Return a program with rows of 32 elements, which fit every format."""
    return reference.program(Variant("tiny-qwen3"))


@pytest.fixture(scope="module")
def on_cpu() -> Program:
    """Return a CPU program with rows of 32 elements."""
    return reference.program(Variant("tiny-qwen3", backend="cpu"))


# ---- Answers --------------------------------------------------------------------------------------------------------


@EACH
def test_answers_are_those_of_reference_decoding(llama, name):
    """The runner checks its own answers."""
    done = succeed(name, llama, "--max-tokens", MAX, "--check", "--ids", *prompts(QUESTIONS))
    n_answers, n_tokens = checked(done)
    assert n_answers == len(answers(done.stdout)) >= len(QUESTIONS) == 10
    assert n_tokens == sum(map(len, answers(done.stdout)))
    reference.note(f"{name}: {n_answers} answers, {n_tokens} tokens")


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [
        *((name, "f32") for name in RUNNERS),
        *(
            pytest.param(name, "affine4g32", marks=() if name in ("batch", "prefix") else pytest.mark.long)
            for name in RUNNERS
        ),
    ],
)
def test_answers_on_the_cpu(on_cpu, qwen3, name, kv_format):
    """The runner checks its own answers. In float32 they also equal those on MLX."""
    words = ["--max-tokens", MAX, "--check", "--ids", "--kv-format", kv_format, *prompts(QUESTIONS)]
    done = succeed(name, on_cpu, *words)
    n_answers, n_tokens = checked(done)
    assert n_answers == len(answers(done.stdout)) >= 10
    assert n_tokens == sum(map(len, answers(done.stdout)))
    if kv_format == "f32":
        assert answers(done.stdout) == answers(succeed(name, qwen3, *words).stdout)


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [
        *(("batch", kv_format) for kv_format in (FORMATS if EVERYTHING else FORMATS[1::2])),
        *((name, "affine4g32") for name in RUNNERS if name != "batch"),
        *(
            pytest.param(name, kv_format, marks=pytest.mark.long)
            for name in RUNNERS
            if name != "batch"
            for kv_format in ("f16", "row-int4")
        ),
    ],
)
def test_answers_in_every_format(qwen3, name, kv_format):
    """Even with few bits, the answer is the same in a batch, after a fork, and alone."""
    done = succeed(name, qwen3, "--max-tokens", 24, "--check", "--ids", "--kv-format", kv_format)
    assert checked(done)[1] == sum(map(len, answers(done.stdout)))


def test_batch_answers_are_those_of_transformers(llama):
    """Answers of a batch equal those of transformers, an independent implementation."""
    done = succeed("batch", llama, "--max-tokens", MAX, "--ids", *prompts(QUESTIONS))
    assert by_title(done.stdout) == expected(llama, QUESTIONS, MAX)


def expected(program: Program, questions: list[str], most: int) -> dict[str, list[int]]:
    """Return transformers' greedy ids, up to the id that ends an answer."""
    found = reference.greedy(program.hf, encoded(program, questions), most)
    ends = json.loads((program.hf / "generation_config.json").read_text())["eos_token_id"]
    return {question: up_to_end(greedy.ids, ends) for question, greedy in found.items()}


def up_to_end(ids: list[int], ends: list[int]) -> list[int]:
    first = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: first + 1]


def encoded(program: Program, questions: list[str]) -> dict[str, list[int]]:
    """Return the ids of questions, by transformers' tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(program.hf, local_files_only=True)
    messages = {question: [{"role": "user", "content": question}] for question in questions}
    return {
        question: tokenizer.apply_chat_template(said, add_generation_prompt=True).input_ids
        for question, said in messages.items()
    }


# ---- The real model -------------------------------------------------------------------------------------------------

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
REAL_MAX = 64 if EVERYTHING else 12


@pytest.fixture(scope="module")
def smollm2() -> Program:
    return reference.program(reference.REAL_MODEL)


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("batch", []),
        pytest.param("admission", [], marks=pytest.mark.long),
        ("speculative", []),
        pytest.param("speculative", ["--depth", 3, "--width", 2], marks=pytest.mark.long),
    ],
    ids=["batch", "admission", "draft", "wider draft"],
)
def test_the_real_model_answers_as_in_transformers(smollm2, name, options):
    words = ["--max-tokens", REAL_MAX, "--ids", *prompts(REAL_QUESTIONS)]
    done = reference.run([runner(name), "--model", smollm2.path, *options, *words], timeout=1800)
    assert done.returncode == 0, done.stderr
    assert by_title(done.stdout) == expected(smollm2, REAL_QUESTIONS, REAL_MAX)
    reference.note(done.stderr)


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("agent_fork", ["--context-tokens", 1024]),
        ("prefix", []),
        ("rollback", []),
        ("batch", ["--kv-format", "affine4g64"]),
    ],
    ids=["fork", "prefix", "rollback", "4 bits"],
)
def test_the_real_model_answers_as_by_itself(smollm2, name, options):
    """The runners' conversations, contexts and small formats have no counterpart in transformers.

    OpenBLAS rounds a product differently for another number of rows. With 4-bit keys, a code that changes by one
    changes logits by about 0.5. So batches are compared with single answers under MLX's own products, which round every
    row in the same way.
    """
    environment = {**os.environ, "ETKV_BLAS": "mlx"} if "--kv-format" in options else None
    asked = prompts(REAL_QUESTIONS)
    words = [runner(name), "--model", smollm2.path, "--max-tokens", REAL_MAX, "--check", "--ids", *asked, *options]
    done = reference.run(words, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr
    assert checked(done)[1] == sum(map(len, answers(done.stdout)))
    reference.note(done.stderr)


@pytest.mark.long
@pytest.mark.real_model
def test_repetition_is_drafted_from_the_text(smollm2):
    """In a repetitive text, more than two draft tokens a step are accepted."""
    text = "x = x + 1\n" * 12 + "x"
    words = [runner("speculative"), "--model", smollm2.path, "--raw", "--prompt", text, "--draft", "ngram"]
    done = reference.run([*words, "--depth", 5, "--width", 1, "--max-tokens", 24, "--check"])
    assert done.returncode == 0, done.stderr
    assert checked(done)[0] == 1
    ((ids, accepted),) = re.findall(r"([\d.]+) a step, ([\d.]+) of", done.stderr)
    assert float(accepted) > 2, (ids, accepted)
    reference.note(done.stderr)


# ---- Capacity -------------------------------------------------------------------------------------------------------


def test_batch_at_capacity(llama):
    """Requests that do not fit together run in rounds. An answer that does not fit even alone ends with a message, and
    the other answers continue.
    """
    free = by_title(succeed("batch", llama, "--max-tokens", MAX, "--ids", *prompts(QUESTIONS)).stdout)
    lengths = sorted(map(len, encoded(llama, QUESTIONS).values()))
    capacity = lengths[4] + MAX - 1
    done = succeed("batch", llama, "--max-tokens", MAX, "--ids", "--capacity", capacity, *prompts(QUESTIONS))
    full = by_title(done.stdout)
    cut = {title for title in free if full[title] != free[title]}
    assert len(cut) == 5
    assert done.stderr.count(f"stopped: the cache is full at {capacity} positions (--capacity)") == len(cut)
    for title in cut:
        assert 0 < len(full[title]) < len(free[title])
        assert full[title] == free[title][: len(full[title])]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("admission", ["--capacity", 90]),
        ("agent_fork", ["--capacity", 400]),
        ("batch", ["--capacity", 90]),
        ("prefix", ["--capacity", 220, *LETTERS]),
        (
            "rollback",
            ["--capacity", 155, "--max-tokens", 40, *LETTERS],
        ),
        ("speculative", ["--capacity", 110]),
    ],
)
def test_a_full_cache_ends_an_answer_and_not_the_runner(llama, name, options):
    """The runner reports the full cache, a rollback makes room, and the tokens of every answer are right."""
    words = [str(word) for word in command(name, llama, "--max-tokens", MAX, "--check", *options)]
    # Both streams go to one pipe, to keep their order.
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, **streams, encoding="utf-8", timeout=60, check=True)
    _, _, after = done.stdout.partition(f"stopped: the cache is full at {options[1]} positions (--capacity)\n")
    assert "## " in after, "there are more answers"
    assert re.search(r"^check: \d+ answers, \d+ tokens as reference decoding chooses them$", after, re.M)


SERVERS = ("admission", "batch", "prefix")
"""Runners that continue with other requests if one request cannot be answered."""


@EACH
def test_a_prompt_longer_than_the_capacity(llama, name):
    done = reference.run(command(name, llama, "--capacity", 10, "--prompt", "Where?"))
    assert done.returncode == FAILED
    told = r"the prompt is \d+ tokens long, and the cache holds 10 \(--capacity\)\n"
    if name in SERVERS:
        assert re.match(rf'refused "Where\?": {told}', done.stderr)
        assert done.stderr.endswith(f"\netkv_{name}: 1 of 1 request was refused\n")
    else:
        assert re.fullmatch(rf"etkv_{name}: {told}", done.stderr)


@pytest.mark.parametrize("name", SERVERS)
def test_a_request_that_is_too_long_is_refused_alone(llama, name):
    """Requests before and after it are answered, reported and checked."""
    long = "b" * 200
    words = ["--capacity", 140, "--max-tokens", 8, "--check", "--ids", *prompts(["a", long, "c"])]
    done = reference.run(command(name, llama, *words))
    assert done.returncode == FAILED
    assert by_title(done.stdout).keys() == {"a", "c"}
    assert re.search(rf'^refused "{long}": the prompt is \d+ tokens long, and the cache holds 140', done.stderr, re.M)
    assert " · cache " in done.stderr, "the report"
    assert checked(done)[0] == 2
    assert done.stderr.endswith(f"\netkv_{name}: 1 of 3 requests was refused\n")


def test_a_memory_budget_refuses_long_texts_only(qwen3):
    """In float32 a position takes 1 KiB. A budget of 1 MiB suffices for 512 positions, but not for another 1,024."""
    words = ["--model", qwen3.path, "--raw", "--kv-format", "f32", "--max-tokens", 8, "--ids"]
    within, long = ["--prompt", "a" * 300], ["--prompt", "a" * 700]
    budget = ["--memory-budget-mib", 1]
    free = reference.run([runner("chat"), *words, *within])
    held = reference.run([runner("chat"), *words, *budget, *within])
    assert (held.returncode, held.stdout) == (0, free.stdout)
    assert reference.run([runner("chat"), *words, *long]).returncode == 0
    refused_there = reference.run([runner("chat"), *words, *budget, *long])
    assert (refused_there.returncode, refused_there.stdout) == (FAILED, "")
    # The message follows the lines with the progress of the prompt.
    assert "the memory budget is 1048576 bytes" in refused_there.stderr.splitlines()[-1]


# ---- Forks ----------------------------------------------------------------------------------------------------------


def test_a_fork_costs_only_the_branches_own_positions(llama):
    """Eight branches share a context of 1024 tokens, which is read once and stored once."""
    done = succeed("agent_fork", llama, "--context-tokens", 1024, "--max-tokens", 16)
    (prefill,) = re.findall(
        r"^prefill: (\d+) tokens, (\d+) of them shared; 8 runs would read (\d+), (\d+) are saved$", done.stderr, re.M
    )
    read, shared, apart, spared = map(int, prefill)
    assert shared >= 1024
    assert spared == apart - read == 7 * shared
    (held,) = re.findall(
        r"^cache: (\d+) positions, (\d+) of them the branches' own, the longest of (\d+); "
        r"[\d.]+ MiB \((\d+) bytes\) in use, [\d.]+ MiB \((\d+) bytes\) held; "
        r"8 runs would use [\d.]+ MiB \((\d+) bytes\)",
        done.stderr,
        re.M,
    )
    positions, own, longest, used, allocated, used_apart = map(int, held)
    assert positions == shared + own
    bytes_each = position_bytes(llama)
    assert used == positions * bytes_each
    assert used <= allocated < 1.2 * longest * bytes_each + own * bytes_each
    assert used_apart > 4 * used
    reference.note(
        f"{positions} positions in {allocated} bytes; one branch is {longest} long, all have {own} of their own"
    )


def position_bytes(program: Program) -> int:
    """Return the bytes of a position in float32, computed from the model's configuration."""
    config = json.loads((program.hf / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys_and_values, float32 = 2, 4
    return config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * keys_and_values * float32


PREFILL = r"^prefill: (\d+) tokens, (\d+) of them shared; (\d+) runs? would read (\d+), (\d+) are saved$"


def test_a_fork_loads_the_context_that_an_earlier_process_has_read(llama, tmp_path):
    words = ["--context-tokens", 200, "--max-tokens", 4, "--ids", *prompts(["aaaa", "bbbb"])]
    alone = succeed("agent_fork", llama, *words)
    store = ["--prefix-store", tmp_path / "texts"]
    first = succeed("agent_fork", llama, *words, *store)
    again = succeed("agent_fork", llama, *words, *store, "--check")
    assert alone.stdout == first.stdout
    checked(again)
    assert again.stdout == first.stdout
    (shared,) = re.findall(r"tokens, (\d+) of them shared; ", first.stderr)
    assert f", 0 of them shared, after {shared} from the store; " in again.stderr


CACHED = r"^(\d+) tokens, (\d+) cached, (\d+) read in "


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral-window"])
def test_a_server_goes_on_from_earlier_texts(name, tmp_path):
    """A server continues from texts that it has read, or that an earlier process stored. The answers are the same."""
    model = reference.program(Variant(name))
    words = ["--max-tokens", 16, "--ids", "--check"]
    store = ["--prefix-store", tmp_path / "texts"]
    alone, first, again = (succeed("prefix", model, *words, *more) for more in ([], store, store))
    assert alone.stdout == first.stdout == again.stdout
    assert checked(alone)[0] == checked(again)[0] == 6

    def counts(done: subprocess.CompletedProcess[str]) -> list[list[int]]:
        found = [[int(n) for n in turn] for turn in re.findall(CACHED, done.stderr, re.M)]
        assert all(tokens == cached + read for tokens, cached, read in found)
        return found

    # Another client's system message, the conversations so far, and a repeated request are cached.
    read = counts(alone)
    assert read == counts(first)
    assert read[0][1] == 0
    assert read[4][2] == 1
    assert all(cached > tokens / 2 for tokens, cached, _ in read[1:])
    assert "from the store" not in alone.stderr
    # All tokens except the last are cached. The last token must run for its logits.
    assert [turn[2] for turn in counts(again)] == [1] * 6
    assert re.search(r"^reused .*, \d+ from the store · ", again.stderr, re.M)


def test_a_fork_counts_branches_that_had_to_make_room(llama):
    words = ["--context-tokens", 20, "--capacity", 150, "--max-tokens", 64, "--check", *prompts(["aaaa", "bbbb"])]
    done = succeed("agent_fork", llama, *words)
    assert "the cache is full at 150 positions" in done.stderr
    ((read, shared, runs, apart, spared),) = (map(int, found) for found in re.findall(PREFILL, done.stderr, re.M))
    assert runs == 2
    assert spared == apart - read == shared
    checked(done)


def test_a_fork_leaves_out_branches_that_never_began(llama):
    """Two prompts fit into the cache, but no answer does."""
    tail = len("aaaa<|im_end|>\n<|im_start|>assistant\n") - len("<|im_end|><|im_start|>") + 2
    free = succeed("agent_fork", llama, "--max-tokens", 1, *prompts(["aaaa"]))
    ((read, _, _, _, _),) = (map(int, found) for found in re.findall(PREFILL, free.stderr, re.M))
    words = ["--capacity", read + tail, "--max-tokens", 8, "--check", *prompts(["aaaa", "bbbb", "cccc"])]
    done = succeed("agent_fork", llama, *words)
    ((read, shared, runs, apart, spared),) = (map(int, found) for found in re.findall(PREFILL, done.stderr, re.M))
    assert runs == 2
    assert spared == apart - read == shared
    checked(done)


def test_a_single_branch_keeps_its_positions(llama):
    words = ["--context-tokens", 20, "--capacity", 200, "--max-tokens", 300, "--check", "--prompt", "aaaa"]
    done = succeed("agent_fork", llama, *words)
    assert "cache: 200 positions" in done.stderr
    assert "kept: aaaa (200 positions)" in done.stderr
    assert checked(done)[0] == 1


def test_more_branches_than_a_step_has_tokens(llama):
    """Each step of 70 branches is two forwards."""
    questions = [f"{i}?" for i in range(reference.TINY_CHUNK + 6)]
    done = succeed("agent_fork", llama, "--max-tokens", 4, "--check", "--ids", *prompts(questions))
    assert checked(done)[0] == len(answers(done.stdout)) == len(questions) + 1


def test_more_prompts_than_a_cache_has_sequences(llama):
    questions = [chr(ord("a") + i % 26) for i in range(256)]
    refused(command("agent_fork", llama, *prompts(questions)), MISUSED, "256 prompts", "255 branches")


@pytest.mark.long
def test_more_prompts_than_a_cache_has_sequences_in_a_batch():
    questions = [chr(ord("a") + i % 26) for i in range(256)]
    wide = reference.program(Variant("tiny-llama", prefill_chunk=512))
    done = succeed("batch", wide, "--raw", "--max-tokens", 2, "--check", "--ids", *prompts([*questions, *"xyz"]))
    assert checked(done)[0] == len(answers(done.stdout)) == 259


# ---- Drafts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[], ["--depth", 5, "--width", 3]], ids=["auto", "fixed"])
@pytest.mark.parametrize("kv_format", ["f32", "row-int4"])
@pytest.mark.parametrize("draft", ["itself", "another", "ngram"])
def test_drafts_do_not_change_the_answer(llama, qwen3, draft, kv_format, shape):
    path = {"itself": qwen3.path, "another": llama.path, "ngram": "ngram"}[draft]
    words = [runner("speculative"), "--model", qwen3.path, "--draft", path, "--kv-format", kv_format, *shape]
    done = reference.run([*words, "--max-tokens", MAX, "--check", "--ids"])
    assert done.returncode == 0, done.stderr
    assert checked(done) == (3, sum(map(len, answers(done.stdout))))
    steps = [float(found) for found in re.findall(r"([\d.]+) a step, ", done.stderr)]
    assert len(steps) == 3
    if draft == "itself" and shape:
        assert min(steps) > 5.5, "its own draft tokens are all right"


def test_first_layers_draft_for_all_of_them(qwen3):
    """The exporter creates this draft from the model's first layers."""
    draft = reference.program(Variant("tiny-qwen3", layers=1))
    assert draft.path.stat().st_size < qwen3.path.stat().st_size
    done = succeed("speculative", qwen3, "--draft", draft.path, "--max-tokens", MAX, "--check", "--ids")
    assert checked(done) == (3, sum(map(len, answers(done.stdout))))


def test_a_program_that_returns_one_row_of_logits():
    """Such a program decodes one sequence at a time. Runners that need more rows report an error."""
    last = reference.program(Variant("tiny-llama", logits="last"))
    for name in ("prefix", "rollback"):
        assert checked(succeed(name, last, "--max-tokens", 8, "--check"))[0] > 3
    for name in ("admission", "agent_fork", "batch", "speculative"):
        done = reference.run(command(name, last, *(["--draft", last.path] if name == "speculative" else [])))
        assert done.returncode == FAILED, (name, done.stderr)
        assert re.search(rf"^etkv_{name}: .*logits of 1 of \d+ tokens.*without `--logits last`$", done.stderr, re.M)


def test_sampling_is_repeatable(llama):
    words = ["--draft", llama.path, "--temperature", 0.8, "--ids", "--max-tokens", 16, "--seed"]
    first, same, other = (succeed("speculative", llama, *words, seed).stdout for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_invalid_drafts_are_refused(llama, tmp_path):
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
    words = [reference.CHAT, "--model", qwen3.path, "--prompt", "Well?", "--ids", "--max-tokens", 40]
    words += ["--kv-format", kv_format]
    kinds = [[], *(["--session", kind] for kind in ("contiguous", "seq", "tree"))]
    drafts = [["--draft", "ngram"], ["--draft", qwen3.path, "--depth", 4, "--session", "tree"]]
    done = [reference.run([*words, *more]) for more in (*kinds, *drafts)]
    assert [one.returncode for one in done] == [0] * len(done), [one.stderr for one in done]
    assert len({one.stdout for one in done}) == 1
    assert "a step" in done[-1].stderr
    assert f"({kv_format})" in done[0].stderr


def test_chat_goes_on_with_a_draft(llama):
    """A rollback also applies to the draft."""
    lines = "hi\nand then?\n/undo\nand now?\n/reset\nhi\n"
    words = [reference.CHAT, "--model", llama.path, "--ids", "--max-tokens", 24]
    plain, drafted = (
        reference.run([*words, *more], input=lines, stdin=None)
        for more in ([], ["--draft", llama.path, "--depth", 3, "--width", 2])
    )
    assert (plain.returncode, drafted.returncode) == (0, 0)
    assert drafted.stdout == plain.stdout
    ids = answers(plain.stdout)
    assert len(ids) == 4
    assert ids[0] == ids[3]


def test_chat_with_a_draft_on_another_kind_of_cache(llama):
    words = [reference.CHAT, "--model", llama.path, "--prompt", "hi", "--draft", "ngram", "--session", "seq"]
    refused(words, MISUSED, "--draft requires --session tree, got seq")
    refused([*words[:-1], "ring"], MISUSED, "--session takes one of contiguous, seq, tree", '"ring"')
