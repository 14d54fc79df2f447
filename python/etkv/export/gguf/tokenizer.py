"""The tokenizer of a GGUF file, built from its vocabulary, merges or scores, token types and flags."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError, first_line
from etkv.export.gguf import special_tokens
from etkv.export.gguf.file import GgufFile
from etkv.export.gguf.splits import MERGES_CHARACTERS, SPLITS

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""llama.cpp's types of tokens."""

_READ = frozenset(
    f"tokenizer.{name}"
    for name in (
        "chat_template",
        "chat_templates",
        "ggml.add_bos_token",
        "ggml.add_eos_token",
        "ggml.add_space_prefix",
        "ggml.bos_token_id",
        "ggml.eom_token_id",
        "ggml.eos_token_id",
        "ggml.eot_token_id",
        "ggml.merges",
        "ggml.model",
        "ggml.padding_token_id",
        "ggml.pre",
        "ggml.scores",
        "ggml.token_type",
        "ggml.tokens",
        "ggml.unknown_token_id",
    )
)
_WITHOUT_EFFECT = frozenset(
    # Ids of tokens for fill-in-the-middle and for encoders. A decoder's tokenizer does not use them.
    [
        f"tokenizer.ggml.{name}_token_id"
        for name in (
            *("cls", "mask", "seperator", "separator"),
            *("prefix", "suffix", "middle", "fsep"),
            *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
        )
    ]
    # The same tokenizer in another format.
    + ["tokenizer.huggingface.json"]
)
_ONLY = {
    "tokenizer.ggml.add_sep_token": False,
    "tokenizer.ggml.normalizer.lowercase": False,
    "tokenizer.ggml.normalizer.strip_accents": False,
    "tokenizer.ggml.remove_extra_whitespaces": False,
}
"""Key -> the only value that the exporter supports. Other values would change text or ids."""

_TEMPLATE = "tokenizer.chat_template"


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """Return the tokenizer of ``file`` with its chat templates.

    Raises :class:`EtkvError` for an unsupported kind of tokenizer, pre-tokenizer or key, and for a vocabulary that
    contradicts itself.
    """
    from transformers import PreTrainedTokenizerFast

    _check_keys(file)
    vocabulary = _Vocabulary(file)
    kind, pre = file.values.get("tokenizer.ggml.model"), file.values.get("tokenizer.ggml.pre")
    is_gemma4 = kind == "gemma4" or (kind == "gpt2" and pre == "gemma4")
    if is_gemma4 or (kind == "gpt2" and pre in MERGES_CHARACTERS):
        tokenizer, adds_bos = _characters(vocabulary), True
    elif kind == "gpt2":
        tokenizer, adds_bos = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise EtkvError(
            f"{file.path} has tokenizer.ggml.model = {kind!r}, but the exporter reads gpt2 (byte pairs), llama "
            "(SentencePiece) and gemma4; export the model's Hugging Face folder instead"
        )
    tokenizer.add_tokens(vocabulary.added())
    # In Gemma 4's files llama.cpp begins every text with BOS, whatever the key says: early files are wrong.
    _add_ends(tokenizer, vocabulary, is_gemma4 or vocabulary.flag("add_bos_token", adds_bos))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=vocabulary.special("bos"),
        eos_token=vocabulary.special("eos"),
        unk_token=vocabulary.special("unknown"),
        pad_token=vocabulary.special("padding"),
        chat_template=_chat_template(file),
        clean_up_tokenization_spaces=False,
    )


def _check_keys(file: GgufFile) -> None:
    for key, value in file.values.items():
        if not key.startswith("tokenizer.") or key in _READ or key in _WITHOUT_EFFECT:
            continue
        if key.startswith(f"{_TEMPLATE}.") or (key in _ONLY and value == _ONLY[key]):
            continue
        raise EtkvError(
            f"{file.path} has {key} = {str(value)[:40]}, which the exporter does not support in a decoder's tokenizer; "
            "export the model's Hugging Face folder instead"
        )


