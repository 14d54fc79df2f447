"""The line of ``etkv_chat`` after an answer reports the same reuse of cached tokens as ``etkv.Chat``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import etkv
import reference
from etkv.recurrent_layer import BLOCK
from reference import EVERYTHING, Variant
from test_recurrent_programs import recurrent_program

CASES = ["qwen3.5-cpu", *(["lfm2-cpu", "lfm3-window-cpu", "lfm3-window-mlx"] if EVERYTHING else [])]

SHORTENS = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'][:5] if message['role'] == 'assistant' else message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that renders only the beginning of answers, as other templates leave out the model's reasoning."""

ASKED = ["the river and the sea are long, and the dog is not", "is it?", "why?"]
CAPACITY, ANSWER = 256, 150
"""An answer has more tokens than the last positions to which a cache with recurrent layers can be rewound."""


@pytest.fixture(scope="module", params=CASES)
def model(request):
    return recurrent_program(*request.param.rsplit("-", 1))


@pytest.fixture
def shortens(tmp_path):
    """Return a function that copies a model's tokenizer with the template `SHORTENS`."""

    def copy(model: Path) -> Path:
        folder = shutil.copytree(model, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.pte"))
        (folder / "chat_template.jinja").write_text(SHORTENS)
        return folder

    return copy


def told(model: Path, *words: object) -> list[str]:
    """Return what ``etkv_chat`` prints about the reuse of each turn."""
    command = [reference.CHAT, "--model", model, "--capacity", CAPACITY, "--max-tokens", ANSWER, *words]
    done = reference.run(command, input="".join(f"{line}\n" for line in ASKED), stdin=None)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\d+ tokens? · prefill .*?/s\)(.*) · decode ", done.stderr, re.M)
    print(found)
    assert len(found) == len(ASKED)
    return found


def line_of(reuse: etkv.Reuse) -> str:
    """Return what ``etkv_chat`` prints about this reuse. The reason is the end of Python's."""
    if reuse.run_again == 0:
        return f", {reuse.restored} cached" if reuse.restored > 0 else ""
    reason = reuse.reason.split(", but ")[1]
    return f", {reuse.matched} matched, {reuse.restored} cached, {reuse.run_again} run again: {reason}"


@pytest.fixture
def reuses(model, shortens):
    """The :class:`etkv.Reuse` of each turn in Python, and the tokenizer's folder."""
    folder = shortens(Path(model.request.output).parent)
    found = []
    with model.session(capacity=CAPACITY) as session, model.load(session) as program:
        chat = etkv.Chat(program, etkv.Tokenizer.from_pretrained(folder))
        for text in ASKED:
            list(chat.send_message(text, max_tokens=ANSWER))
            assert chat.reuse is not None
            found.append(chat.reuse)
    return found, folder


def test_etkv_chat_reports_the_reuse_that_python_reports(model, reuses):
    found, folder = reuses
    lines = told(model.request.output, "--tokenizer", folder)
    assert lines == [line_of(reuse) for reuse in found]
    # The first text is new. In the other turns, some tokens matched and ran again.
    assert lines[0] == ""
    assert [reuse.restored for reuse in found[1:]] == [BLOCK, BLOCK]
    assert all(reuse.run_again > 0 for reuse in found[1:])
    # One text that only grows: everything matches, and nothing runs again.
    lines = told(model.request.output, "--raw", "--max-tokens", 20)
    assert lines[0] == ""
    assert all(re.fullmatch(r", \d+ cached", line) for line in lines[1:])


def test_matched_tokens_are_those_of_the_cache_if_a_stored_text_replaces_it(model, reuses, tmp_path):
    """With windows, a turn continues from the stored prompt of the turn before it. The cache may match more."""
    found, folder = reuses
    lines = told(model.request.output, "--tokenizer", folder, "--prefix-store", tmp_path / "texts")
    assert lines[0] == ""
    for line, plain in zip(lines[1:], found[1:], strict=True):
        restored = int(re.search(r"(\d+) cached", line)[1])
        assert restored >= plain.restored
        assert line == line_of(etkv.Reuse(plain.matched, restored, run=0))


def test_etkv_chat_reports_cached_tokens_only_if_the_cache_can_be_rewound_to_all_of_them(shortens):
    made = reference.program(Variant("tiny-llama", backend="cpu"))
    first, *others = told(made.path, "--tokenizer", shortens(Path(made.path).parent))
    assert first == ""
    assert len(others) == 2
    assert all(re.fullmatch(r", \d+ cached", line) for line in others)
