"""Chat templates: the runners choose the same template as transformers, and render the same text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

import etkv
import runner_tokenizer
import template_cases
import tokenizers_made
from etkv.export import companions
from runner_tokenizer import RunnerTokenizer
from template_cases import CONSTRUCTS, CONVERSATIONS, LAYOUTS, VALUES, VARIABLES

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


runner = runner_tokenizer.runner


@pytest.fixture
def opened(runner, tmp_path):
    """Return a function from the source of a template to the runners' tokenizer with this template."""
    tokenizers_made.made()["byte-level: plain"]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPECIAL_TOKENS))

    def with_template(source: str) -> RunnerTokenizer:
        (tmp_path / "chat_template.jinja").write_bytes(source.encode())
        runner.open(tmp_path)
        return runner

    return with_template


def reference(source: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    """Return transformers' rendering, or None if it refuses the template."""
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        rendered, _ = render_jinja_template([present], chat_template=source, **SPECIAL_TOKENS, **variables)
    except Exception:
        return None
    return str(rendered[0])


def rendered(runner: RunnerTokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    try:
        return runner.render(messages=messages, **variables)
    except etkv.EtkvError as error:
        assert "the chat template cannot render this conversation: " in str(error)
        return None


@pytest.mark.parametrize("source", [*CONSTRUCTS, *LAYOUTS])
def test_constructs(source, opened):
    assert rendered(opened(source), [], VALUES) == reference(source, [], VALUES)


def test_templates_of_installed_packages(opened):
    """The runners may render templates that transformers refuses: minijinja accepts more."""
    templates = dict(template_cases.installed())
    assert templates
    for name, source in templates.items():
        runner = opened(source)
        for messages in CONVERSATIONS:
            for variables in VARIABLES:
                expected = reference(source, messages, variables)
                if expected is not None:
                    assert rendered(runner, messages, variables) == expected, (name, messages, variables)


NAMED = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | tojson }}", "rag": "R"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_named_templates_are_exported_and_chosen(runner, tmp_path):
    """Tools select the same template in the exported folder as in the model's folder. A later export without named
    templates removes them.
    """
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizers_made.made()["byte-level: plain"](), **SPECIAL_TOKENS)
    hf.chat_template = NAMED
    folder, scratch = tmp_path / "program", tmp_path / "scratch"
    folder.mkdir()
    names = companions.write(scratch, hf, {"eos_token_id": [1]})
    companions.publish(scratch, folder, names)
    assert "additional_chat_templates/tool_use.jinja" in names
    tokenizer = etkv.Tokenizer.from_pretrained(folder)
    runner.open(folder)
    messages = [{"role": "user", "content": "x"}]
    for variables in ({}, {"tools": TOOLS}, {"tools": []}):
        expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False, **variables)
        assert tokenizer.apply_chat_template(messages, tokenize=False, **variables) == expected
        assert runner.render(messages=messages, **variables) == expected
    hf.chat_template = None
    other = tmp_path / "other"
    companions.publish(other, folder, companions.write(other, hf, {"eos_token_id": [1]}))
    assert not list(folder.rglob("*.jinja"))


@pytest.mark.parametrize("as_list", [True, False])
def test_named_templates_in_the_config(runner, tmp_path, as_list):
    """Older folders have named templates in tokenizer_config.json. If there are template files, these replace
    them all.
    """
    tokenizers_made.made()["byte-level: plain"]().save(str(tmp_path / "tokenizer.json"))
    listed = [{"name": name, "template": source} for name, source in NAMED.items()]
    config = {**SPECIAL_TOKENS, "chat_template": listed if as_list else NAMED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "x"}]

    def both(**variables: Any) -> set[str]:
        runner.open(tmp_path)
        tokenizer = etkv.Tokenizer.from_pretrained(tmp_path)
        return {
            runner.render(messages=messages, **variables),
            tokenizer.apply_chat_template(messages, tokenize=False, **variables),
        }

    assert both() == {"Dx"}
    assert both(tools=TOOLS) == {f"T{json.dumps(TOOLS)}"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert both(tools=TOOLS) == {"file"}


def test_templates_without_a_default_are_refused(runner, tmp_path):
    tokenizers_made.made()["byte-level: plain"]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    runner.open(tmp_path)
    with pytest.raises(etkv.EtkvError, match="expected one named default, found rag"):
        runner.render(messages=[])


def test_the_ids_of_a_conversation_are_those_of_its_text(opened):
    runner = opened("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}")
    messages = [{"role": "user", "content": "the cat"}]
    assert runner.chat(messages=messages) == runner.encode(runner.render(messages=messages), False)


@pytest.fixture
def python(tmp_path):
    """Return a function from the source of a template to Python's tokenizer with this template."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer = etkv.Tokenizer.from_pretrained(tmp_path)

    def with_template(source: str) -> etkv.Tokenizer:
        tokenizer.hf.chat_template = source
        return tokenizer

    return with_template


def _text(tokenizer, messages):
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **VALUES)
    except Exception as error:
        return type(error)


def test_the_bounds_of_python_change_no_text(python):
    """etkv renders the same text as transformers, and raises an error if transformers does."""
    sources = [
        *CONSTRUCTS,
        *LAYOUTS,
        "{{ '<a>' ~ ('b' | safe) }}{{ 'c' ~ 1.5 ~ none }}",
        *dict(template_cases.installed()).values(),
    ]
    compared = 0
    for source in sources:
        for messages in CONVERSATIONS:
            tokenizer = python(source)
            made = _text(tokenizer, messages)
            expected = _text(tokenizer.hf, messages)
            assert made == expected or (made is etkv.EtkvError and isinstance(expected, type)), source
            compared += isinstance(expected, str)
    assert compared > len(sources)


def test_bounds(opened):
    """A template that does not end, or that writes too long a text, is refused quickly."""
    nested = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(etkv.EtkvError, match="instructions"):
        opened(nested).render(messages=[])
    deep = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
    with pytest.raises(etkv.EtkvError, match="cannot render"):
        opened(deep).render(messages=[])
