"""Weights that the program would not use are refused by name. Weights without effect are ignored."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import read_models
from etkv.errors import EtkvError
from etkv.export.published import REMEDY


@pytest.fixture
def folder(tiny, tmp_path):
    return shutil.copytree(tiny("tiny-llama"), tmp_path / "model")


def _add(folder, **added: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name.replace("__", "."): x for name, x in added.items()}}, file, {"format": "pt"})


def _error(folder) -> str:
    with pytest.raises(EtkvError) as caught:
        read_models.plain(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_biases_without_a_place_are_named(folder):
    biases = {
        f"model__layers__{layer}__self_attn__{name}_proj__bias": torch.ones(1) for layer in (0, 1) for name in "qkv"
    }
    _add(folder, **biases)
    assert _error(folder) == (
        f"{folder} has 6 weights that model family 'llama' does not have with this configuration, and that an export "
        "would ignore: model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.q_proj.bias, "
        "model.layers.0.self_attn.v_proj.bias and 3 more; correct config.json, or remove them from the checkpoint"
    )


def test_weights_without_effect_are_ignored(folder):
    _add(
        folder,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
        model__layers__0__self_attn__bias=torch.ones(1, 1, 8, 8),
        model__layers__0__self_attn__masked_bias=torch.tensor(-1e4),
        vision_tower__blocks__0__weight=torch.ones(2, 2),
        score__weight=torch.ones(2, 64),
    )
    read_models.plain(folder)


def test_a_bias_is_not_a_mask(folder):
    _add(folder, model__layers__0__self_attn__bias=torch.ones(64))
    assert "model.layers.0.self_attn.bias;" in _error(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_the_model_is_refused(folder, name):
    (folder / name).write_bytes(b"{}")
    assert _error(folder) == (
        f"folder {folder} has an adapter ({name}), which an export would ignore: merge it into the weights and export "
        "those, or move it out of the folder"
    )


def test_a_shape_that_the_configuration_contradicts(folder):
    read_models.configure(folder, intermediate_size=96)
    assert _error(folder) == (
        f"{folder} has 6 weights whose shape differs from its configuration, the first is "
        "model.layers.0.mlp.down_proj.weight: [64, 128], expected [64, 96]"
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.safetensors"])
def test_copies_in_another_format_are_not_read(folder, name):
    shutil.copy(folder / "model.safetensors", folder / name)
    read_models.plain(folder)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "extra.safetensors", "lm_head.bin"])
def test_a_second_checkpoint_is_refused(folder, name):
    shutil.copy(folder / "model.safetensors", folder / name)
    assert _error(folder) == (
        f"folder {folder} has more weights than those of its model.safetensors, which an export would ignore: move "
        f"{name} out of the folder"
    )


def test_files_of_a_training_are_not_weights(folder):
    (folder / "training_args.bin").write_bytes(b"x")
    read_models.plain(folder)


def _shard(folder, **changes: str) -> None:
    """Split the checkpoint into two files. ``changes`` replaces entries of the index."""
    loaded = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(loaded)}
    for shard in set(names.values()):
        save_file({name: loaded[name] for name in names if names[name] == shard}, folder / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {**names, **changes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_read_together(folder):
    _shard(folder)
    read_models.plain(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "more.safetensors")
    assert "move more.safetensors out of the folder" in _error(folder)


def test_an_absent_shard_is_named(folder):
    _shard(folder, **{"model.norm.weight": "model-00003-of-00002.safetensors"})
    assert _error(folder) == (
        f"folder {folder} lacks model-00003-of-00002.safetensors, which its model.safetensors.index.json lists"
    )
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json is not an index of weights" in _error(folder)


def test_a_damaged_shard_is_named(folder):
    _shard(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    assert _error(folder).startswith(f"the weights in {shard} cannot be loaded: ")
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    assert _error(folder) == (
        f"the weights in {shard} cannot be loaded: it is a pointer of Git LFS; run git lfs pull in its folder"
    )


def test_weights_under_another_name_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert _error(folder).startswith(f"folder {folder} has no weights under a name that transformers reads: model.safe")


def test_settings_of_a_quantization_that_the_weights_lack(folder):
    read_models.configure(folder, quantization_config={"quant_method": "gguf"})
    assert "are quantized (gguf), but the exporter reads awq, " in _error(folder)
    # No tensor is quantized, although the configuration has a quantization.
    read_models.configure(folder, quantization_config={"quant_method": "awq"})
    read_models.plain(folder)


def test_weights_of_8_bits_need_settings(folder):
    file = folder / "model.safetensors"
    loaded = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**loaded, name: loaded[name].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    assert _error(folder) == (
        f"tensor {name} of {folder} is float8_e4m3fn [128, 64], but the configuration does not say how it is "
        f"quantized; {REMEDY}"
    )
    file.unlink()
    torch.save({**loaded, name: (loaded[name] * 100).to(torch.int8)}, folder / "pytorch_model.bin")
    assert f"tensor {name} of {folder} is int8 [128, 64], but the configuration does not say" in _error(folder)
