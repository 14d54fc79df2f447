"""Chat templates and conversations for the tests of the runners' templates."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VALUES: dict[str, Any] = {
    "s": "Hello, World",
    "e": "",
    "sp": " a  b\tc\n d ",
    "u": "né日本🙂",
    "ml": "a\nb\n\nc",
    "html": "<a href='x'>&</a>",
    "n": 7,
    "f": 2.5,
    "big": 1e20,
    "t": True,
    "no": None,
    "l": [3, 1, 2],
    "ls": ["b", "a", "C"],
    "d": {"b": 1, "a": {"x": [1, None, True, "q'\""]}},
    "lod": [{"n": "x", "v": 2, "o": True}, {"n": "y", "v": 1}, {"n": "x", "v": 3, "o": False}],
    "nest": [[1, 2], [3]],
    "empty": [],
    "named": {"items": [1], "keys": 2, "get": 3},
}
"""Variables of the templates below."""

CONSTRUCTS = Path(__file__).with_name("template_constructs.txt").read_text(encoding="utf-8").splitlines()
"""One-line templates with the constructs of published templates. The last templates are refused."""

LAYOUTS = (
    "  {% if t %}  \n  x\n  {% endif %}\ny\n",
    "a\n{% set x = 1 %}\nb\n",
    "{{ s }}\n\n",
    "\n\n{%- if t %}\nx\n{%- endif %}\n",
    "{% if t -%}\n  x\n{%- else -%} y{% endif %}",
    "   {# c #}\nx\n   {%- if t %} a {% endif %}\n  {{ s }}  \n",
    "\t{%- if t %}\tx{% endif %}\r\ny\r\n",
    "{% for m in lod -%}\n  {{ m.n }}\n{% endfor -%}\n z",
    "{%+ if t %}x{% endif +%}\n",
)
"""Templates for the rules of white space."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the <b>weather</b> & 'time' \u2014 n\u00e9",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city", "enum": ["Paris", "Rome"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}

_ARGUMENTS = {"city": "Paris", "days": [1, 2], "x": 1.5, "ok": True, "none": None}


def _call(arguments: Any, content: str | None = "") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"id": "abc123def", "function": function}]}


_USER = {"role": "user", "content": "Hi"}
_RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abc123def", "content": '{"t": 3}'}

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER],
    [{"role": "system", "content": ""}, _USER],
    [{"role": "user", "content": " Hi \n"}, {"role": "assistant", "content": "Yo  "}, _USER],
    [_USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}, _USER],
    [_USER, {"role": "assistant", "content": "Hello", "reasoning_content": "Let me think"}, _USER],
    [_USER, {"role": "assistant", "content": "Hello", "thinking": "Let me think"}],
    [_USER, _call(_ARGUMENTS), _RESULT],
    [_USER, _call('{"city": "Rome"}', None), _RESULT, {"role": "assistant", "content": "It is 3."}, _USER],
    [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]}],
    [{"role": "developer", "content": "Dev"}, _USER, _USER],
    [{"role": "user", "content": '日本 🙂 "q" <b> \\n {{ x }}'}, {"role": "assistant", "content": "n\u00e9\n\n- a"}],
]

VARIABLES: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"tools": [_TOOL], "add_generation_prompt": True, "enable_thinking": True},
    {"documents": [{"title": "T", "text": "Doc"}]},
]


def installed() -> Iterator[tuple[str, str]]:
    """Yield the chat templates in installed packages: files, and strings of Python modules."""
    for package in ("transformers", "mlx_lm", "gguf", "executorch"):
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            for file in Path(folder).rglob("*"):
                if file.suffix in (".jinja", ".jinja2", ".py") and (text := _text(file)):
                    yield from ((f"{package}/{file.name}:{line}", source) for line, source in _sources(file, text))


def _text(file: Path) -> str | None:
    contents = file.read_bytes()
    return contents.decode(errors="replace") if b"{%" in contents else None


def _sources(file: Path, text: str) -> Iterator[tuple[int, str]]:
    if file.suffix != ".py":
        yield 1, text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            source = node.value
            if all(word in source for word in ("{%", "message", "endfor")):
                yield node.lineno, source
