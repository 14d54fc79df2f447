"""``etkv::linear`` and ``etkv::embedding`` in plain PyTorch, and the layers that call these ops."""

from __future__ import annotations

import pytest
import torch

import tiny_families
from etkv.export import check, packing
from etkv.export.cpu import linears
from etkv.export.scratch import Scratch
from etkv.linear_op import embedding, linear, rounded
from etkv.packed_weights import WeightFormat

FORMATS = [
    WeightFormat("float32"),
    WeightFormat("bfloat16"),
    WeightFormat("int8", 64),
    WeightFormat("int4", 32),
    WeightFormat("int4_float16", 32),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_products_and_rows(fmt):
    """The last tile is not full, products are with and without a bias, and ids have any shape."""
    generator = torch.Generator().manual_seed(0)
    matrix, bias = torch.randn(40, 128, generator=generator), torch.randn(40, generator=generator)
    packed = fmt.pack(matrix)
    plain = fmt.unpack(packed)[:40]
    x = torch.randn(2, 5, 128, generator=generator)
    inputs = rounded(x, fmt.group_size) if fmt.group_size else x
    for given in (None, bias):
        made = linear(x, packed, given, fmt.name, fmt.group_size, 40)
        torch.testing.assert_close(made, torch.nn.functional.linear(inputs, plain, given))
    ids = torch.tensor([[0, 39, 17], [16, 15, 0]])
    assert torch.equal(embedding(ids, packed, fmt.name, fmt.group_size, 40), plain[ids])
    arguments = (packed, fmt.name, fmt.group_size, 40)
    for op, given in ((linear, (x, packed, bias, *arguments[1:])), (embedding, (ids, *arguments))):
        torch.library.opcheck(op, given, test_utils=("test_schema", "test_faketensor"))
    # 40 rows are padded to 48.
    for wrong in (-1, 40, 47):
        with pytest.raises(IndexError, match=f"ids from 0 to 39, got {wrong}"):
            embedding(torch.tensor([3, wrong]), *arguments)


@pytest.mark.parametrize(("width", "group"), [(576, 192), (2048, 256), (96, 96), (960, 192), (32, 32)])
def test_the_largest_group_divides_a_row(width, group):
    assert linears.largest_group(width) == group


class _Scaled(torch.nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 3


def test_layers_keep_their_class(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = _Scaled(40, 64), torch.nn.Linear(64, 40)
            self.head.weight = self.embedding.weight

    model = Model()
    weight = model.head.weight.detach().clone()
    packer = linears.Packer("int8", None, Scratch(tmp_path))
    for layer in (model.embedding, model.head):
        packed = packer.pack(layer._parameters.pop("weight"))
        layer.__class__ = packing._class(type(layer), packer.install(layer, packed))
    fmt = WeightFormat("int8", 64)
    plain = fmt.unpack(fmt.pack(weight))[:40]
    ids = torch.tensor([[1, 39]])
    assert torch.equal(model.embedding(ids), plain[ids] * 3)
    assert torch.equal(model.head.weight, plain)
    x = torch.randn(3, 64)
    torch.testing.assert_close(model.head(x), torch.nn.functional.linear(rounded(x, 64), plain, model.head.bias))


@pytest.mark.parametrize(("family", "is_tied"), [("gemma3_text", True), ("olmo", True), ("olmo", False)])
def test_tied_layers_share_packed_weights(family, is_tied, tmp_path):
    """Gemma's embedding has a buffer before its weights. In OLMo all parameters are packed."""
    from transformers import AutoModelForCausalLM

    config = tiny_families.config(family, tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    size = check.n_weights(model)
    packing.Packing(linears.Packer("int8", None, Scratch(tmp_path)), Scratch(tmp_path)).finish(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert packing.share(embedding, head) == is_tied
    assert check.n_weights(model) == size
    assert model.dtype == torch.float32
