"""Wrong arguments and damaged files: a tool prints one clear line, exits with a status, and loses nothing."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from pathlib import Path

import pytest

import reference
from reference import CHAT, EVERYTHING, FORWARD, Program, Variant
from tiny_models import CONTEXT, VOCABULARY

FAILED, MISUSED = 1, 2
CHUNK = reference.TINY_CHUNK
TOOLS = pytest.mark.parametrize("tool", [CHAT, FORWARD], ids=lambda tool: tool.name)


VARIANTS = [Variant("tiny-llama"), Variant("tiny-llama", "f32", "4w")]
VARIANTS += [Variant("tiny-qwen3", "bf16", "4w")] if EVERYTHING else []


@pytest.fixture(scope="module")
def programs() -> dict[Variant, Program]:
    return reference.programs(VARIANTS)


@pytest.fixture(scope="module")
def model(programs) -> Path:
    return programs[Variant("tiny-llama")].path


@pytest.fixture(scope="module")
def image(model) -> bytes:
    return model.read_bytes()


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """Return a copy of the model's folder, which the test may damage."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.parent.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    return copy


@pytest.fixture
def ids_file(tmp_path) -> Path:
    return write_ids(tmp_path, "60 61 62")


def write_ids(folder: Path, ids: str) -> Path:
    file = folder / "ids.txt"
    file.write_text(ids)
    return file


def command(tool: Path, model: Path, folder: Path) -> list[object]:
    """Return the shortest command with which ``tool`` runs ``model``."""
    if tool == CHAT:
        return [CHAT, "--model", model, "--prompt", "hi", "--max-tokens", 2]
    return [FORWARD, "--model", model, "--ids-file", write_ids(folder, "60 61 62"), "--decode", 1]


def refused(words: list[object], status: int, *told: object, **options) -> str:
    """Run a tool that must exit with ``status`` and print one line that contains each of ``told``. Return the line."""
    done = reference.run(words, timeout=60, **options)
    assert done.returncode == status, (done.returncode, done.stderr)
    assert done.stdout == ""
    tool = Path(str(words[0])).name
    line = done.stderr.removesuffix("\n")
    assert line.startswith(f"{tool}: "), line
    assert line.isprintable(), line
    for word in told:
        assert str(word) in line
    return line


# ---- Files that are not programs ------------------------------------------------------------------------------------


@TOOLS
def test_no_such_program(tool, tmp_path):
    refused(command(tool, tmp_path / "nowhere.pte", tmp_path), FAILED, "there is no program", tmp_path / "nowhere.pte")


@TOOLS
def test_a_folder_is_not_a_program(tool, tmp_path):
    refused(command(tool, tmp_path, tmp_path), FAILED, tmp_path, "folder", ".pte")


@TOOLS
@pytest.mark.parametrize("length", [0, 3, 7, 8, 5000])
def test_a_random_file_is_not_a_program(tool, tmp_path, length):
    file = tmp_path / "random.pte"
    file.write_bytes(random.Random(length).randbytes(length))
    refused(command(tool, file, tmp_path), FAILED, file, "not an ExecuTorch program")


@TOOLS
def test_a_random_file_with_the_mark_of_a_program(tool, tmp_path):
    file = tmp_path / "random.pte"
    file.write_bytes(b"\x20\0\0\0ET12" + random.Random(1).randbytes(5000))
    refused(command(tool, file, tmp_path), FAILED, file, "damaged", "5008 bytes")


@TOOLS
def test_truncated(tool, image, tmp_path):
    """Programs are cut at many lengths, from the header to the last constant."""
    payload = image.index(b"MLX0")
    lengths = [9, 40, 64, 1000, payload - 4, payload + 100, payload + 8000, *range(20_000, len(image), 90_000)]
    for length in [*lengths, len(image) - 1000, len(image) - 64]:
        file = tmp_path / "truncated.pte"
        file.write_bytes(image[:length])
        refused(command(tool, file, tmp_path), FAILED, file, "truncated", f"{length} bytes")


@TOOLS
def test_a_program_that_is_not_a_language_model(tool, folder, tmp_path):
    import torch
    from executorch.exir import to_edge

    traced = torch.export.export(torch.nn.ReLU(), (torch.ones(2, 3),))
    (folder / "model.pte").write_bytes(to_edge(traced).to_executorch().buffer)
    line = refused(command(tool, folder / "model.pte", tmp_path), FAILED, "forward", "1 inputs", "1 outputs")
    assert "input_ids and cache_position" in line


