# ruff: noqa: RUF001, SIM905 (texts and expressions have characters that look like others)
"""Tokenizers of GGUF files return the same ids as a short tokenizer that follows llama.cpp's rules."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import pytest
import regex
from transformers import AutoTokenizer

import runner_tokenizer
import tiny_gguf
import tiny_models
from etkv.errors import EtkvError
from etkv.export import gguf, source
from etkv.export.gguf import special_tokens
from etkv.export.gguf import tokenizer as gguf_tokenizer
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
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe": [
        LLAMA3
    ],
    "glm4 glm5": [LLAMA3],
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
    # Groups of three digits, counted from the right.
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
    "glm5",
}


def pieces(text: str, expressions: list[str]) -> list[str]:
    """Split ``text`` by each expression in order: matches, and texts between matches, are pieces."""
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
    """Return for each byte the letter that stands for it."""
    vocabulary = tiny_models.tokenizer().backend_tokenizer.get_vocab()
    letters = {index: letter for letter, index in vocabulary.items() if index < 256}
    return [letters[byte] for byte in range(256)]


@pytest.fixture(scope="module")
def merges(alphabet) -> list[tuple[str, str]]:
    """Return pairs that were learned on unsplit texts, so that tokens cross all boundaries of pre-tokenizers."""
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
def file(tiny_llama_gguf) -> gguf.GgufFile:
    return source.find(tiny_llama_gguf).opened


def changed(file: gguf.GgufFile, **values) -> gguf.GgufFile:
    """Return ``file`` with other values of keys below ``tokenizer.ggml``. A leading dot stands for other keys."""
    other = copy.copy(file)
    named = {
        f"tokenizer{key}" if key.startswith(".") else f"tokenizer.ggml.{key}": value for key, value in values.items()
    }
    other.values = {key: value for key, value in (file.values | named).items() if value is not None}
    other.tensors = {}
    return other


runner = runner_tokenizer.runner


@pytest.mark.parametrize("name", NAMES)
def test_pre_tokenizer(file, alphabet, merges, runner, tmp_path, name):
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
    tokenizer.save_pretrained(tmp_path)
    runner.open(tmp_path)
    ids = {token: index for index, token in enumerate(tokens)}
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    for text in TEXTS:
        expected = []
        for piece in pieces(text, NAMES[name]):
            word = [alphabet[byte] for byte in piece.encode()]
            whole = name in WHOLE_WORDS and "".join(word) in ids
            expected += [ids[token] for token in (["".join(word)] if whole else byte_pairs(word, ranks))]
        assert tokenizer.encode(text) == expected, text
        assert runner.encode(text) == expected, text
        assert tokenizer.decode(expected) == text


def test_every_pre_tokenizer_is_tried():
    assert set(NAMES) == set(SPLITS)


@pytest.mark.parametrize("name", ["whitespace", "unheard-of", ""])
def test_other_pre_tokenizers_are_refused(file, name):
    with pytest.raises(EtkvError, match=rf"tokenizer\.ggml\.pre = '{name}', a pre-tokenizer that the exporter cannot"):
        gguf.read_tokenizer(changed(file, pre=name))


def test_a_file_has_to_name_its_pre_tokenizer(file):
    with pytest.raises(EtkvError, match="has no pre-tokenizer"):
        gguf.read_tokenizer(changed(file, pre=None))


def special(file: gguf.GgufFile, texts: dict[int, str], types: dict[int, int] | None = None, **values):
    """Return ``file`` with the texts and types of some tokens replaced."""
    tokens = list(file.values["tokenizer.ggml.tokens"])
    kinds = list(file.values["tokenizer.ggml.token_type"])
    for index, text in texts.items():
        tokens[index] = text
    for index, kind in (types or {}).items():
        kinds[index] = kind
    return changed(file, tokens=tokens, token_type=kinds, **values)


ENDS = (
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|endoftext|> <|end_of_text|> <end_of_turn> <EOT> "
    "_<EOT> [EOT] [EOS] </s> <eos> <end_of_utterance> <turn|> <｜end▁of▁sentence｜>"
).split()


@pytest.mark.parametrize("text", [*ENDS, "< EOT >"])
def test_tokens_that_end_a_turn_are_known_by_their_text(file, text):
    opened = special(file, {256: "<a>", 257: "<b>", 300: text}, eos_token_id=256)
    assert special_tokens.ids(opened)["eos_token_id"] == [256, 300]
    tokenizer = gguf.read_tokenizer(opened)
    assert tokenizer.encode(f"a{text}b") == [ord("a"), 300, ord("b")], "it is one token in a text"
    assert tokenizer.decode([ord("a"), 300], skip_special_tokens=True) == "a"


def test_tokens_that_end_a_turn_are_named_by_keys(file):
    opened = special(file, {256: "<a>", 257: "<b>"}, eos_token_id=256, eot_token_id=290, eom_token_id=291)
    assert special_tokens.ids(opened) == {"bos_token_id": 256, "eos_token_id": [256, 290, 291], "pad_token_id": None}


def test_a_message_of_harmony_is_not_the_answer(file):
    opened = special(file, {256: "<|end|>", 257: "<|return|>", 300: "<|call|>"}, eos_token_id=257)
    assert special_tokens.ids(opened)["eos_token_id"] == [257, 300]


def test_one_eos_token_is_not_a_list(file):
    assert special_tokens.ids(special(file, {256: "<a>"}))["eos_token_id"] == 257


@pytest.mark.parametrize("kind", [tiny_gguf.CONTROL, tiny_gguf.USER_DEFINED, tiny_gguf.NORMAL])
def test_token_types(file, kind):
    """Control and user-defined tokens are matched as whole tokens in a text. Answers omit only control tokens."""
    tokenizer = gguf.read_tokenizer(special(file, {300: "<th ink>"}, {300: kind}))
    found = kind != tiny_gguf.NORMAL
    assert tokenizer.encode("a<th ink>") == ([ord("a"), 300] if found else list(b"a<th ink>"))
    assert tokenizer.decode([ord("a"), 300], skip_special_tokens=True) == (
        "a" if kind == tiny_gguf.CONTROL else "a<th ink>"
    )


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, [97]),
        ("llama-bpe", {}, [256, 97]),
        ("tekken", {}, [256, 97]),
        ("llama-bpe", {"add_bos_token": False}, [97]),
        ("gpt-2", {"add_bos_token": True}, [256, 97]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [256, 97, 257]),
        ("gpt-2", {"add_eos_token": True}, [97, 257]),
    ],
)
def test_ends_of_a_text(file, tmp_path, pre, flags, expected):
    tokenizer = gguf.read_tokenizer(changed(file, pre=pre, **flags))
    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("a") == expected


@pytest.mark.parametrize("pre", ["llama-bpe", "chameleon"])
def test_bos_has_to_be_known(file, pre):
    with pytest.raises(EtkvError, match=r"adds BOS tokens to texts, but lacks tokenizer\.ggml\.bos_token_id"):
        gguf.read_tokenizer(changed(file, pre=pre, bos_token_id=None))


def test_templates(file, tmp_path):
    """A file may have several templates. transformers uses the tool template if a conversation has tools."""
    values = {".chat_template": "plain", ".chat_template.tool_use": "tools", ".chat_templates": ["tool_use"]}
    tokenizer = gguf.read_tokenizer(changed(file, **values))
    tokenizer.save_pretrained(tmp_path)
    conversation = [{"role": "user", "content": "hi"}]
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert one.chat_template == {"default": "plain", "tool_use": "tools"}
        assert one.apply_chat_template(conversation, tokenize=False) == "plain"
        assert one.apply_chat_template(conversation, tools=[{"name": "f"}], tokenize=False) == "tools"
    assert gguf.read_tokenizer(changed(file, **{".chat_template": None})).chat_template is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model = 'bert', but the exporter reads gpt2"),
        ({"model": "t5"}, "tokenizer.ggml.model = 't5'"),
        ({"model": "rwkv"}, "tokenizer.ggml.model = 'rwkv'"),
        ({"model": "plamo2"}, "tokenizer.ggml.model = 'plamo2'"),
        ({"model": "gemma4", "merges": None}, "lacks tokenizer.ggml.merges"),
        ({"model": "gemma4", "add_space_prefix": True}, "tokenizer.ggml.add_space_prefix = True"),
        ({"model": "none"}, "tokenizer.ggml.model = 'none'"),
        ({"model": None}, "tokenizer.ggml.model = None"),
        ({"tokens": None}, "has no vocabulary"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["Ġ zz"]}, "merge of tokens that its vocabulary lacks: 'Ġ zz'"),
        ({"merges": ["ĠĠ"]}, "merge of tokens that its vocabulary lacks: 'ĠĠ'"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type of 2 elements for 320 tokens"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token = 1, expected true or false"),
        ({"add_space_prefix": True}, "tokenizer.ggml.add_space_prefix = True, but the exporter reads"),
        ({"padding_token_id": -1}, "tokenizer.ggml.padding_token_id = -1, but its vocabulary has 320 tokens"),
        ({"precompiled_charsmap": [1]}, "tokenizer.ggml.precompiled_charsmap = "),
        ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces = True"),
        ({"normalizer.lowercase": True}, "tokenizer.ggml.normalizer.lowercase = True"),
        ({"add_sep_token": True}, "tokenizer.ggml.add_sep_token = True"),
        ({"suppress_tokens": [1]}, "tokenizer.ggml.suppress_tokens = "),
        ({"mystery": 1}, "tokenizer.ggml.mystery = 1, which the exporter does not support"),
        ({".rwkv.world": "x"}, "tokenizer.rwkv.world = x, which the exporter does not support"),
    ],
)
def test_tokenizers_that_cannot_be_reproduced_are_refused(file, values, said):
    with pytest.raises(EtkvError, match=regex.escape(said)):
        gguf.read_tokenizer(changed(file, **values))


def test_tokens_are_unique(file):
    with pytest.raises(EtkvError, match="has token '<b>' twice, as 299 and 300"):
        gguf.read_tokenizer(special(file, {299: "<b>", 300: "<b>"}))


def test_a_vocabulary_fits_the_embedding(file):
    opened = copy.copy(file)
    opened.values = file.values | {
        f"tokenizer.ggml.{key}": [*file.values[f"tokenizer.ggml.{key}"], more]
        for key, more in (("tokens", "<one more>"), ("token_type", 1))
    }
    with pytest.raises(EtkvError, match="has 321 tokens, but its embedding has 320 rows"):
        gguf.read_tokenizer(opened)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def pieced(request, file, tmp_path_factory):
    """Return a SentencePiece model and its GGUF file, with or without a space before each text."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    (folder / "texts.txt").write_text("\n".join(text.replace("\n", " ") for text in TEXTS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "texts.txt"),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<mark>"],
        control_symbols=["<|user|>"],
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    count = pieces.get_piece_size()

    def kind(index: int) -> int:
        if pieces.is_byte(index):
            return tiny_gguf.BYTE
        if pieces.is_unknown(index):
            return tiny_gguf.UNKNOWN
        if pieces.is_control(index):
            return tiny_gguf.CONTROL
        return tiny_gguf.USER_DEFINED if pieces.id_to_piece(index) == "<mark>" else tiny_gguf.NORMAL

    opened = changed(
        file,
        model="llama",
        pre="default",
        tokens=[pieces.id_to_piece(index) for index in range(count)],
        scores=[pieces.get_score(index) for index in range(count)],
        token_type=[kind(index) for index in range(count)],
        merges=None,
        bos_token_id=None,
        eos_token_id=None,
        add_space_prefix=None if request.param else False,
    )
    return pieces, opened


