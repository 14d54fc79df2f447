"""GGUF files: export, tokenizer, and errors."""

from __future__ import annotations

import json

import pytest

import tiny_gguf
import tiny_models
from etkv import pte
from etkv.errors import EtkvError
from etkv.export import ExportRequest, export_program, source


def test_export(tiny_llama_gguf, tmp_path):
    file = export_program(ExportRequest(tiny_llama_gguf, tmp_path / "model.pte", keep_hf=tmp_path / "hf"))
    methods = pte.constant_methods(file)
    assert methods["get_kv_heads"] == [2, 2]
    assert methods["get_eos_ids"] == [tiny_models.EOS]
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": tiny_models.BOS, "eos_token_id": [tiny_models.EOS]}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0, "mlx-lm reads it at the top level"
    assert "quantization_config" not in config
    assert (tmp_path / "chat_template.jinja").is_file()


@pytest.mark.parametrize(("pre_tokenizer", "spaces"), [("smollm", 1), ("gpt-2", 2)])
def test_pre_tokenizer(tiny, tmp_path, pre_tokenizer, spaces):
    """SmolLM separates digits before it looks at white space, GPT-2 leaves one space with the digit."""
    file = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", pre_tokenizer)
    tokens = source.read_tokenizer(source.find(file)).tokenize("a  5")
    assert tokens == ["a", *(["ĠĠ"] if spaces == 1 else ["Ġ", "Ġ"]), "5"]


def test_special_tokens_are_single(tiny_llama_gguf):
    tokenizer = source.read_tokenizer(source.find(tiny_llama_gguf))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True).input_ids
    start, end = tiny_models.IM_START, tiny_models.EOS
    assert ids == [start, *b"user\nhi", end, *b"\n", start, *b"assistant\n"]


def test_truncated_file(tiny_llama_gguf, tmp_path):
    file = tmp_path / "short.gguf"
    file.write_bytes(tiny_llama_gguf.read_bytes()[:200])
    with pytest.raises(EtkvError, match=r"the configuration of .* cannot be read"):
        export_program(ExportRequest(file, tmp_path / "model.pte"))
