"""Converts text to token ids and back, with the tokenizer that the exporter writes beside a program."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, overload

from etkv.errors import EtkvError, first_line

_FILE = "tokenizer.json"
_GENERATION_CONFIG = "generation_config.json"


class Tokenizer:
    """The tokenizer of a model, with its chat template and eos token ids. It wraps a tokenizer of transformers, ``hf``.

    :meth:`from_pretrained` and :meth:`from_file` make instances.
    """

    def __init__(self, hf: Any, *, eos_token_ids: Iterable[int] | None = None) -> None:
        """Wrap a fast tokenizer of transformers. ``eos_token_ids`` end an answer; None uses the tokenizer's own.

        Raises :class:`EtkvError` if ``hf`` is not a fast tokenizer.
        """
        if not hasattr(hf, "backend_tokenizer"):
            raise EtkvError(
                f"hf is {type(hf).__name__}, expected a fast tokenizer of transformers; "
                "Tokenizer.from_pretrained reads one from a folder"
            )
        self.hf = hf
        if eos_token_ids is None:
            eos_token_ids = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids)
        """The ids that end an answer: those of generation_config.json, else the tokenizer's own, else none."""

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer in the folder ``path``, or beside the program ``path``. Downloads nothing.

        Raises :class:`EtkvError` if there is none or if it cannot be read.
        """
        path = Path(path)
        folder = path.parent if path.suffix == ".pte" else path
        if not (folder / _FILE).is_file():
            raise EtkvError(
                f"{folder} has no {_FILE}: the exporter writes it beside the program; copy the model's own there"
            )
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise EtkvError(f"the tokenizer in {folder} cannot be read: {first_line(error)}") from error
        return cls(hf, eos_token_ids=_eos_token_ids(folder))

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a ``tokenizer.json`` alone. The tokenizer has no chat template and no eos token ids.

        Raises :class:`EtkvError` if the file cannot be read.
        """
        from transformers import PreTrainedTokenizerFast

        try:
            # Transformers reports a missing file without its name.
            with Path(path).open("rb"):
                pass
            return cls(PreTrainedTokenizerFast(tokenizer_file=str(path)))
        except OSError as error:
            raise EtkvError(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:
            raise EtkvError(f"the tokenizer {path} cannot be read: {first_line(error)}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; ``add_special_tokens`` includes those that the tokenizer puts around a text."""
        return list(self.hf(text, add_special_tokens=add_special_tokens).input_ids)

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``, without special tokens if ``skip_special_tokens``."""
        return str(self.hf.decode([operator.index(each) for each in ids], skip_special_tokens=skip_special_tokens))

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template."""
        return bool(self.hf.chat_template)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: Literal[True] = True,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Return the ids of a conversation under the model's chat template, or its text unless ``tokenize``.

        ``messages`` are dicts ``{"role": …, "content": …}``. With ``add_generation_prompt`` the result ends where the
        model answers. ``variables`` are arguments of transformers and of the template, such as ``tools`` or
        ``enable_thinking``.

        Raises :class:`EtkvError` if the model has no chat template, or if its template refuses the messages.
        """
        if not self.has_chat_template:
            raise EtkvError("the model has no chat template: use encode")
        try:
            text: str = self.hf.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
            )
        except Exception as error:
            raise EtkvError(f"the chat template does not take these messages: {first_line(error)}") from error
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        """Return a new detokenizer, for the text of one answer."""
        return StreamingDetokenizer(self)

    def __repr__(self) -> str:
        template = "a" if self.has_chat_template else "no"
        return f"<{type(self).__name__}: {len(self.hf)} tokens, {template} chat template>"


class StreamingDetokenizer:
    """Converts the token ids of an answer to text, one at a time, without special tokens.

    ``tokens`` are the ids that were added. ``text`` is their text up to the last complete character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        """Begin another answer."""
        from tokenizers.decoders import DecodeStream

        self.tokens: list[int] = []
        self.text = ""
        self._told = 0
        self._pieces: Any = DecodeStream(skip_special_tokens=True)

    def add_token(self, token: int) -> None:
        """Add the next token of the answer."""
        piece: str | None = self._pieces.step(self._tokenizer.hf.backend_tokenizer, token)
        self.tokens.append(token)
        self.text += piece or ""

    def finalize(self) -> None:
        """End the answer: ``text`` gets the rest, with U+FFFD for an incomplete character."""
        whole: str = self._tokenizer.hf.backend_tokenizer.decode(self.tokens, skip_special_tokens=True)
        if whole.startswith(self.text):
            self.text = whole

    @property
    def last_segment(self) -> str:
        """Return the text that was added since the last read of this property."""
        segment = self.text[self._told :]
        self._told = len(self.text)
        return segment

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.tokens)} tokens, {len(self.text)} characters>"


def _eos_token_ids(folder: Path) -> list[int] | None:
    """Return ``eos_token_id`` of generation_config.json, an id or a list of ids, as a list; None if it has none.

    Raises :class:`EtkvError` if the file cannot be read, or if the value is neither.
    """
    path = folder / _GENERATION_CONFIG
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise EtkvError(f"{path} cannot be read: {first_line(error)}") from error
    if told is None:
        return None
    ids = told if isinstance(told, list) else [told]
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in ids):
        raise EtkvError(f"{path} has eos_token_id {told!r}; expected an id or a list of ids")
    return ids