@TOOLS
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"MLX0", b"MLX7", ["payload", "MLX0"]),
        (b"MLXBackend", b"XLMBackend", ["forward"]),
        (b"forward\0", b"foreword"[:7] + b"\0", ["no method `forward`"]),
        (b"kv_cache.n_layers", b"kv_cache.a_layers", ["does not report `kv_cache.n_layers`", "off-graph"]),
        (b"layers.1.mlp.up_proj", b"layers.9.mlp.up_proj", ["no constant", "layers.9.mlp.up_proj"]),
    ],
    ids=["payload", "backend", "method", "caches", "constant"],
)
def test_a_foreign_program(tool, folder, image, tmp_path, old, new, told):
    assert old in image
    (folder / "model.pte").write_bytes(replace_in_payload(image, old, new))
    refused(command(tool, folder / "model.pte", tmp_path), FAILED, *told)


def replace_in_payload(image: bytes, old: bytes, new: bytes) -> bytes:
    """Replace a name everywhere. If it is the name of a constant, replace it only in the delegate's payload."""
    assert len(old) == len(new)
    if not old.startswith(b"layers."):
        return image.replace(old, new)
    start, end = payload_range(image)
    return image[:start] + image[start:end].replace(old, new) + image[end:]


def payload_range(image: bytes) -> tuple[int, int]:
    """Return the range of the delegate's payload: a header of 24 bytes, then a flatbuffer up to the header's offset."""
    start = image.index(b"MLX0") - 4
    (length,) = struct.unpack_from("<Q", image, start + 8)
    return start, start + length


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_damaged_payload_never_crashes(programs, tmp_path, variant, seed):
    """If bytes of the delegate's payload change, the program runs, or the tool reports the reason. It never hangs."""
    image = programs[variant].path.read_bytes()
    start, end = payload_range(image)
    rng = random.Random(seed)
    ran = 0
    for count in (1, 1, 1, 1, 1, 2, 4, 16):
        damaged = bytearray(image)
        for _ in range(count):
            damaged[rng.randrange(start, end)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        file = tmp_path / "damaged.pte"
        file.write_bytes(damaged)
        done = reference.run(command(FORWARD, file, tmp_path), timeout=60)
        assert done.returncode in (0, FAILED), (seed, count, done.returncode, done.stderr)
        if done.returncode == 0:
            ran += 1
            assert done.stderr == ""
        else:
            # A damaged name may have a line break, so the message may have several lines.
            assert re.match(r"etkv_forward: .*\w", done.stderr), done.stderr
    reference.note(f"{variant}, seed {seed}: {ran} of 8 damaged programs ran")


# ---- Options --------------------------------------------------------------------------------------------------------


@TOOLS
@pytest.mark.parametrize("name", ["q4", "float32", "F32", "affine7", ""])
def test_unknown_kv_format(tool, model, tmp_path, name):
    words = [*command(tool, model, tmp_path), "--kv-format", name]
    refused(words, MISUSED, "--kv-format", "f32, f16, bf16", "row-fp4", f"`{name}`")


@TOOLS
@pytest.mark.parametrize("capacity", ["0", "-1", "ten", "1.5", "99999999999", ""])
def test_an_invalid_capacity_is_refused(tool, model, tmp_path, capacity):
    words = [*command(tool, model, tmp_path), "--capacity", capacity]
    refused(words, MISUSED, "--capacity", "whole number from 1", f'"{capacity}"')


@TOOLS
def test_unknown_options(tool, model, tmp_path):
    refused([tool, "--modle", model], MISUSED, "no option --modle", "did you mean --model?")
    refused([tool, "--perplexity", "3"], MISUSED, "no option --perplexity", "--help")
    refused([tool, model], MISUSED, model, "--help")
    refused([tool, "--model"], MISUSED, "--model needs a value")


def test_options_that_are_missing_or_exclude_each_other(model, tmp_path):
    refused([FORWARD, "--model", model], MISUSED, "--ids-file", "--help")
    line = refused([CHAT, "--prompt", "hi"], FAILED, "no model at build/models", "--model", cwd=tmp_path)
    assert "`make model`" in line
    refused([CHAT, "--model", model, "--prompt", ""], MISUSED, "the prompt is empty")
    refused([CHAT, "--model", model, "--prompt", "hi", "--raw", "--system", "x"], MISUSED, "--system", "--raw")
    refused([CHAT, "--model", model, "--prompt", "hi", "--max-tokens", 0], MISUSED, "--max-tokens", '"0"')
    for shape in ("--depth", "--width"):
        refused([CHAT, "--model", model, "--prompt", "hi", shape, 3], MISUSED, shape, "requires --draft")


def test_a_capacity_above_the_context_of_the_program(model):
    words = [CHAT, "--model", model, "--prompt", "hi", "--capacity", CONTEXT + 1]
    refused(words, FAILED, f"--capacity {CONTEXT + 1}", f"above {CONTEXT}", "exported for", model)


def test_a_program_that_does_not_tell_its_context(folder, image):
    name = b"get_max_ctx_len"
    assert name in image
    (folder / "model.pte").write_bytes(image.replace(name, b"get_max_ctx_xxx"))
    words = [CHAT, "--model", folder / "model.pte", "--prompt", "hi", "--max-tokens", 2]
    refused(words, FAILED, folder / "model.pte", "does not report the context length", "--capacity")
    assert reference.run([*words, "--capacity", 100]).returncode == 0


# ---- Prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 20, None])
def test_chat_with_a_prompt_longer_than_the_capacity(model, capacity):
    prompt = "x" * (CONTEXT + 40) if capacity is None else "hi"
    words = [CHAT, "--model", model, "--prompt", prompt, *(["--capacity", capacity] if capacity else [])]
    line = refused(words, FAILED, f"holds {capacity or CONTEXT}", "--capacity")
    (tokens,) = map(int, re.findall(r"the prompt is (\d+) tokens long", line))
    assert tokens > (capacity or CONTEXT)


def test_forward_with_a_prompt_longer_than_the_capacity(model, tmp_path):
    ids = write_ids(tmp_path, "60 " * 10)
    refused([FORWARD, "--model", model, "--ids-file", ids, "--capacity", 9], FAILED, "10 positions", "capacity is 9")
    # The second chunk does not fit.
    words = [FORWARD, "--model", model, "--ids-file", ids, "--capacity", 9, "--chunk", 6]
    refused(words, FAILED, "4 tokens at position 6", "10 positions", "capacity is 9")


@pytest.mark.parametrize(("token", "position"), [(VOCABULARY, 1), (-1, 0), (2**31, 2), (2**62, 0)])
def test_a_token_outside_the_vocabulary(model, tmp_path, token, position):
    ids = [60, 61, 62]
    ids[position] = token
    words = [FORWARD, "--model", model, "--ids-file", write_ids(tmp_path, " ".join(map(str, ids)))]
    refused(words, FAILED, f"token {token} is outside", f"vocabulary of {VOCABULARY}")


def test_the_last_token_of_the_vocabulary_runs(model, tmp_path):
    words = [FORWARD, "--model", model, "--ids-file", write_ids(tmp_path, f"0 {VOCABULARY - 1}")]
    assert reference.run(words).returncode == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1 2 three", ['"three" after 2 ids', "not an id"]),
        ("1 2.5", ['"2.5" after 1 id,']),
        (f"1 2 {10**30}", [f'"{10**30}" after 2 ids']),
        ("1 2 -", ['"-" after 2 ids']),
        ("", ["no ids"]),
        (" \n ", ["no ids"]),
    ],
)
def test_ids_that_cannot_be_read(model, tmp_path, text, told):
    file = write_ids(tmp_path, text)
    refused([FORWARD, "--model", model, "--ids-file", file], FAILED, file, *told)


