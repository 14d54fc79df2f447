"""Runners with drafts that read hidden states: the answers equal reference decoding."""

from __future__ import annotations

import re

import pytest

import recurrent_models
import reference
from etkv.export import ExportRequest, export_program
from reference import EVERYTHING, Program, Variant
from runners import (
    DRAFTED,
    EACH,
    FAILED,
    answers,
    checked,
    command,
    refused,
    runner,
    succeed,
)

MODELS = DRAFTED
SHAPES = [("--depth", depth, "--width", width) for depth in range(1, 7) for width in (1, 3, 8)]


def pair(name: str, **options: object) -> tuple[Program, Program]:
    """Return a model of two layers with a tap on the first, and the draft of the second layer."""
    return reference.program(Variant(name, tap_layers=(0,))), reference.program(Variant(name, draft=1, **options))


def check(programs: tuple[Program, Program], *options: object) -> str:
    """Return the runner's output. The runner checks its answers against reference decoding."""
    target, draft = programs
    done = succeed("speculative", target, "--draft", draft.path, "--check", "--ids", *options)
    assert checked(done)[1] == sum(map(len, answers(done.stdout)))
    return done.stderr


@pytest.mark.parametrize("name", MODELS)
def test_drafts_do_not_change_the_answer(name):
    both = pair(name)
    for shape in SHAPES[:: 1 if EVERYTHING else 2] if name == MODELS[-1] else SHAPES[::5]:
        check(both, "--max-tokens", 32, *shape)
    said = check(both, "--max-tokens", 64, "--depth", "auto", "--width", "auto")
    reference.note(f"{name}: {said}")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_draft_of_a_model_with_recurrent_layers(tmp_path, backend):
    """The draft has a recurrent layer and a layer with attention."""
    model = recurrent_models.write("qwen3.5", tmp_path / "model")
    target, draft = (
        export_program(ExportRequest(model, tmp_path / f"{name}.pte", backend=backend, **options))
        for name, options in (("target", {"tap_layers": (0,)}), ("draft", {"draft": 2}))
    )
    for depth, width in ((1, 3), (4, 1), (6, 3)):
        shape = "--depth", depth, "--width", width, "--max-tokens", 150, "--prompt", "a bee sea dog"
        done = reference.run([runner("speculative"), "--model", target, "--draft", draft, *shape, "--check"])
        assert done.returncode == 0, done.stderr
        assert checked(done)[1] > 0


@pytest.mark.parametrize("kv_format", ["f16", "nvfp4", "row-int4", pytest.param("affine4g32", marks=pytest.mark.long)])
def test_in_few_bits(kv_format):
    """Heads of tiny Llama have 16 elements, half of a group of `affine4g32`."""
    check(pair(MODELS[-1]), "--max-tokens", 48, "--kv-format", kv_format, "--depth", 4, "--width", 3)


def test_a_draft_of_small_steps():
    """Prompts are longer than the draft's step, and levels of a tree have no more nodes than the step."""
    said = check(pair("tiny-llama", prefill_chunk=4), "--max-tokens", 48, "--depth", 2, "--width", 8)
    counts = [float(found) for found in re.findall(r"of ([\d.]+) draft tokens", said)]
    assert len(counts) == 3
    assert 4 < max(counts) <= 8


@pytest.mark.long
def test_a_draft_of_another_model():
    """If all sizes are equal, the runner cannot detect the wrong draft. The answers are still right."""
    check((pair("tiny-qwen3")[0], pair("tiny-llama")[1]), "--max-tokens", 32)


def test_at_capacity():
    """At the end of the cache the answer ends with a message, and its tokens are right."""
    said = check(pair("tiny-llama"), "--max-tokens", 64, "--capacity", 110)
    assert "stopped: the cache is full at 110 positions (--capacity)" in said


def test_sampling_is_repeatable():
    target, draft = pair("tiny-llama")
    words = ["--draft", draft.path, "--temperature", 0.8, "--ids", "--max-tokens", 16, "--seed"]
    first, same, other = (succeed("speculative", target, *words, seed).stdout for seed in (1, 1, 2))
    assert first == same
    assert first != other


@pytest.mark.parametrize("name", MODELS)
def test_chat(name):
    """Rollbacks and resets apply to the draft too."""
    target, draft = pair(name)
    lines = "hi\nand then?\n/undo\nand now?\n/reset\nhi\n/undo\nwell?\n"
    words = [reference.CHAT, "--model", target.path, "--ids", "--max-tokens", 24]
    plain, drafted = (
        reference.run([*words, *more], input=lines, stdin=None)
        for more in ([], ["--draft", draft.path, "--depth", 3, "--width", 2])
    )
    assert (plain.returncode, drafted.returncode) == (0, 0)
    assert drafted.stdout == plain.stdout
    assert len(answers(plain.stdout)) == 5
    assert drafted.stderr.count(" a step, ") == 5, "every answer was drafted"
    assert "the draft" not in drafted.stderr


@pytest.mark.long
def test_memory_returns_to_where_it_was():
    target, draft = pair("tiny-llama")
    done = succeed("speculative", target, "--draft", draft.path, "--max-tokens", 8, "--repeat", 50)
    line = r"^round \d+: (\d+) handles, (\d+) bytes in MLX, ([\d.]+) MiB in the process$"
    rounds = re.findall(line, done.stderr, re.M)
    assert len(rounds) == 50
    assert {(handles, in_mlx) for handles, in_mlx, _ in rounds} == {("0", "0")}
    process = [float(mebibytes) for _, _, mebibytes in rounds]
    assert process[-1] < process[9] + 0.5


@pytest.mark.parametrize(
    ("options", "gives"),
    [({}, "none"), pytest.param({"tap_layers": (1,)}, "those of layer 1", marks=pytest.mark.long)],
    ids=["none", "another layer's"],
)
def test_a_target_that_does_not_give_the_hidden_states(options, gives):
    """The message names the layer, and the export option that returns its hidden states."""
    draft = pair("tiny-llama")[1]
    refused(
        command("speculative", reference.program(Variant("tiny-llama", **options)), "--draft", draft.path),
        FAILED,
        f"the draft: it needs the hidden states of layer 0, and the model returns {gives}: "
        "export the model with --tap-layers 0",
    )


@EACH
def test_a_draft_is_not_a_model(name):
    draft = pair("tiny-llama")[1]
    refused(command(name, draft), FAILED, f"{draft.path} is a draft of a model: give it with --draft")
    refused(
        [reference.CHAT, "--model", draft.path, "--prompt", "hi"],
        FAILED,
        "is a draft of a model: give it with --draft",
    )
