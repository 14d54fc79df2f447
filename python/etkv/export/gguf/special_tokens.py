"""The special tokens of a GGUF file, and the tokens that end an answer."""

from __future__ import annotations

from typing import Any

from etkv.errors import EtkvError
from etkv.export.gguf.file import GgufFile

_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "</s>",
        "<EOT>",
        "< EOT >",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
        "[e~[",
    }
)
"""Tokens that end a turn or a text in every vocabulary that has them.

A file has a key for one such token, but chat models often end their turns with another one."""


_OF_SENTENCEPIECE = {"unknown": 0, "bos": 1, "eos": 2}
"""The default ids of special tokens in a SentencePiece vocabulary."""


def token_id(file: GgufFile, name: str) -> int | None:
    """Return the id in ``tokenizer.ggml.{name}_token_id``, or the default for this kind of tokenizer, or ``None``.

    Raises :class:`EtkvError` for an id outside the vocabulary.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.values.get(key)
    if value is None:
        return _OF_SENTENCEPIECE.get(name) if file.values.get("tokenizer.ggml.model") == "llama" else None
    count = len(file.values.get("tokenizer.ggml.tokens") or ())
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise EtkvError(f"{file.path} has {key} = {value!r}, but its vocabulary has {count} tokens")
    return value


def ends(file: GgufFile) -> list[int]:
    """Return the ids of the tokens that end an answer: those in keys, then those with a known text."""
    named = [token_id(file, name) for name in ("eos", "eot", "eom")]
    texts = {text: index for index, text in enumerate(file.values.get("tokenizer.ggml.tokens") or ()) if text in _ENDS}
    if {"<|return|>", "<|call|>"} <= texts.keys() or {"<|calls|>", "<|flush|>"} <= texts.keys():
        # In this vocabulary "<|end|>" ends a message, and an answer has several messages.
        texts.pop("<|end|>", None)
    if "<|tool_response>" in texts:
        texts.pop("</s>", None)
    return list(dict.fromkeys([*(index for index in named if index is not None), *texts.values()]))


def ids(file: GgufFile) -> dict[str, Any]:
    """Return the entries of a configuration: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.

    Several eos tokens are a list. Raises :class:`EtkvError` for an id outside the vocabulary.
    """
    found = ends(file)
    return {
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": found[0] if len(found) == 1 else found or None,
        "pad_token_id": token_id(file, "padding"),
    }
