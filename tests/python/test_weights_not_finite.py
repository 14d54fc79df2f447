"""Weights of a damaged file that are not finite are refused, and never kept in a program."""

from __future__ import annotations

import dataclasses
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import read_models
import test_mlx_folders
from etkv.errors import EtkvError
from etkv.export import mlx_quantization
from etkv.export.cpu import linears
from etkv.export.gguf import packed
from etkv.export.published.weight import Groups
from etkv.export.scratch import Scratch


def _damaged(kind: str) -> Groups:
    """Return blocks of a format of GGUF whose factor of minimums, or minimum, is infinite. No minimum is 0.

    All weights of these blocks are infinite.
    """
    size, _ = packed.FORMATS[kind]
    blocks = torch.full((16, 2, size), 85, dtype=torch.uint8)
    blocks[..., :4] = torch.tensor([0.5, math.inf], dtype=torch.float16).view(torch.uint8)
    made = packed.groups(blocks.flatten(1).numpy(), kind)
    assert bool(torch.isinf(made.values()).all())
    return made


@pytest.mark.parametrize(("kind", "bits"), [("Q4_1", 4), ("Q4_K", 4), ("Q5_K", 8)])
def test_blocks_with_an_infinite_factor_are_not_kept(tmp_path, kind, bits):
    groups = _damaged(kind)
    with Scratch(tmp_path) as scratch:
        assert linears.Packer(f"int{bits}", 32, scratch).keep(groups, torch.float32) is None
    assert mlx_quantization.keep(groups, bits, torch.float32) is None


def test_biases_that_a_dtype_does_not_hold_are_not_kept():
    """The product of a zero point and a scale exceeds float16, but no weight does."""
    scales = torch.full((4, 2), 6000.0)
    groups = Groups(torch.arange(5, 16).repeat(4, 6)[:, :64].byte(), scales, torch.full_like(scales, 15.0))
    assert bool(torch.isfinite(groups.values().half()).all())
    assert mlx_quantization.keep(groups, 4, torch.float16) is None
    assert mlx_quantization.keep(groups, 4, torch.float32) is not None
    large = dataclasses.replace(groups, scales=torch.full_like(scales, 70000.0), zeros=torch.full_like(scales, 8.0))
    assert mlx_quantization.keep(large, 4, torch.float16) is None


@pytest.mark.parametrize("quantize", ["8da4w", "4w"])
@pytest.mark.parametrize(("part", "value"), [("biases", -math.inf), ("scales", 3e38)])
def test_an_export_refuses_weights_that_are_not_finite(tiny, tmp_path, quantize, part, value):
    """A scale of 3e38 is finite, but its products with integers are not."""
    folder = shutil.copytree(tiny("tiny-llama-untied"), tmp_path / "model")
    test_mlx_folders.write(folder, {"group_size": 32, "bits": 4})
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.1.mlp.up_proj.{part}"].fill_(value)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EtkvError, match=r"weights of model\.layers\.1\.mlp\.up_proj cannot be packed: .*not finite"):
        read_models.packed(folder, tmp_path / "out", quantize)


def test_a_bias_beside_a_packed_matrix_is_checked(tiny, tmp_path):
    folder = shutil.copytree(tiny("tiny-qwen2"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.bias"][3] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EtkvError, match=r"weight model\.layers\.1\.self_attn\.q_proj\.bias has 1 values of 64"):
        read_models.packed(folder, tmp_path / "out", "8da4w")
