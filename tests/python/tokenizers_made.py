"""Small tokenizers of many kinds, with the parts of published tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Split

BOS, EOS, UNK, CALL = SPECIAL = ("<s>", "</s>", "<unk>", "[TOOL_CALLS]")

TEXTS = (
    "",
    " ",
    "the cat sat on the mat.",
    "  The CAT's  naïve é 日本 🙂\n\n\tx123, don't .",
    "<s>the cat</s> [TOOL_CALLS] <s>",
    "<s><s>x",
    "<s>",
    "a<s>\n b </s>c",
    "word[mid]word [mid] and \u00a0 space\u3000here\u2028line\u0085next\u200bzero",
    "e\u0301 ﬁ Å ß İ \ufffd",
    "▁the▁cat",
    "<0x41> <0xE2>",
    "aaaa 1234567 ... --- !? \r\n\r\n   x",
)

_MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("c", "a"),
    ("ca", "t"),
    ("a", "a"),
    ("1", "2"),
    ("Ġ", "the"),
    ("Ġ", "cat"),
    ("Ċ", "Ċ"),
]

_SPLITS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek": r"[\p{P}\p{S}]|[一-龥ࠀ-一가-퟿]+|\s?[\p{L}]+|\p{N}",
}


def made() -> dict[str, Callable[[], Tokenizer]]:
    """Return functions that create tokenizers, by names that list their parts."""
    plain = ByteLevel(add_prefix_space=False)
    byte_level: dict[str, Callable[[], Tokenizer]] = {
        "plain": lambda: _byte_level(plain),
        "prefix space, EOS": lambda: _byte_level(ByteLevel(add_prefix_space=True), eos=True),
        "digits, NFC": lambda: _byte_level(
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), plain]), normalizers.NFC(), lstrip=True, rstrip=True
        ),
        "lowercase, punctuation, no BOS": lambda: _byte_level(
            pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), plain]),
            normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
            bos=False,
            normalized=True,
        ),
        "ByteLevel post-processor": lambda: _with(
            _byte_level(plain, bos=False), post_processor=processors.ByteLevel(trim_offsets=True)
        ),
        "truncation": lambda: _truncated(_byte_level(plain, single_word=True)),
        "padding": lambda: _padded(_byte_level(plain)),
    }
    for name, pattern in _SPLITS.items():
        parts = [Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        byte_level[f"{name} split"] = lambda parts=parts: _byte_level(pre_tokenizers.Sequence(parts))
    all_kinds = {f"byte-level: {name}": make for name, make in byte_level.items()}
    all_kinds |= {f"byte-fallback: {name}": lambda parts=parts: _byte_fallback(**parts) for name, parts in _SPM.items()}
    return all_kinds | {
        "unigram": _unigram,
        "unigram, byte fallback": lambda: _unigram(byte_fallback=True),
        "wordpiece": lambda: _word_piece(cleanup=True),
        "wordpiece, no cleanup, BERT's special tokens": lambda: _with(
            _word_piece(cleanup=False), post_processor=processors.BertProcessing((EOS, 1), (BOS, 0))
        ),
        "bpe, </w>": _suffix,
        "word level, no decoder": _word_level,
    }


_SPM: dict[str, dict[str, Any]] = {
    "Llama 2": {
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        "decoder": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    },
    "Llama 2, not legacy": {
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        "decoder": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    },
    "Gemma": {
        "normalizer": normalizers.Replace(" ", "▁"),
        "pre_tokenizer": Split(" ", "merged_with_previous"),
        "decoder": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    },
    "always a prefix": {
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always"),
        "decoder": [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")],
    },
}


def _finished(tokenizer: Tokenizer, *, bos: bool = True, eos: bool = False, **flags: bool) -> Tokenizer:
    """Add an ordinary token with ``flags`` of :class:`AddedToken`, and BOS and EOS around a text."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("[mid]", special=False, **flags)])
    if bos:
        text = f"{BOS} $A{f' {EOS}' if eos else ''}"
        named = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(single=text, pair=f"{text} $B", special_tokens=named)
    return tokenizer


def _with(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _truncated(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.enable_truncation(max_length=4)
    return tokenizer


def _padded(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.enable_padding(length=64, pad_id=1, pad_token=EOS, direction="left")
    return tokenizer


def _byte_level(pre_tokenizer: Any, normalizer: Any = None, **more: bool) -> Tokenizer:
    vocab = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    merges = [pair for pair in _MERGES if set("".join(pair)) <= set(vocab)]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.normalizer, tokenizer.decoder = pre_tokenizer, normalizer, decoders.ByteLevel()
    return _finished(tokenizer, **more)


def _byte_fallback(decoder: list[Any], **parts: Any) -> Tokenizer:
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehmnostx.,'1\u200b\ufffd", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("c", "a"), ("ca", "t"), ("▁", "the"), ("▁", "cat")]
    tokens += ["".join(pair) for pair in merges]
    vocab = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=[*merges, ("▁", "▁")], unk_token=UNK, fuse_unk=True, byte_fallback=True)
    return _finished(_with(Tokenizer(model), decoder=decoders.Sequence(decoder), **parts))


def _unigram(byte_fallback: bool = False) -> Tokenizer:
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256) if byte_fallback)]
    pieces = ("▁", "▁the", "▁cat", "▁sat", "a", "b", "c", "t", "h", "e", "x", "s", ".", ",", "'", "1", "é", "日", "本")
    vocab = [(token, 0.0) for token in tokens] + [(piece, -1.0 - len(piece) / 10) for piece in pieces]
    model = models.Unigram(vocab, unk_id=2, byte_fallback=byte_fallback)
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
    decoder = decoders.Metaspace(prepend_scheme="first")
    return _finished(
        _with(
            Tokenizer(model),
            normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
            pre_tokenizer=metaspace,
            decoder=decoders.Sequence([decoders.ByteFallback(), decoder]) if byte_fallback else decoder,
        ),
        eos=True,
    )


def _word_piece(cleanup: bool) -> Tokenizer:
    words = ("the", "cat", "sat", "x", "##s", "##at", "do", "n't", "'s", "'", ".", ",", "##t", "##1", "a", "日", "本")
    vocab = {token: number for number, token in enumerate((*SPECIAL, *words))}
    return _finished(
        _with(
            Tokenizer(models.WordPiece(vocab, unk_token=UNK)),
            normalizer=normalizers.BertNormalizer(),
            pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
            decoder=decoders.WordPiece(cleanup=cleanup),
        )
    )


def _suffix() -> Tokenizer:
    tokens = [*SPECIAL, *"abcdehtx1.", "a</w>", "e</w>", "t</w>", "th", "the</w>", "at</w>", ".</w>", "x</w>", "1</w>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [("t", "h"), ("th", "e</w>"), ("a", "t</w>")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token=UNK, end_of_word_suffix="</w>")
    return _finished(_with(Tokenizer(model), pre_tokenizer=pre_tokenizers.Whitespace(), decoder=decoders.BPEDecoder()))


def _word_level() -> Tokenizer:
    vocab = {token: number for number, token in enumerate((*SPECIAL, "the", "cat", "sat", "on", "x", "."))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    return _finished(_with(tokenizer, pre_tokenizer=pre_tokenizers.Whitespace()))
