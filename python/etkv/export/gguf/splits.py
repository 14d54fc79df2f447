# ruff: noqa: RUF001, SIM905 (the expressions name characters that look like others, and many of them)
"""The pre-tokenizers of GGUF files: regular expressions that split text before byte pairs are merged.

A file has only the name of a pre-tokenizer. The expressions come from the models' own ``tokenizer.json`` files. Each
expression splits the pieces that the previous expression left.
"""

from __future__ import annotations

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(contraction: str, number: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Return the expression that also splits words between a lowercase and an uppercase letter."""
    words = rf"{_START}{upper}*{lower}+{contraction}|{_START}{upper}+{lower}*{contraction}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_O200K = _cased(rf"{_CONTRACTION}?", r"\p{N}{1,3}")
_DEEPSEEK3_TAIL = rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_DEEPSEEK3 = rf"{_ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+{_DEEPSEEK3_TAIL}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_LETTERS = "".join(
    "-".join(rf"\x{{{end}}}" for end in part.split("-"))
    for part in (
        "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
        "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
        "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
        "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
        "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
        "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
        "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
        "1E900-1E943"
    ).split()
)
"""Code points of cased letters. They are numbers because Unicode normalization of this file would change some letters.
"""
_WITHOUT_HAN = ("[" + _UPPER + r"&&[^\p{Han}]]", "[" + _LOWER + r"&&[^\p{Han}]]")
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)


class Splits:
    """The expressions of a pre-tokenizer, in order, and other settings that its name implies.

    With ``whole_words``, a piece that is itself a token becomes this token without merges. With ``adds_bos``, texts
    begin with the BOS token by default.
    """

    def __init__(self, *expressions: str, whole_words: bool = False, adds_bos: bool = False) -> None:
        self.expressions, self.whole_words, self.adds_bos = expressions, whole_words, adds_bos


_BY_SPLITS: list[tuple[Splits, str]] = [
    (Splits(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), "default"),
    (
        Splits(_GPT2),
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
        "modern-bert mpt olmo jais trillion granite-docling exaone4",
    ),
    (Splits(r"\p{N}", _GPT2), "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (
        Splits(_LLAMA3, whole_words=True, adds_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (Splits(_LLAMA3), "dbrx smaug-bpe chatglm-bpe glm4"),
    (Splits(_LLAMA3, whole_words=True), "glm5"),
    (Splits(_QWEN2), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (
        Splits(
            rf"{_CONTRACTION}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
        ),
        "qwen35",
    ),
    (Splits(rf"{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"), "ufakzeka"),
    (Splits(_cased("", r"\p{N}"), whole_words=True, adds_bos=True), "tekken"),
    (Splits(_O200K), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (Splits(_O200K, whole_words=True), "granite-embed-multi-97m"),
    (Splits(r"\d{1,3}(?=(?:\d{3})*\b)", _O200K), "tiny_aya cohere2moe"),
    (Splits(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"), "falcon"),
    (Splits(_BLOOM), "poro-chat bloom gpt3-finnish"),
    (Splits(_BLOOM, r"\p{N}"), "viking"),
    (
        Splits(
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            "[一-龥\u0800-一가-\ud7ff]+",
            r"\p{N}+",
        ),
        "deepseek-llm",
    ),
    (Splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}"), "deepseek-coder"),
    (Splits(r"\p{N}{1,3}", _CJK, _DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (
        Splits(
            r"\p{N}{1,3}",
            _CJK,
            rf"{_ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        ),
        "spark2_5",
    ),
    (
        Splits(
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK,
            _cased(rf"{_CONTRACTION}?", r"\p{N}"),
            whole_words=True,
        ),
        "youtu",
    ),
    (Splits(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3), "afmoe"),
    (Splits(r"[^\n]+|[\n]+", _QWEN2), "laguna"),
    (Splits(r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|"), whole_words=True), "minicpm5"),
    (
        Splits(
            rf"{_CONTRACTION}|{_START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
        "exaone-moe",
    ),
    (
        Splits(rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (Splits(rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"), "seed-coder"),
    (
        Splits(
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
            + "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1))
            + r"\s{1,2}(?!\S)|\s{1}"
        ),
        "jais-2",
    ),
    (Splits(r"\p{N}+", r"(?=(\d{3})+(?!\d))"), "superbpe"),
    (
        Splits(
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
            adds_bos=True,
        ),
        "chameleon",
    ),
    (
        Splits(
            rf"[\p{{Han}}]+|{_START}{_WITHOUT_HAN[0]}*{_WITHOUT_HAN[1]}+{_CONTRACTION}?"
            rf"|{_START}{_WITHOUT_HAN[0]}+{_WITHOUT_HAN[1]}*{_CONTRACTION}?"
            rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
        ),
        "kimi-k2",
    ),
]

SPLITS = {name: splits for splits, names in _BY_SPLITS for name in names.split()}
"""llama.cpp's name of a pre-tokenizer for merges of bytes -> its :class:`Splits`."""

MERGES_CHARACTERS = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""llama.cpp's names of pre-tokenizers for merges of characters, although the kind of the vocabulary is byte pairs."""