def test_sentencepiece(pieced, runner, tmp_path):
    pieces, opened = pieced
    tokenizer = gguf.read_tokenizer(opened)
    tokenizer.save_pretrained(tmp_path)
    runner.open(tmp_path)
    assert [runner.encode(text) for text in TEXTS] == [[1, *pieces.encode(text)] for text in TEXTS]
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        for text in TEXTS:
            expected = pieces.encode(text)
            assert one.encode(text) == [1, *expected], text
            assert one.decode(expected) == text


def test_special_tokens_of_sentencepiece(pieced):
    """The text after a special token is encoded like the beginning of a text."""
    pieces, opened = pieced
    tokenizer = gguf.read_tokenizer(opened)
    user, mark = pieces.piece_to_id("<|user|>"), pieces.piece_to_id("<mark>")
    for first, second in (("don't", "new lines"), ("x", " y"), ("", "x")):
        expected = [user, *pieces.encode(first), mark, *pieces.encode(second), 2]
        assert tokenizer.encode(f"<|user|>{first}<mark>{second}</s>", add_special_tokens=False) == expected
    assert tokenizer.decode([user, *pieces.encode("don't"), 2], skip_special_tokens=True) == "don't"


def test_phi_3_drops_white_space_after_its_tokens(pieced):
    pieces, opened = pieced
    phi = copy.copy(opened)
    phi.values = opened.values | {"general.architecture": "phi3"}
    user = pieces.piece_to_id("<|user|>")
    ids = gguf.read_tokenizer(phi).encode("<|user|>\n x<s> x", add_special_tokens=False)
    assert ids == [user, *pieces.encode("x"), 1, *pieces.encode(" x")]


