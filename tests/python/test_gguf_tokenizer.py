# ruff: noqa: RUF001 (texts and expressions have characters that look like others)
"""Tokenizers of GGUF files, id by id against a tokenizer of a few lines that follows llama.cpp's words."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import pytest
import regex

import tiny_gguf
import tiny_models
from etkv.errors import EtkvError
from etkv.export import gguf, source
from etkv.export.gguf.splits import SPLITS

TEXTS = [
    "x  2024",
    "don't DON'T I'LL we've it's THEY'RE 'd 'M o'clock l'été",
    "  leading, trailing  ",
    "tabs\t\tand\n\n new lines \r\n\r\n end\n",
    " \n \n  \n",
    "\n\n\n",
    "a\n5\n\n7  8\t9",
    "1234567890 12 345 6 78901 1,234.56",
    "a1b22c333d4444 v2.0.1",
    "CamelCaseXMLHttpRequest aBcD ABCdef Éa éA",
    "__init__ foo_bar $x = {'a': [1, 2]}; // note",
    "!!?...(){}[]<>^~|` $100 + 5% = #1 @me",
    "http://example.com/a/b?c=d&e#f",
    "Ünïcödé façade ÀÉÎ straße Ωμέγα Привет",
    "日本語テキスト漢字かな 中文，标点。 한국어 텍스트 ㄅㄆ",
    "e\u0301 n\u0303 हिन्दी विविध ไทยภาษา עברית عربى ١٢٣ ۱۲",
    "½ ² Ⅷ ①② ǅ ʰ",
    "emoji 😀👍🏽 👩‍👩‍👧 ™ ©",
    "\u00a0nbsp\u3000ideographic\u2003em \u200bzero",
    "      six spaces" + " " * 40 + "forty",
    "<sentinel:12> IMGIMGABCZ",
    "word " * 3 + "\n\tword",
]

C = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACE
QWEN2 = C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACE
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HEAD = r"[^\r\n\p{L}\p{N}]?"
O200K = f"{HEAD}{UP}*{LOW}+{C}?|{HEAD}{UP}+{LOW}*{C}?" + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACE
TEKKEN = f"{HEAD}{UP}*{LOW}+|{HEAD}{UP}+{LOW}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACE
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
ASCII = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
DEEPSEEK3 = ASCII + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACE
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
HAN_FREE = [f"(?:(?!\\p{{Han}}){case})" for case in (UP, LOW)]

EXPRESSIONS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "modern-bert mpt olmo jais trillion granite-docling exaone4": [GPT2],
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": [r"\p{N}", GPT2],
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4": [
        LLAMA3
    ],
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": [QWEN2],
    "qwen35": [C + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACE],
    "ufakzeka": [r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACE],
    "tekken": [TEKKEN],
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": [O200K],
    "tiny_aya cohere2moe": [r"\d{1,3}(?=(?:\d{3})*\b)", O200K],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "poro-chat bloom gpt3-finnish": [BLOOM],
    "viking": [BLOOM, r"\p{N}"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"],
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": [r"\p{N}{1,3}", CJK, DEEPSEEK3],
    "spark2_5": [
        r"\p{N}{1,3}",
        CJK,
        ASCII + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ],
    "youtu": [
        "[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + CJK,
        O200K.replace(r"|\p{N}{1,3}|", r"|\p{N}|"),
    ],
    "laguna": [r"[^\n]+|[\n]+", QWEN2],
    "minicpm5": [r"\p{N}{1,3}", C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACE],
    "exaone-moe": [
        C + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "bailingmoe bailingmoe2 llada-moe": [
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "seed-coder": [C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + SPACE],
    "jais-2": [
        C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)"
        r"|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "chameleon": [
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        "([\\t\\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ],
    "kimi-k2": [
        rf"\p{{Han}}+|{HEAD}{HAN_FREE[0]}*{HAN_FREE[1]}+{C}?|{HEAD}{HAN_FREE[0]}+{HAN_FREE[1]}*{C}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACE
    ],
    "deepseek-llm": [
        r"[\r\n]",
        r"\s?(?:(?!\p{M})\p{LC})+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ],
    # Digits from the right in threes.
    "afmoe": [
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
        "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        DEEPSEEK3,
    ],
}
NAMES = {name: expressions for names, expressions in EXPRESSIONS.items() for name in names.split()}
WHOLE_WORDS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "youtu", "minicpm5", "granite-embed-multi-97m"),
}


def pieces(text: str, expressions: list[str]) -> list[str]:
    """Split ``text`` by each expression in turn: what it finds and what lies between are pieces."""
    parts = [text]
    for expression in expressions:
        found = []
        for part in parts:
            at = 0
            for match in regex.finditer(expression, part):
                found += [part[at : match.start()], match.group()]
                at = match.end()
            found.append(part[at:])
        parts = [part for part in found if part]
    return parts


@pytest.fixture(scope="module")
def alphabet() -> list[str]:
    """The letters that stand for bytes, by byte."""
    vocabulary = tiny_models.tokenizer().backend_tokenizer.get_vocab()
    letters = {index: letter for letter, index in vocabulary.items() if index < 256}
    return [letters[byte] for byte in range(256)]


@pytest.fixture(scope="module")
def merges(alphabet) -> list[tuple[str, str]]:
    """Pairs learned on whole texts, so that tokens cross every boundary that a pre-tokenizer might draw."""
    texts = [[alphabet[byte] for byte in text.encode()] for text in TEXTS]
    learned = []
    while pairs := Counter(pair for text in texts for pair in itertools.pairwise(text)):
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        learned.append(best)
        texts = [merged(text, best) for text in texts]
    return learned


def merged(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    at = 0
    while at < len(symbols):
        if tuple(symbols[at : at + 2]) == pair:
            out.append(symbols[at] + symbols[at + 1])
            at += 2
        else:
            out.append(symbols[at])
            at += 1
    return out


def byte_pairs(word: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    while True:
        known = [pair for pair in itertools.pairwise(word) if pair in ranks]
        if not known:
            return word
        word = merged(word, min(known, key=ranks.__getitem__))


@pytest.fixture(scope="module")
def file(tiny, tmp_path_factory) -> gguf.GgufFile:
    path = tiny_gguf.write(tiny("tiny-llama"), tmp_path_factory.mktemp("gguf") / "x.gguf")
    return source.find(path).opened


def changed(file: gguf.GgufFile, **values) -> gguf.GgufFile:
    """Return ``file`` with other values of keys below ``tokenizer.ggml``; of other keys if they begin with a dot."""
    other = copy.copy(file)
    named = {
        f"tokenizer{key}" if key.startswith(".") else f"tokenizer.ggml.{key}": value for key, value in values.items()
    }
    other.values = {key: value for key, value in (file.values | named).items() if value is not None}
    other.tensors = {}
    return other


@pytest.mark.parametrize("name", NAMES)
def test_pre_tokenizer(file, alphabet, merges, name):
    tokens = list(dict.fromkeys([*alphabet, *(left + right for left, right in merges), "<s>"]))
    opened = changed(
        file,
        pre=name,
        tokens=tokens,
        token_type=[tiny_gguf.NORMAL] * (len(tokens) - 1) + [tiny_gguf.CONTROL],
        merges=[" ".join(pair) for pair in merges],
        bos_token_id=len(tokens) - 1,
        eos_token_id=None,
        add_bos_token=False,
    )
    tokenizer = gguf.read_tokenizer(opened)
    ids = {token: index for index, token in enumerate(tokens)}
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    for text in TEXTS:
        expected = []
        for piece in pieces(text, NAMES[name]):
            word = [alphabet[byte] for byte in piece.encode()]
            whole = name in WHOLE_WORDS and "".join(word) in ids
            expected += [ids[token] for token in (["".join(word)] if whole else byte_pairs(word, ranks))]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text


def test_every_pre_tokenizer_is_tried():
    assert set(NAMES) == set(SPLITS)


@pytest.mark.parametrize("name", ["gemma4", "sarvam-moe", "whitespace", "granite-embed-multi-311m", "unheard-of", ""])
def test_other_pre_tokenizers_are_refused(file, name):
    with pytest.raises(EtkvError, match=rf"tokenizer\.ggml\.pre = '{name}', a pre-tokenizer that the exporter cannot"):
        gguf.read_tokenizer(changed(file, pre=name))


def test_a_file_has_to_name_its_pre_tokenizer(file):
    with pytest.raises(EtkvError, match="does not say how its tokenizer splits text"):
        gguf.read_tokenizer(changed(file, pre=None))
