"""The runners' tokenizer, in a process that answers requests (tests/cpp/tokenize.cpp)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etkv.errors import EtkvError
from reference import BIN

TOOL = BIN / "etkv_tokenize"


class RunnerTokenizer:
    """A tokenizer of the runners. A refusal raises :class:`EtkvError`."""

    def __init__(self, tool: Path = TOOL) -> None:
        self._process = subprocess.Popen(
            [tool], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="ascii"
        )

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, *fields: str) -> list[str]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(" ".join(fields) + "\n")
        process.stdin.flush()
        kind, *reply = process.stdout.readline().split()
        if kind == "error":
            raise EtkvError(_text(reply[0]))
        return reply

    def open(self, path: Path) -> None:
        """Read the tokenizer for the following calls."""
        self._ask("open", _hex(str(path)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return [int(field) for field in self._ask("encode", str(int(add_special_tokens)), _hex(text))]

    def pieces(self, ids: Iterable[int], skip_special_tokens: bool = True) -> list[str]:
        """Return the pieces of text that a detokenizer returns for ids: one piece for each id, and the rest."""
        reply = self._ask("decode", str(int(skip_special_tokens)), *map(str, ids))
        return [_text(piece) for piece in "".join(reply).split(",")]

    def render(self, **variables: Any) -> str:
        """Return the text of a conversation under the chat template."""
        return _text("".join(self._ask("render", _hex(json.dumps(variables)))))

    def chat(self, **variables: Any) -> list[int]:
        """Return the ids of a conversation under the chat template."""
        return [int(field) for field in self._ask("chat", _hex(json.dumps(variables)))]

    def eos_token_ids(self) -> list[int]:
        """Return the ids that end an answer."""
        return [int(field) for field in self._ask("eos")]


@pytest.fixture(scope="module")
def runner() -> Iterator[RunnerTokenizer]:
    """Return a tokenizer that runs as long as the tests of a module."""
    tokenizer = RunnerTokenizer()
    yield tokenizer
    tokenizer.close()


def _hex(text: str) -> str:
    return text.encode().hex()


def _text(hexadecimal: str) -> str:
    return bytes.fromhex(hexadecimal).decode()
