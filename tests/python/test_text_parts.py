"""From models for text and images, the causal language model is exported. Its logits equal those of the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import read_models
import tiny_families
import tiny_models
from etkv.errors import EtkvError
from etkv.export import ExportRequest, export_program, text_part
from reference import EVERYTHING

IDS = [(number * 37 + 11) % 250 for number in range(40)]

LONG = [
    *("aria", "cohere_compass", "deepseek_vl", "exaone4_5", "fast_vlm", "idefics3", "internvl", "janus", "lfm2_vl"),
    *("llava", "llava_onevision", "qwen3_5_moe", "smolvlm", "qwen4_exp"),
]
FAMILIES = ["mistral3", "gemma3", "qwen3_5", "gemma4", *(LONG if EVERYTHING else ())]


def _write(family: str, folder: Path, **changes) -> torch.nn.Module:
    """Write a tiny model of ``family``, and return the whole model."""
    config = tiny_families.whole(family, **changes)
    torch.manual_seed(0)
    model = text_part.whole_class(config)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return model


def _logits(model) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_part_has_the_logits_of_the_whole(family, tmp_path):
    whole = _write(family, tmp_path)
    part = read_models.plain(tmp_path)
    assert part.config.model_type == whole.config.text_config.model_type
    torch.testing.assert_close(_logits(part), _logits(whole), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_tied_as_those_of_the_whole(tied, tmp_path):
    """The setting of the text configuration has no effect."""
    _write("mistral3", tmp_path, tie_word_embeddings=tied)
    part = read_models.plain(tmp_path)
    assert (part.lm_head.weight is part.get_input_embeddings().weight) == tied
    assert part.config.tie_word_embeddings == tied


def test_both_names_of_weights(tmp_path):
    """Published folders have the old names, and transformers' modules the new names."""
    from safetensors.torch import load_file, save_file

    expected = _logits(_write("mistral3", tmp_path, tie_word_embeddings=False))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert "language_model.model.norm.weight" in weights
    torch.testing.assert_close(_logits(read_models.plain(tmp_path)), expected, rtol=1e-4, atol=1e-4)
    new = {}
    for name, weight in weights.items():
        of_text = name.removeprefix("language_model.")
        if of_text == name:
            new[f"model.{name}"] = weight
        else:
            new[of_text.replace("model.", "model.language_model.", 1)] = weight
    assert {"model.language_model.norm.weight", "lm_head.weight"} < set(new)
    save_file(new, file, {"format": "pt"})
    torch.testing.assert_close(_logits(read_models.plain(tmp_path)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "backend"), [("mistral3", "mlx"), *([("gemma3", "cpu")] if EVERYTHING else [])])
def test_a_program_of_the_text_part(family, backend, tmp_path):
    whole = _write(family, tmp_path / "model")
    (tmp_path / "out").mkdir()
    request = ExportRequest(
        tmp_path / "model", tmp_path / "out/model.pte", backend=backend, prefill_chunk=16, verify=True
    )
    program = export_program(request)
    import etkv

    facts = etkv.read_kv_cache_metadata(program)
    with (
        etkv.DecodeSession(etkv.CacheConfig(facts.layers, 64), backend=facts.backend) as session,
        etkv.load(program, session) as loaded,
    ):
        rows = torch.cat(
            [loaded.forward(torch.tensor(IDS[at : at + 8]), range(at, at + 8)).clone() for at in (0, 8, 16)]
        )
    torch.testing.assert_close(rows.float(), _logits(whole)[0, :24], rtol=1e-3, atol=1e-3)


def test_a_whole_that_answers_otherwise_than_its_part(tmp_path):
    """transformers scales the logits of Cohere 2, but not those of the image model that contains it."""
    _write("aya_vision", tmp_path)
    with pytest.raises(
        EtkvError, match=r"^model family 'aya_vision' and its text part, .* return different logits for a text"
    ):
        read_models.plain(tmp_path)


def test_a_part_that_is_no_decoder_alone(tmp_path):
    _write("florence2", tmp_path)
    with pytest.raises(EtkvError, match=r"^model family 'florence2'"):
        read_models.plain(tmp_path)


def test_a_family_without_a_class_for_the_whole(tmp_path):
    config = tiny_families.whole("mistral3")
    config.architectures = ["Unknown"]
    assert text_part.whole_class(config).__name__ == "Mistral3ForConditionalGeneration"
    assert json.loads(config.to_json_string())["model_type"] == "mistral3"
    assert text_part.config(config) is config.text_config
    llama = tiny_families.config("llama")
    assert text_part.config(llama) is llama
