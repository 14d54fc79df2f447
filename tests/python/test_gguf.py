"""GGUF files: export, tokenizer, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest

import tiny_gguf
import tiny_models
from etkv import pte
from etkv.errors import EtkvError
from etkv.export import ExportRequest, export_program, source
from etkv.export.gguf import packed
from etkv.export.gguf.weights import read_weights


def test_export(tiny_llama_gguf, tmp_path):
    file = export_program(ExportRequest(tiny_llama_gguf, tmp_path / "model.pte", keep_hf=tmp_path / "hf"))
    methods = pte.constant_methods(file)
    assert methods["get_kv_heads"] == [2, 2]
    # "<|endoftext|>" always ends a text. In this vocabulary it is also the BOS token.
    assert methods["get_eos_ids"] == [tiny_models.EOS, tiny_models.BOS]
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": tiny_models.BOS, "eos_token_id": [tiny_models.EOS, tiny_models.BOS]}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0, "mlx-lm reads it at the top level"
    assert "quantization_config" not in config
    assert (tmp_path / "chat_template.jinja").is_file()


@pytest.mark.parametrize(("pre_tokenizer", "spaces"), [("smollm", 1), ("gpt-2", 2)])
def test_pre_tokenizer(tiny, tmp_path, pre_tokenizer, spaces):
    """SmolLM splits digits before white space. GPT-2 keeps one space with the digit."""
    file = tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", pre_tokenizer)
    tokens = source.read_tokenizer(source.find(file)).tokenize("a  5")
    assert tokens == ["a", *(["ĠĠ"] if spaces == 1 else ["Ġ", "Ġ"]), "5"]


def test_special_tokens_are_single(tiny_llama_gguf):
    tokenizer = source.read_tokenizer(source.find(tiny_llama_gguf))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True).input_ids
    start, end = tiny_models.IM_START, tiny_models.EOS
    assert ids == [start, *b"user\nhi", end, *b"\n", start, *b"assistant\n"]


def test_truncated_file(tiny_llama_gguf, tmp_path):
    for length in (200, 20):
        file = tmp_path / "short.gguf"
        file.write_bytes(tiny_llama_gguf.read_bytes()[:length])
        with pytest.raises(EtkvError, match=r"file .*short.gguf cannot be read as GGUF; is it whole\? "):
            export_program(ExportRequest(file, tmp_path / "model.pte"))


@pytest.fixture(scope="module")
def parts(tiny, tmp_path_factory):
    """Return the files of a model that is split into three."""
    file = tmp_path_factory.mktemp("parts") / "tiny.gguf"
    tiny_gguf.write(tiny("tiny-llama"), file, tensors_of_a_part=8)
    return sorted(file.parent.glob("*.gguf"))


def stored(file):
    origin = source.find(file)
    return read_weights(origin.opened, source.read_config(origin))


def weights(file):
    return {name: weight.read() for name, weight in stored(file).items()}


def test_parts_are_read_together(parts, tiny_llama_gguf):
    assert [file.name for file in parts] == [f"tiny-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert source.find(parts[0]).files() == parts
    whole, read = weights(tiny_llama_gguf), weights(parts[0])
    assert whole.keys() == read.keys()
    assert all(whole[name].equal(read[name]) for name in whole)


def test_single_parts_are_refused(parts, tmp_path):
    with pytest.raises(EtkvError, match="is part 2 of 3 of a split model; name its first part"):
        source.find(parts[1])
    first = Path(shutil.copy(parts[0], tmp_path))
    with pytest.raises(EtkvError, match=r"file .*tiny-00002-of-00003\.gguf cannot be read: No such file"):
        source.find(first)
    renamed = Path(shutil.copy(parts[0], tmp_path / "model.gguf"))
    with pytest.raises(
        EtkvError, match=r"one of 3 parts of a split model, .* or merge the parts with llama-gguf-split"
    ):
        source.read_config(source.find(renamed))


def test_parts_in_another_order_are_refused(parts, tmp_path):
    for file, name in zip(parts, (parts[0].name, parts[2].name, parts[1].name), strict=True):
        shutil.copy(file, tmp_path / name)
    with pytest.raises(EtkvError, match=r"tiny-00002-of-00003\.gguf contains part 3 of its model"):
        source.read_config(source.find(tmp_path / parts[0].name))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_integers_stand_for_the_weights(tiny, tiny_llama_gguf, tmp_path, kind):
    """Weights are close to their originals, in the formats that the gguf package can write. Integers and scales of a
    file decode to the same values, in transformers' order.
    """
    plain = weights(tiny_llama_gguf)
    for name, weight in stored(tiny_gguf.write(tiny("tiny-llama"), tmp_path / "x.gguf", quantize=kind)).items():
        groups, values = weight.groups(), weight.read()
        assert (plain[name] - values).abs().mean() < 0.12 * plain[name].abs().mean()
        assert plain[name].equal(values) == (values.ndim == 1)
        assert (groups is None) == (kind.endswith("F16") or values.ndim == 1), name
        if groups is not None:
            assert groups.values().equal(values), name
            assert groups.scales.shape[1] * 32 == values.shape[1]
            bits = int(kind[1])
            assert (groups.signed(bits) is None) == kind.endswith("_1")
            assert groups.signed(bits - 1) is None


@pytest.mark.parametrize("kind", ["MXFP4", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q8_0"])
def test_blocks_of_random_bytes(kind):
    size, _ = packed.FORMATS[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (5, 3 * size), dtype=np.uint8)
    # Clear bits in the upper bytes of scales, so that they are finite.
    blocks.reshape(5, 3, size)[..., 0 if kind == "MXFP4" else slice(1, 4, 2)] &= 0x3F
    expected = gguf_package.dequantize(blocks, gguf_package.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(packed.groups(blocks, kind).values().numpy(), expected)