class _Vocabulary:
    """The tokens of a file by id, with their types, and the special tokens."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: list[str] = self.list_of("tokens", str) or []
        if not self.tokens:
            raise EtkvError(f"{file.path} has no vocabulary (tokenizer.ggml.tokens)")
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(self.tokens)]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            second, token = next(pair for pair in enumerate(self.tokens) if self.tokens.index(pair[1]) != pair[0])
            raise EtkvError(
                f"the vocabulary of {file.path} has token {token!r} twice, as {self.tokens.index(token)} and {second}"
            )
        self.types: list[int] = self.list_of("token_type", int) or [_NORMAL] * len(self.tokens)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape[0] < len(self.tokens):
            raise EtkvError(
                f"the vocabulary of {file.path} has {len(self.tokens)} tokens, but its embedding has "
                f"{embedding.shape[0]} rows"
            )

    def list_of(self, name: str, kind: type) -> list[Any] | None:
        """Return ``tokenizer.ggml.{name}``, one element for each token; ``None`` if it is absent."""
        key = f"tokenizer.ggml.{name}"
        values = self.file.values.get(key)
        if values is None:
            return None
        allowed = (int, float) if kind is float else kind
        if not isinstance(values, list) or not all(isinstance(value, allowed) for value in values):
            raise EtkvError(f"{self.file.path} has {key}, expected a list of {kind.__name__}")
        if name not in ("tokens", "merges") and len(values) != len(self.tokens):
            raise EtkvError(f"{self.file.path} has {key} of {len(values)} elements for {len(self.tokens)} tokens")
        return values

    def special(self, name: str) -> str | None:
        """Return the token with the id in ``tokenizer.ggml.{name}_token_id``, or ``None``."""
        index = special_tokens.token_id(self.file, name)
        return None if index is None else self.tokens[index]

    def flag(self, name: str, default: bool) -> bool:
        value = self.file.values.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise EtkvError(f"{self.file.path} has tokenizer.ggml.{name} = {value!r}, expected true or false")
        return value

    def added(self) -> list[AddedToken]:
        """Return the tokens that are matched before a text is split, in the order of their ids.

        Control tokens and tokens that end an answer are special: ``skip_special_tokens`` leaves them out.
        """
        from tokenizers import AddedToken

        ends = set(special_tokens.ends(self.file))
        # Phi-3's own tokenizer removes white space after these tokens. There is no key for it.
        strips = self.file.architecture == "phi3" and self.file.values.get("tokenizer.ggml.model") == "llama"
        return [
            AddedToken(
                token,
                special=kind != _USER_DEFINED or index in ends,
                normalized=False,
                rstrip=strips and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) or index in ends
        ]

    def merges(self) -> list[tuple[str, str]] | None:
        """Return the pairs to merge, in order; ``None`` if the file has no list of merges."""
        lines = self.list_of("merges", str)
        if lines is None:
            return None
        pairs = []
        for line in lines:
            # A token may begin with a space, but is never empty.
            at = line.find(" ", 1)
            left, right = line[:at], line[at + 1 :]
            if at < 1 or not all(token in self.ids for token in (left, right, left + right)):
                raise EtkvError(f"{self.file.path} has a merge of tokens that its vocabulary lacks: {line!r}")
            pairs.append((left, right))
        return pairs

    def merges_of_scores(self) -> list[tuple[str, str]]:
        """Return the pairs whose concatenation is a token, ordered by the token's score, the highest first.

        SentencePiece merges the neighbours whose token has the highest score. Equal scores are ordered by id.
        """
        scores = self.list_of("scores", float)
        if scores is None:
            raise EtkvError(f"{self.file.path} has neither tokenizer.ggml.scores nor tokenizer.ggml.merges")
        if not all(math.isfinite(score) for score in scores):
            raise EtkvError(f"{self.file.path} has a score in tokenizer.ggml.scores that is not a finite number")
        merges = []
        for index in sorted(range(len(self.tokens)), key=lambda index: (-scores[index], index)):
            token = self.tokens[index]
            if self.types[index] not in (_CONTROL, _UNKNOWN, _BYTE):
                cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
                merges += [(left, right) for left, right in cuts if left in self.ids and right in self.ids]
        return merges


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a tokenizer that merges bytes, and whether it begins texts with BOS by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    path = vocabulary.file.path
    name = vocabulary.file.values.get("tokenizer.ggml.pre")
    if name is None:
        raise EtkvError(
            f"{path} has no pre-tokenizer (tokenizer.ggml.pre); convert the model again, or "
            "export its Hugging Face folder"
        )
    splits = SPLITS.get(name)
    if splits is None:
        raise EtkvError(
            f"{path} has tokenizer.ggml.pre = {name!r}, a pre-tokenizer that the exporter cannot reproduce; export the "
            "model's Hugging Face folder instead"
        )
    if vocabulary.flag("add_space_prefix", False):
        raise EtkvError(
            f"{path} has tokenizer.ggml.add_space_prefix = True, but the exporter reads a tokenizer of byte pairs only "
            "without a space before texts; export the model's Hugging Face folder instead"
        )
    merges = vocabulary.merges()
    if merges is None:
        raise EtkvError(f"{path} lacks tokenizer.ggml.merges")
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=splits.whole_words))
    except Exception as error:
        raise EtkvError(f"the tokenizer of {path} cannot be built: {first_line(error)}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in splits.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splits.adds_bos


def _sentencepiece(vocabulary: _Vocabulary, prefix: bool | None = None) -> Tokenizer:
    """Return a tokenizer that merges characters, including spaces, and falls back to bytes.

    ``prefix`` is whether a text gets a leading space; ``None`` for the value in the file.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if prefix is None:
        prefix = vocabulary.flag("add_space_prefix", True)
    merges = vocabulary.merges()
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            vocabulary.merges_of_scores() if merges is None else merges,
            unk_token=vocabulary.special("unknown"),
            fuse_unk=True,
            byte_fallback="<0x00>" in vocabulary.ids,
        )
    )
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space] if prefix else [space])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _characters(vocabulary: _Vocabulary) -> Tokenizer:
    """Return a tokenizer that merges characters by the merges of the file, within lines and runs of line feeds."""
    from tokenizers import Regex, pre_tokenizers

    if vocabulary.list_of("merges", str) is None:
        raise EtkvError(f"{vocabulary.file.path} lacks tokenizer.ggml.merges")
    if vocabulary.flag("add_space_prefix", False):
        raise EtkvError(
            f"{vocabulary.file.path} has tokenizer.ggml.add_space_prefix = True, but the exporter reads its tokenizer "
            "only without a space before texts; export the model's Hugging Face folder instead"
        )
    tokenizer = _sentencepiece(vocabulary, prefix=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), behavior="isolated")
    return tokenizer


