"""Converts text to token ids and back, with the tokenizer that the exporter writes next to a program."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from etkv import _conversation, _pipeline, _template
from etkv._backend import Backend, check_id, errors
from etkv.errors import EtkvError, first_line

if TYPE_CHECKING:
    import tokenizers

_FILE = "tokenizer.json"
_GENERATION_CONFIG = "generation_config.json"


class Tokenizer:
    """The tokenizer of a model, with its chat template and eos token ids.

    ``hf``, a tokenizer of transformers, renders chat templates. Encoding and decoding follow its ``tokenizer.json``, as
    in the runners: see ``etkv/_backend.py``. :meth:`from_pretrained` and :meth:`from_file` create instances.
    """

    def __init__(self, hf: Any, *, eos_token_ids: Iterable[int] | None = None) -> None:
        """Wrap a fast tokenizer of transformers. ``eos_token_ids`` end an answer; None uses the tokenizer's own.

        Later changes of ``hf`` affect chat templates only.

        Raises :class:`EtkvError` if ``hf`` is not a fast tokenizer.
        """
        if not hasattr(hf, "backend_tokenizer"):
            raise EtkvError(
                f"hf is {type(hf).__name__}, expected a fast tokenizer of transformers; "
                "Tokenizer.from_pretrained reads one from a folder"
            )
        self._begin(hf, _copy(hf.backend_tokenizer), eos_token_ids)

    def _begin(self, hf: Any, backend: tokenizers.Tokenizer, eos_token_ids: Iterable[int] | None) -> None:
        self.hf = hf
        self._backend = Backend(backend, hf)
        if eos_token_ids is None:
            eos_token_ids = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids)
        """The ids that end an answer: those of generation_config.json, else those of the tokenizer, else none."""

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer in the folder ``path``, or next to the program ``path``. Downloads nothing.

        Raises :class:`EtkvError` if there is no tokenizer, or if it cannot be read.
        """
        path = Path(path)
        folder = path.parent if path.suffix == ".pte" else path
        if not (folder / _FILE).is_file():
            raise EtkvError(
                f"{folder} has no {_FILE}: the exporter writes it next to the program; copy the model's own there"
            )
        contents = _pipeline.checked(folder / _FILE)
        from transformers import PreTrainedTokenizerFast

        eos_token_ids = _eos_token_ids(folder)
        with errors(f"the tokenizer in {folder} cannot be read"):
            # AutoTokenizer is not used: some of its classes give other ids than tokenizer.json.
            hf = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            return cls._of_file(contents, hf, eos_token_ids)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read only a ``tokenizer.json``. The tokenizer has no chat template and no eos token ids.

        Raises :class:`EtkvError` if the file cannot be read.
        """
        from transformers import PreTrainedTokenizerFast

        try:
            # The message of transformers for a missing file lacks the file's name.
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise EtkvError(f"{path} cannot be read: {error.strerror}") from error
        contents = _pipeline.checked(Path(path))
        with errors(f"the tokenizer {path} cannot be read"):
            return cls._of_file(contents, PreTrainedTokenizerFast(tokenizer_file=str(path)), None)

    @classmethod
    def _of_file(cls, contents: dict[str, Any], hf: Any, eos_token_ids: Iterable[int] | None) -> Tokenizer:
        """Return the tokenizer of a ``tokenizer.json`` with these ``contents``, from which ``hf`` was created.

        The vocabulary and merges, nearly all of the file, come from ``hf``: transformers changes only other parts.
        """
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as StringTokenizer

        nothing = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
        backend = StringTokenizer.from_str(json.dumps({**contents, **nothing}))
        backend.model = hf.backend_tokenizer.model
        # The ids of added tokens follow from their order.
        added = [{**token} for token in contents.get("added_tokens") or ()]
        for token in added:
            token.pop("id")
        backend.add_tokens([AddedToken(**token) for token in added])
        tokenizer = cls.__new__(cls)
        tokenizer._begin(hf, backend, eos_token_ids)
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``, with the tokenizer's special tokens around it if ``add_special_tokens``.

        A text that begins with the tokenizer's BOS token, such as a rendered conversation, gets no second BOS token.
        Truncation and padding of ``tokenizer.json`` are ignored.
        """
        return self._backend.encode(text, add_special_tokens)

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``, without special tokens if ``skip_special_tokens``.

        An id without a token has no text. Raises :class:`EtkvError` for a value that is not an id.
        """
        return self._backend.decode(ids, skip_special_tokens)

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
        """Return the ids of a conversation under the model's chat template, or its text if ``tokenize`` is False.

        ``messages`` are dicts ``{"role": …, "content": …}``. With ``add_generation_prompt`` the result ends where the
        answer begins. ``variables`` are arguments of transformers and of the template, such as ``tools`` or
        ``enable_thinking``.

        Raises :class:`EtkvError` if the model has no chat template, or if its template refuses the messages.
        """
        if not self.has_chat_template:
            raise EtkvError("the model has no chat template: use encode")
        try:
            text = self._rendered(messages, {"add_generation_prompt": add_generation_prompt, **variables})
        except Exception as error:
            raise EtkvError(f"the chat template cannot render this conversation: {first_line(error)}") from error
        # The template has written the special tokens.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _rendered(self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> str:
        chosen = self.hf.get_chat_template(variables.pop("chat_template", None), variables.get("tools"))
        template = _template.checked(chosen)
        with _template.rendering(template):
            text: str = self.hf.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)
            return text

    def conversation_ids(
        self, messages: Sequence[Mapping[str, Any]], answers: Mapping[int, Sequence[int]], **variables: Any
    ) -> list[int]:
        """Return the ids of a conversation, up to the position where the next answer begins. Earlier answers keep the
        ids that the model chose.

        ``answers`` maps an index of ``messages`` to the ids of that message. The ids replace the message's ``content``
        if the template writes it unchanged. Otherwise the message is encoded from its text.

        Raises :class:`EtkvError` as :meth:`apply_chat_template` does.
        """

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return self.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)

        ids: list[int] = []
        for part in _conversation.parts(messages, answers, render):
            if not isinstance(part, str):
                ids += part
            elif ids:
                ids += self._backend.encode_after(part)
            else:
                ids = self.encode(part, add_special_tokens=False)
        return ids

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        """Return a new detokenizer for one answer. It leaves special tokens out of the text."""
        return StreamingDetokenizer(self)

    def __repr__(self) -> str:
        template = "a" if self.has_chat_template else "no"
        return f"<{type(self).__name__}: {len(self.hf)} tokens, {template} chat template>"


class StreamingDetokenizer:
    """Converts the token ids of an answer to text, one at a time.

    ``tokens`` are the ids so far. ``text`` is the part of their text that later ids cannot change. After
    :meth:`finalize`, ``text`` equals :meth:`Tokenizer.decode` of ``tokens``.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Begin an answer. Special tokens, such as those around a tool call, are in ``text`` unless
        ``skip_special_tokens`` is set.
        """
        self._backend = tokenizer._backend
        self._skip_special_tokens = skip_special_tokens
        self.reset()

    def reset(self) -> None:
        """Begin another answer."""
        self.tokens: list[int] = []
        self.text = ""
        self._told = 0
        # _ids are the last ids, which affect the text of later ids. The first _n_context of them are completely in
        # `text`. _out is the part of their decoded text that is in `text`.
        self._ids: list[int] = []
        self._n_context = 0
        self._out = ""

    def add_token(self, token: SupportsIndex) -> None:
        """Add the next token of the answer. An id without a token has no text.

        Raises :class:`EtkvError` for a value that is not an id.
        """
        number = check_id(token)
        self.tokens.append(number)
        backend = self._backend
        if not backend.has_token(number) or (self._skip_special_tokens and backend.is_special(number)):
            return
        self._ids.append(number)
        # Byte tokens are decoded together, after the last byte token of a run.
        if not backend.is_byte(number):
            self._read()

    def _read(self) -> None:
        text = self._decode()
        # Replacement characters at the end stand for the bytes of an incomplete character.
        certain = text.removesuffix(_REPLACEMENT)
        is_cut, waits = len(certain) < len(text), len(self._ids) - self._n_context < _MAX_HELD
        if certain.startswith(self._out):
            self.text += certain[len(self._out) :]
            self._out = certain
            if is_cut and waits:
                return
        elif waits:
            return
        else:
            self.text += _after_common_prefix(certain, self._out)
        # Keep the last ids as the context of the next ids, because some decoders treat the first id differently.
        del self._ids[: self._n_context]
        self._n_context = len(self._ids)
        self._out = self._decode().removesuffix(_REPLACEMENT) if is_cut else self._decode()

    def _decode(self) -> str:
        return self._backend.decode(self._ids, self._skip_special_tokens)

    def finalize(self) -> None:
        """End the answer: add the rest of the text, with U+FFFD for an incomplete character."""
        self.text += _after_common_prefix(self._decode(), self._out)
        self._ids, self._n_context, self._out = [], 0, ""

    @property
    def last_segment(self) -> str:
        """Return the text since the last read of this property."""
        segment = self.text[self._told :]
        self._told = len(self.text)
        return segment

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.tokens)} tokens, {len(self.text)} characters>"


_REPLACEMENT = "\ufffd"
"""The character that replaces bytes that are not valid UTF-8."""

_MAX_HELD = 64
"""While the text ends within a character, the text of at most this number of ids is held back. Each further id
causes these ids to be decoded again.
"""


def _after_common_prefix(text: str, out: str) -> str:
    """Return ``text`` without the prefix that it shares with ``out``."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, out, strict=False))
    return text[sum(1 for _ in pairs) :]


def _copy(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as StringTokenizer

    with errors("the tokenizer cannot be copied"):
        return StringTokenizer.from_str(tokenizer.to_str())


def _eos_token_ids(folder: Path) -> list[int] | None:
    """Return ``eos_token_id`` of generation_config.json, an id or a list of ids, as a list; None if it has none.

    Raises :class:`EtkvError` if the file cannot be read, or if the value is neither an id nor a list of ids.
    """
    path = folder / _GENERATION_CONFIG
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise EtkvError(f"{path} cannot be read: {first_line(error)}") from error
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in ids):
        raise EtkvError(f"{path} has eos_token_id {value!r}; expected an id or a list of ids")
    return ids
