"""The ids that end an answer, and the exporter's copy of a model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, PreTrainedTokenizerFast

import etkv
import tokenizers_made
from etkv.export import companions, source
from tokenizers_made import BOS, EOS, TEXTS, UNK

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
ABSENT = object()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a model whose class has the default 1 for ``eos_token_id``."""
    folder = tmp_path_factory.mktemp("gemma")
    AutoModelForCausalLM.from_config(GemmaConfig(**SHAPE)).save_pretrained(folder)
    made = tokenizers_made.made()["byte-level: plain"]()
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=EOS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("of_generation", [ABSENT, None, 5, [5, 6]])
@pytest.mark.parametrize("of_config", [ABSENT, 7, [7, 8]])
def test_eos_token_ids_are_those_of_transformers_and_of_the_tokenizer(model, tmp_path, of_generation, of_config):
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    _set(config, of_config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"temperature": 0.5}
    _set(settings, of_generation)
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))

    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = hf.generation_config.eos_token_id
    if expected is None:
        # transformers would never stop. The exporter uses the id of the configuration, or the default of its class.
        expected = 1 if of_config is ABSENT else of_config
    expected = expected if isinstance(expected, list) else [expected]
    found = source.generation_settings(source.find(tmp_path), hf, tokenizer)
    assert found["eos_token_id"] == [*expected, tokenizer.eos_token_id]
    assert found["temperature"] == 0.5


def _set(settings: dict[str, Any], value: Any) -> None:
    settings.pop("eos_token_id", None)
    if value is not ABSENT:
        settings["eos_token_id"] = value


@pytest.mark.parametrize(
    ("made", "tokenizer_class"),
    [
        ("byte-fallback: Llama 2", "LlamaTokenizer"),
        ("byte-fallback: Gemma", "LlamaTokenizer"),
        ("byte-fallback: Gemma", "GemmaTokenizer"),
        ("byte-level: plain", "GPT2Tokenizer"),
        ("byte-level: truncation", "Qwen2Tokenizer"),
        ("byte-level: padding", "PreTrainedTokenizerFast"),
        ("unigram", "T5Tokenizer"),
        ("wordpiece", "BertTokenizer"),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [{}, {"add_bos_token": True}, {"add_prefix_space": True}, {"legacy": False}, {"split_special_tokens": True}],
)
def test_the_exported_tokenizer_reads_as_the_models_own(tmp_path, made, tokenizer_class, settings):
    """Some tokenizer classes of transformers differ from their tokenizer.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizers_made.made()[made]().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    hf = AutoTokenizer.from_pretrained(folder)
    companions.write(tmp_path / "program", hf, {"eos_token_id": [1]})
    exported = etkv.Tokenizer.from_pretrained(tmp_path / "program")
    assert exported.hf.special_tokens_map == hf.special_tokens_map
    for text in TEXTS:
        ids = list(hf(text, add_special_tokens=False).input_ids)
        assert exported.encode(text, add_special_tokens=False) == ids
        assert exported.decode(ids) == hf.decode(ids, skip_special_tokens=True)


def test_a_tokenizer_that_does_more_than_its_file_is_refused(tmp_path):
    class Reversed(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(text[::-1], *args, **kwargs)

    hf = Reversed(tokenizer_object=tokenizers_made.made()["byte-level: plain"]())
    with pytest.raises(
        etkv.EtkvError, match=r"the tokenizer \(Reversed\) cannot be written as tokenizer.json: the ids"
    ):
        companions.write(tmp_path, hf, {"eos_token_id": [1]})
