"""Text to token ids and back, with the tokenizer that the exporter puts beside a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from etkv.errors import EtkvError, first_line

_FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of a model; transformers does the work.

    ``hf`` is transformers' own object.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the tokenizer in ``folder``. Raises :class:`EtkvError` where there is none."""
        folder = Path(folder)
        if not (folder / _FILE).is_file():
            raise EtkvError(
                f"{folder} has no {_FILE}: the exporter writes it beside the program; copy the model's own there"
            )
        from transformers import AutoTokenizer

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise EtkvError(f"the tokenizer in {folder} cannot be read: {first_line(error)}") from error

    @classmethod
    def beside(cls, program: str | Path) -> Tokenizer:
        """The tokenizer in the folder of the program at this path."""
        return cls(Path(program).parent)

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, as the model's tokenizer begins it."""
        return self.hf(text).input_ids

    def chat(self, messages: str | list[dict[str, str]]) -> list[int]:
        """The ids of a conversation under the model's chat template, up to where the model answers.

        ``messages`` are ``{"role": …, "content": …}``, or one user's text.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not self.hf.chat_template:
            raise EtkvError("the model has no chat template: use encode")
        try:
            text = self.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            raise EtkvError(f"the chat template does not take these messages: {first_line(error)}") from error
        # The template writes the special tokens itself.
        return self.hf(text, add_special_tokens=False).input_ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, without special tokens."""
        return self.hf.decode(list(ids), skip_special_tokens=True)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ``ids`` piece by piece, each as soon as its characters are whole."""
        from tokenizers.decoders import DecodeStream

        pieces = DecodeStream(skip_special_tokens=True)
        for token in ids:
            piece = pieces.step(self.hf.backend_tokenizer, token)
            if piece:
                yield piece
