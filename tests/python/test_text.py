"""Text to ids and back: Python, the runners and transformers agree, and a streaming detokenizer never fails."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FileTokenizer
from transformers import PreTrainedTokenizerFast

import etkv
import runner_tokenizer
import tokenizers_made
from tokenizers_made import BOS, CALL, EOS, TEXTS, UNK

MADE = tokenizers_made.made()
EACH = pytest.mark.parametrize("name", MADE)
BYTES = "🙂é日\u0301 "
"""Characters of two to four bytes."""


runner = runner_tokenizer.runner


def written(name: str, folder: Path, **settings: object) -> PreTrainedTokenizerFast:
    """Write a tokenizer to ``folder``, with ``settings`` in its tokenizer_config.json."""
    made = MADE[name]()
    hf = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=EOS, unk_token=UNK, **settings)
    hf.save_pretrained(folder)
    return hf


def sequences(tokenizer: etkv.Tokenizer, size: int) -> Iterator[list[int]]:
    """Yield sequences of ids: random ids, texts without some ids, and parts of characters."""
    rng = random.Random(7)
    cut = tokenizer.encode(BYTES, add_special_tokens=False)
    for n in range(24):
        if n % 3 == 0:
            yield [rng.randrange(size + 2) for _ in range(30)]
        elif n % 3 == 1 and cut:
            yield [rng.choice([*cut, rng.randrange(size)]) for _ in range(30)]
        else:
            ids = tokenizer.encode(f"{rng.choice(TEXTS)}{BYTES}{rng.choice(TEXTS)}")
            yield [token for token in ids if rng.random() < 0.8]


def pieces(tokenizer: etkv.Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = etkv.StreamingDetokenizer(tokenizer, skip_special_tokens=skip)
    made = []
    for token in ids:
        detokenizer.add_token(token)
        made.append(detokenizer.last_segment)
    detokenizer.finalize()
    assert detokenizer.tokens == ids
    return [*made, detokenizer.last_segment]


@EACH
def test_both_sides_agree_with_transformers(name, runner, tmp_path):
    """All agree on the text of all ids, and on the ids of every text. As the only exception, etkv does not add a second
    BOS.
    """
    hf = written(name, tmp_path)
    tokenizer = etkv.Tokenizer.from_pretrained(tmp_path)
    runner.open(tmp_path)
    for text in TEXTS:
        plain = list(hf(text, add_special_tokens=False).input_ids)
        special = list(hf(text).input_ids)
        if special != plain and special[:2] == 2 * [hf.bos_token_id]:
            del special[0]
        for ids, add_special_tokens in ((plain, False), (special, True)):
            assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == ids, text
            assert runner.encode(text, add_special_tokens) == ids, text
    for ids in sequences(tokenizer, len(hf)):
        for skip in (True, False):
            made = pieces(tokenizer, ids, skip)
            assert "".join(made) == tokenizer.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip), ids
            assert runner.pieces(ids, skip) == made, ids


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("byte-level: plain", {"split_special_tokens": True}),
        ("unigram", {"clean_up_tokenization_spaces": True}),
        ("wordpiece, no cleanup, BERT's special tokens", {"clean_up_tokenization_spaces": True}),
        ("word level, no decoder", {"clean_up_tokenization_spaces": True}),
        ("byte-level: plain", {"clean_up_tokenization_spaces": True}),
        (
            "byte-level: plain",
            {
                "clean_up_tokenization_spaces": True,
                "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
            },
        ),
    ],
)
def test_settings_of_the_config_apply_on_both_sides(name, settings, runner, tmp_path):
    hf = written(name, tmp_path, **settings)
    tokenizer = etkv.Tokenizer.from_pretrained(tmp_path)
    runner.open(tmp_path)
    for text in (*TEXTS, "the cat sat , on x . x 's n't ' x ?"):
        ids = list(hf(text, add_special_tokens=False).input_ids)
        assert tokenizer.encode(text, add_special_tokens=False) == runner.encode(text, False) == ids
        assert tokenizer.decode(ids) == hf.decode(ids, skip_special_tokens=True)
        assert "".join(runner.pieces(ids)) == "".join(pieces(tokenizer, ids, True))


def test_a_second_bos_is_omitted_and_logged(tmp_path, caplog):
    hf = written("byte-level: plain", tmp_path)
    tokenizer = etkv.Tokenizer.from_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "etkv"):
        assert tokenizer.encode(f"{BOS}a") == tokenizer.encode("a")
        assert "begins with <s>" in caplog.text
        assert tokenizer.encode(f"{BOS}{BOS}a") == [hf.bos_token_id, *tokenizer.encode("a")]


@EACH
def test_each_part_of_the_file_is_read(name, tmp_path):
    written(name, tmp_path)
    told, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    # transformers adds the padding token, which is not in tokenizer.json.
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token": "<another>"}))
    in_file = FileTokenizer.from_file(str(told))
    in_file.no_truncation()
    in_file.no_padding()
    for tokenizer in (etkv.Tokenizer.from_pretrained(tmp_path), etkv.Tokenizer.from_file(told)):
        assert tokenizer._backend._tokenizer.to_str() == in_file.to_str()


def test_a_wrapped_tokenizer_is_not_changed(tmp_path):
    hf = written("byte-level: truncation", tmp_path)
    hf.backend_tokenizer.enable_truncation(max_length=3)
    assert len(etkv.Tokenizer(hf).encode("the cat sat on the mat")) > 3
    assert hf.backend_tokenizer.truncation["max_length"] == 3


@pytest.mark.parametrize("token", [-1, 2**32, 2**70, "a", None, 1.5])
def test_values_that_are_not_ids_are_refused(token, tokenizer):
    detokenizer = tokenizer.detokenizer
    with pytest.raises(etkv.EtkvError, match="expected an id from 0 to 4294967295"):
        detokenizer.add_token(token)
    with pytest.raises(etkv.EtkvError, match="expected an id from 0 to 4294967295"):
        tokenizer.decode([token])
    # The answer continues after the error.
    detokenizer.add_token(ord("a"))
    assert detokenizer.tokens == [ord("a")]


def test_values_that_are_not_texts_are_refused(tokenizer):
    for text in ("\ud800", None, 3):
        with pytest.raises(etkv.EtkvError, match="the text"):
            tokenizer.encode(text)


def test_a_defect_of_the_library_is_an_etkv_error(tokenizer, monkeypatch):
    class PanicException(BaseException):
        """A stand-in for the exception of a Rust panic."""

    class Broken:
        def decode(self, *_: object, **__: object) -> str:
            raise PanicException("index out of bounds")

        def id_to_token(self, token: int) -> str:
            return "x"

    monkeypatch.setattr(tokenizer._backend, "_tokenizer", Broken())
    with pytest.raises(etkv.EtkvError, match="cannot be decoded: index out of bounds"):
        tokenizer.detokenizer.add_token(1)


def test_text_that_contradicts_earlier_output_is_not_lost(tmp_path):
    """Some decoders change earlier text. Text that was returned stays, and the rest follows."""
    from tokenizers import Regex, decoders

    made = MADE["byte-level: plain"]()
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex("^the"), "THE"), decoders.Fuse()])
    tokenizer = etkv.Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made))
    ids = tokenizer.encode("t" + "h" * 3 + "e cat" * 40, add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids, True)).endswith("cat")


def test_eos_token_ids_of_both_sides(runner, tmp_path):
    hf = written("byte-level: plain", tmp_path)
    assert etkv.Tokenizer.from_pretrained(tmp_path).eos_token_ids == {hf.eos_token_id}
    for told, expected in ((None, [hf.eos_token_id]), (7, [7]), ([5, 6], [5, 6]), ([], [])):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
        runner.open(tmp_path)
        assert runner.eos_token_ids() == expected
        assert etkv.Tokenizer.from_pretrained(tmp_path).eos_token_ids == set(expected)
    for wrong in ("x", [1, -2], 1.5):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        for read in (runner.open, etkv.Tokenizer.from_pretrained):
            with pytest.raises(etkv.EtkvError, match="expected an id or a list of ids"):
                read(tmp_path)
    for damaged in ("[]", "{"):
        (tmp_path / "generation_config.json").write_text(damaged)
        with pytest.raises(etkv.EtkvError, match=r"generation_config\.json"):
            etkv.Tokenizer.from_pretrained(tmp_path)


def test_an_answer_keeps_its_ids(tmp_path):
    """An answer keeps the model's ids even if the tokenizer encodes its text to other ids, unless the template changes
    the text.
    """
    hf = written("byte-fallback: Llama 2", tmp_path)
    hf.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content.split('</think>')[-1].strip() }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    tokenizer = etkv.Tokenizer(hf)
    call = hf.convert_tokens_to_ids(CALL)
    answer = [call, hf.convert_tokens_to_ids("t"), hf.convert_tokens_to_ids("h")]
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": tokenizer.decode(answer)},
        {"role": "user", "content": "x"},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert answer != tokenizer.encode(messages[1]["content"], add_special_tokens=False)
    assert tokenizer.conversation_ids(messages, {}) == whole
    ids = tokenizer.conversation_ids(messages, {1: answer})
    before = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)
    assert ids[: len(before) + len(answer)] == [*before, *answer]
    assert tokenizer.decode(ids, skip_special_tokens=False).count(CALL) == 1
    messages[1]["content"] = "<think>hm</think>the"
    assert tokenizer.conversation_ids(messages, {1: answer}) == tokenizer.conversation_ids(messages, {})
