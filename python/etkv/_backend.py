"""Encodes and decodes text with a ``tokenizer.json``. All Python code uses this module.

The runners follow the same rules in ``examples/tokenizer/src/backend.rs``. A test compares the ids and texts of both.

1. ``tokenizer.json`` determines the ids of a text. Its ``truncation`` and ``padding`` are ignored.
2. Two settings of ``tokenizer_config.json`` apply: ``split_special_tokens`` (special tokens in a text are encoded as
   plain text) and ``clean_up_tokenization_spaces`` (as in transformers, not for BPE).
3. A text that already begins with the BOS token gets no second BOS token.

The exporter writes a ``tokenizer.json`` that gives the same ids as the model's own tokenizer in transformers.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_ID = 2**32 - 1

_BYTE = re.compile("<0x(?:[0-9A-Fa-f]{2}|[+][0-9A-Fa-f])>")
"""A token that is one byte. A run of such tokens decodes to characters."""

_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""The replacements of ``clean_up_tokenization_spaces``, in order."""

_log = logging.getLogger("etkv.tokenizer")


class Backend:
    """A tokenizer of the package ``tokenizers`` under the rules of this module. It raises only :class:`EtkvError`."""

    def __init__(self, tokenizer: Tokenizer, hf: Any) -> None:
        """Take ownership of ``tokenizer`` and modify it.

        ``hf`` is transformers' tokenizer of the same folder, with the settings of ``tokenizer_config.json``.
        """
        from tokenizers import decoders

        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = bool(hf.split_special_tokens)
        even_for_bpe = hf.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
        is_bpe = type(tokenizer.model).__name__ == "BPE"
        if hf.clean_up_tokenization_spaces and (not is_bpe or even_for_bpe):
            # Without a decoder, tokens would be joined with spaces. This decoder joins them with spaces too, because no
            # token begins with its prefix.
            decoder = tokenizer.decoder or decoders.WordPiece(prefix="\uf8fe", cleanup=False)
            cleaning = [decoders.Replace(spaced, cleaned) for spaced, cleaned in _CLEAN_UP]
            tokenizer.decoder = decoders.Sequence([decoder, decoders.Fuse(), *cleaning])
        self._tokenizer = tokenizer
        self._has_byte_fallback = _has_byte_fallback(tokenizer)
        self._special = frozenset(
            number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text``, with the tokenizer's special tokens around it if ``add_special_tokens``."""
        if not isinstance(text, str):
            raise EtkvError(f"the text is {text!r}; expected a str")
        ids = self._encode(text, add_special_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1]:
            own = self._encode(text, False)
            if own[:1] == ids[:1] and ids[1 : 1 + len(own)] == own:
                token = self._tokenizer.id_to_token(ids[0])
                _log.info("the text already begins with %s, so the tokenizer does not add it again", token)
                return ids[1:]
        return ids

    def encode_after(self, text: str) -> list[int]:
        """Return the ids of a text that continues another text: without the space that some tokenizers prepend."""
        anchor, anchored = self._encode("\n", False), self._encode("\n" + text, False)
        if anchor and anchored[: len(anchor)] == anchor:
            return anchored[len(anchor) :]
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with errors("the text cannot be encoded"):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids

    def decode(self, ids: Iterable[Any], skip_special_tokens: bool) -> str:
        """Return the text of ``ids``. An id without a token has no text."""
        checked = [check_id(value) for value in ids]
        with errors(f"the ids {_short(checked)} cannot be decoded"):
            text: str = self._tokenizer.decode(checked, skip_special_tokens=skip_special_tokens)
            return text

    def has_token(self, token: int) -> bool:
        """Return whether the vocabulary has the id ``token``."""
        return self._tokenizer.id_to_token(token) is not None

    def is_special(self, token: int) -> bool:
        """Return whether ``token`` is special. ``skip_special_tokens`` leaves out special tokens."""
        return token in self._special

    def is_byte(self, token: int) -> bool:
        """Return whether ``token`` is a byte. Adjacent byte tokens are decoded together."""
        return self._has_byte_fallback and _BYTE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None


def check_id(value: Any) -> int:
    """Return ``value`` as a token id. Raises :class:`EtkvError` if it is not one."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_ID:
        raise EtkvError(f"the token is {value!r}; expected an id from 0 to {MAX_ID}")
    return number


def _has_byte_fallback(tokenizer: Tokenizer) -> bool:
    decoder = tokenizer.decoder
    return decoder is not None and b'"type":"ByteFallback"' in decoder.__getstate__()


def _short(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 8 else f"{ids[:8]} and {len(ids) - 8} more"


@contextlib.contextmanager
def errors(what: str) -> Iterator[None]:
    """Raise errors of ``tokenizers`` as :class:`EtkvError`. A Rust panic in that package is a ``BaseException``."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise EtkvError(f"{what}: {first_line(error)}") from error
        raise