def test_files_that_cannot_be_opened(model, ids_file, tmp_path):
    nowhere = tmp_path / "nowhere" / "file"
    for file in (nowhere, tmp_path):
        refused([FORWARD, "--model", model, "--ids-file", file], FAILED, "cannot read the ids", file)
    for option in ("--logits", "--all-logits"):
        words = [FORWARD, "--model", model, "--ids-file", ids_file, option, nowhere]
        refused(words, FAILED, "cannot write", nowhere)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_logits_that_cannot_be_written(model, ids_file):
    refused([FORWARD, "--model", model, "--ids-file", ids_file, "--logits", "/dev/full"], FAILED, "/dev/full")


def test_a_chunk_above_that_of_the_program_is_cut(programs, model):
    """A step has no more tokens than the program's limit, even if the option is larger."""
    program = programs[Variant("tiny-llama")]
    prompt = [60 + i % 20 for i in range(2 * CHUNK + 3)]
    expected = reference.forward(program, prompt, decode=4).ids
    for chunk in (CHUNK, CHUNK + 1, 100_000):
        assert reference.forward(program, prompt, decode=4, chunk=chunk).ids == expected


def test_the_capacity_is_reached_while_answering(model, tmp_path):
    capacity, words = 40, [CHAT, "--model", model, "--prompt", "hi", "--ids", "--max-tokens"]
    free = reference.run([*words, 30])
    full = reference.run([*words, 100, "--capacity", capacity])
    assert (free.returncode, full.returncode) == (0, 0)
    ids, fitting = answer_ids(free.stdout), answer_ids(full.stdout)
    assert [len(answer) for answer in (*ids, *fitting)] == [30, len(fitting[0])]
    assert fitting[0] == ids[0][: len(fitting[0])], "the answer is that of a larger cache, as far as it goes"
    (prompt_tokens,) = map(int, re.findall(r"prefill (\d+) tokens", full.stderr))
    assert prompt_tokens + len(fitting[0]) == capacity + 1, "the last token needs no position"
    assert f"the cache is full at {capacity} positions" in full.stderr

    ids_file = write_ids(tmp_path, "60 61 62")
    words = [FORWARD, "--model", model, "--ids-file", ids_file, "--capacity", 5, "--decode"]
    assert reference.run([*words, 2]).returncode == 0
    refused([*words, 3], FAILED, "at position 5", "6 positions", "capacity is 5")