def _add_ends(tokenizer: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    """Let ``tokenizer`` add BOS before a text if ``adds_bos``, and EOS after the text if the file's key is true."""
    from tokenizers import processors

    adds = {"bos": adds_bos, "eos": vocabulary.flag("add_eos_token", False)}
    named = {name: vocabulary.special(name) for name, added in adds.items() if added}
    for name, token in named.items():
        if token is None:
            raise EtkvError(
                f"{vocabulary.file.path} adds {name.upper()} tokens to texts, but lacks tokenizer.ggml.{name}_token_id"
            )
    if not named:
        return
    template = [*([named["bos"]] if "bos" in named else []), "$A", *([named["eos"]] if "eos" in named else [])]
    pairs = {token: vocabulary.ids[token] for token in named.values() if token is not None}
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(pairs.items()))


def _chat_template(file: GgufFile) -> str | dict[str, str] | None:
    """Return the file's chat template, or a dict of named templates if it has several."""
    named = {
        key.removeprefix(f"{_TEMPLATE}."): value
        for key, value in file.values.items()
        if key.startswith(f"{_TEMPLATE}.") and isinstance(value, str)
    }
    default = file.values.get(_TEMPLATE)
    if not named:
        return default if isinstance(default, str) else None
    return ({"default": default} if isinstance(default, str) else {}) | named