def test_merges_of_a_sentencepiece_file_go_before_its_scores(pieced):
    """Files that were converted from a tokenizer.json have merges, and meaningless scores."""
    pieces, opened = pieced
    merges = [" ".join(pair) for pair in gguf_tokenizer._Vocabulary(opened).merges_of_scores()]
    other = changed(opened, merges=merges, scores=[-1000.0] * pieces.get_piece_size())
    assert gguf.read_tokenizer(other).encode(TEXTS[1]) == gguf.read_tokenizer(opened).encode(TEXTS[1])


@pytest.mark.parametrize("pieced", [False], indirect=True, ids=["no-prefix"])
@pytest.mark.parametrize(
    ("model", "pre", "adds_bos"),
    [("gemma4", None, None), ("gpt2", "sarvam-moe", None), ("gpt2", "gemma4", True), ("gemma4", None, False)],
)
def test_merges_of_characters(pieced, runner, tmp_path, model, pre, adds_bos):
    """Characters are merged within a line, and line feeds with each other. A text begins with BOS."""
    pieces, opened = pieced
    merges = [" ".join(pair) for pair in gguf_tokenizer._Vocabulary(opened).merges_of_scores()]
    named = {"model": model, "pre": pre, "merges": merges, "scores": None, "bos_token_id": 1, "unknown_token_id": 0}
    named["add_bos_token"] = adds_bos
    tokenizer = gguf.read_tokenizer(changed(opened, **named))
    tokenizer.save_pretrained(tmp_path)
    runner.open(tmp_path)
    for text in TEXTS:
        parts = regex.findall(r"[^\n]+|\n+", text)
        expected = [1, *itertools.chain.from_iterable(pieces.encode(part) for part in parts)]
        assert tokenizer.encode(text) == expected, text
        assert runner.encode(text) == expected, text
        assert tokenizer.decode(expected[1:]) == text


@pytest.mark.parametrize("scores", [None, [float("nan")] * 700])
def test_sentencepiece_needs_scores(pieced, scores):
    with pytest.raises(EtkvError, match=r"tokenizer\.ggml\.scores"):
        gguf.read_tokenizer(changed(pieced[1], scores=scores))
