"""The example runners on models with windows: dropped positions are read again, and the answers are right."""

from __future__ import annotations

import re

import pytest

import reference
from reference import CHAT, Program, Variant
from runners import EACH, answers, checked, prompts, succeed

pytestmark = pytest.mark.runner

WINDOW = 64
MAX = 220
"""Number of tokens of an answer: more than a window and two steps, so that every kind of cache drops positions."""

MODELS = pytest.mark.parametrize("model", ["tiny-mistral-window", pytest.param("tiny-gemma3", marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def mistral() -> Program:
    """Return a program with a window in every layer."""
    return reference.program(Variant("tiny-mistral-window"))


@MODELS
@EACH
def test_answers_are_those_of_reference_decoding(name, model):
    words = ["--max-tokens", MAX, "--check", "--ids", "--prompt", "Well?", "--prompt", "What else is there?"]
    done = succeed(name, reference.program(Variant(model)), *words)
    assert max(map(len, answers(done.stdout))) > WINDOW + 2 * reference.TINY_CHUNK
    n_answers, n_tokens = checked(done)
    if name == "rollback":
        assert "the layers' windows have moved past position" in done.stderr
        # All answers except the last, which has another window, are checked.
        assert n_answers == len(answers(done.stdout)) - 1
    else:
        assert n_answers == len(answers(done.stdout)) > 1
        assert n_tokens == sum(map(len, answers(done.stdout)))


@MODELS
@pytest.mark.parametrize("options", [["--session", "contiguous"], ["--session", "seq"], ["--draft", "ngram"]])
def test_chat_rolls_back_turns_that_windows_have_moved_past(model, options):
    """After turns are undone, answers equal those of a conversation without these turns."""
    words = [CHAT, "--model", reference.program(Variant(model)).path, "--ids", "--max-tokens", MAX, *options]

    def converse(*lines: str) -> list[list[int]]:
        done = reference.run(words, input="\n".join([*lines, ""]), stdin=None)
        assert done.returncode == 0, done.stderr
        assert "window" not in done.stderr, "nothing is refused"
        return answers(done.stdout)

    first, second, again, more = converse("hi", "and then?", "/undo", "and now?", "/undo", "/undo", "well?")
    assert [first, again] == converse("hi", "and now?")
    assert [first, second] == converse("hi", "and then?")
    assert [more] == converse("well?")


@pytest.mark.parametrize(
    ("options", "compared"),
    [
        (["--window", 100, "--sinks", 4], True),
        (["--window", WINDOW, "--sinks", 4], True),
        (["--window", 48, "--sinks", 0], True),
        (["--window", 48, "--sinks", 4], False),
    ],
    ids=["wider", "as wide", "narrower", "no window"],
)
def test_a_window_over_layers_that_have_one(mistral, options, compared):
    """The answer is compared with one under the intersection of both windows, if the intersection is a window."""
    done = succeed("rollback", mistral, "--max-tokens", 90, "--check", "--ids", "--prompt", "a", *options)
    assert len(re.findall("^check: 1 answer,", done.stderr, re.M)) == (1 if compared else 0)
    assert ("--window 48 and --sinks 4 in a layer with a window of 64" in done.stderr) != compared
    assert checked(done)[0] == len(answers(done.stdout)) - (0 if compared else 1)


def test_a_widened_window_is_reported(mistral):
    done = succeed("rollback", mistral, "--max-tokens", 4, "--window", 1, *prompts(["a"]))
    assert re.search(r"^window: \d\d in place of 1, as long as the prompt$", done.stderr, re.M)