def answer_ids(output: str) -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in re.findall(r"^ids: (.*)$", output, re.MULTILINE)]


def test_a_conversation_goes_on_after_a_refusal(model):
    """A prompt that does not fit, and an unknown command, change neither the cache nor later answers."""
    words = [CHAT, "--model", model, "--capacity", 120, "--max-tokens", 5, "--ids"]

    def converse(*lines: str):
        return reference.run(words, input="\n".join([*lines, "/stats", ""]), stdin=None)

    plain = converse("hi", "and then?")
    disturbed = converse("hi", "x" * 200, "/nonsense", "and then?")
    assert (plain.returncode, disturbed.returncode) == (0, 0)
    assert len(answer_ids(plain.stdout)) == 2
    assert disturbed.stdout == plain.stdout
    assert re.search(r"the prompt is \d+ tokens long, and the cache holds 120", disturbed.stderr)
    assert "there is no command /nonsense" in disturbed.stderr
    held = r"cache (\d+) of 120 positions"
    assert re.findall(held, disturbed.stderr) == re.findall(held, plain.stderr) != []


# ---- Text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no tokenizer at"),
        (b"", "cannot read the tokenizer"),
        (b"hello", "cannot read the tokenizer"),
        (b"{}", "cannot read the tokenizer"),
        (b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "cannot read the tokenizer"),
        (b"\xff\xfe\x00", "cannot read the tokenizer"),
    ],
    ids=["missing", "empty", "text", "object", "negative id", "bytes"],
)
def test_a_tokenizer_that_cannot_be_read(model, tmp_path, content, told):
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    for named in (file, tmp_path):
        refused([CHAT, "--model", model, "--prompt", "hi", "--tokenizer", named], FAILED, told, file)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer_config.json", "{", ["cannot read", "tokenizer_config.json"]),
        ("chat_template.jinja", "{% if %}", ["chat template", "line 1"]),
        ("chat_template.jinja", '\n{{ raise_exception("no system") }}', ["chat template", "no system", "line 2"]),
        ("chat_template.jinja", "", ["the prompt has no tokens"]),
        ("chat_template.jinja", None, ["there is no chat template", "tokenizer.json", "--raw"]),
    ],
    ids=["configuration", "syntax", "raises", "empty", "missing"],
)
def test_text_files_that_cannot_be_used(folder, name, content, told):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    refused([CHAT, "--model", folder / "model.pte", "--prompt", "hi"], FAILED, *told)


def test_a_tokenizer_of_another_model(folder):
    """Ids outside the vocabulary are refused: the embedding would read beyond its table."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["a"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    words = [CHAT, "--model", folder / "model.pte", "--raw", "--prompt", "banana"]
    refused(words, FAILED, "token 5000 is outside", f"vocabulary of {VOCABULARY}")


def test_a_prompt_that_is_not_utf8(model):
    words = [CHAT, "--model", model, "--raw", "--prompt", "a\udcff"]
    refused(words, FAILED, "not valid UTF-8", "byte 1")
