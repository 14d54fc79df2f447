"""``etkv::routed_experts`` in plain PyTorch, and the packed weights of experts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers.activations import ACT2FN

import tiny_families
from etkv.experts_op import Activation, routed_experts
from etkv.export import experts
from etkv.export.cpu import experts as of_cpu
from etkv.linear_op import rounded
from etkv.packed_weights import WeightFormat, alternate, apart

FORMATS = [
    WeightFormat("float32"),
    WeightFormat("bfloat16"),
    WeightFormat("int8", 32),
    WeightFormat("int8", 64),
    WeightFormat("int4", 32),
    WeightFormat("int4", 128),
    WeightFormat("int4_float16", 32),
    WeightFormat("int8_float32", 64),
]

FAMILIES = {
    "qwen3_moe": {},
    "nemotron_h": {"layers_block_type": ["moe", "full_attention"]},
    # Interleaved rows, transposed matrices, biases and limits.
    "gpt_oss": {},
    "aria_text": {},
    # The width of experts is not a multiple of 16.
    "olmoe": {"intermediate_size": 40},
    "mixtral": {"hidden_act": "gelu_pytorch_tanh"},
}


def _mixture(family: str):
    """Return the first module of experts of a tiny model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_families.config(family, **FAMILIES[family])).eval()
    _, module = next(experts.mixtures(model))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    return module


def _compute(module, implementation: str) -> torch.Tensor:
    """Return the outputs for tokens. Some choose an expert twice, and some choose experts that no other token
    chooses.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, module.config.hidden_size, generator=generator)
    chosen = torch.randint(0, 3, (20, 2), generator=generator)
    factors = torch.rand(20, 2, generator=generator)
    module.config._experts_implementation = implementation
    with torch.no_grad():
        return module(x, chosen, factors)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_weights_come_back(fmt):
    matrix = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    packed = fmt.pack(matrix)
    assert (packed.shape, packed.dtype) == (torch.Size(fmt.shape(40, 256)), fmt.dtype)
    plain = fmt.unpack(packed)
    assert plain.shape == (48, 256)
    assert not plain[40:].any()
    # Packing the unpacked weights again gives the same packed weights.
    assert torch.equal(fmt.pack(plain[:40]), packed)
    if fmt.name == "float32":
        assert torch.equal(plain[:40], matrix)
    elif fmt.group_size:
        # The error is at most half a step, plus the rounding of the scale to 8 bits. At the end of the range that
        # lacks a code, the error is at most a whole step.
        step = matrix.unflatten(1, (-1, fmt.group_size)).abs().amax(dim=2, keepdim=True) / fmt.offset
        errors = (plain[:40] - matrix).unflatten(1, (-1, fmt.group_size)).abs()
        assert bool((errors <= 1.01 * step + fmt.offset * step / 256).all())
        assert float((errors / step).mean()) < 0.3


@pytest.mark.parametrize("fmt", FORMATS[2:], ids=str)
def test_zeros_and_what_is_not_finite(fmt):
    matrix = torch.zeros(16, 128)
    assert not fmt.unpack(fmt.pack(matrix)).any()
    for bad in (math.inf, math.nan):
        matrix[3, 5] = bad
        with pytest.raises(ValueError, match="not finite"):
            fmt.pack(matrix)


@pytest.mark.parametrize(
    ("name", "group_size", "message"),
    [
        ("int3", 32, "got 'int3'"),
        ("int4", 0, "multiple of 32"),
        ("int8", 48, "multiple of 32"),
        ("float32", 32, "expected a group size of 0"),
    ],
)
def test_formats_that_the_kernels_lack(name, group_size, message):
    with pytest.raises(ValueError, match=message):
        WeightFormat(name, group_size)


def test_halves_alternate():
    gate, up = torch.arange(20.0)[:, None], torch.arange(100.0, 120.0)[:, None]
    rows = alternate(gate, up)
    assert rows[:18, 0].tolist() == [*range(16), 100, 101]
    assert [half[:20].tolist() for half in apart(rows)] == [gate.tolist(), up.tolist()]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_those_of_transformers(family):
    module = _mixture(family)
    expected = _compute(module, "eager")
    theirs = {name: weights.clone() for name, weights in module.named_parameters()}
    of_cpu.pack(module)
    found = _compute(module, of_cpu.NAME)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    for name, plain in experts.plain_weights(module).items():
        assert torch.equal(plain, theirs[name.removeprefix(".")])


@pytest.mark.parametrize("name", ["8da4w", "8da8w"])
def test_quantized_experts_compute_with_their_plain_weights(name):
    module = _mixture("qwen3_moe")
    reference = copy.deepcopy(module)
    of_cpu.pack(module, name, 32)
    for part, plain in experts.plain_weights(module).items():
        getattr(reference, part.removeprefix(".")).data = plain
    found, expected = _compute(module, of_cpu.NAME), _compute(reference, "eager")
    assert float((found - expected).std() / expected.std()) < 0.02


def test_weights_that_bfloat16_holds_stay_in_it():
    module = _mixture("qwen3_moe")
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16().float()
    expected = _compute(module, "eager")
    of_cpu.pack(module)
    assert module.down_proj.packed.dtype == torch.bfloat16
    assert torch.allclose(_compute(module, of_cpu.NAME), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_moe", Activation("silu", gated=True)),
        ("nemotron_h", Activation("relu2", gated=False)),
        ("gpt_oss", Activation("silu", True, 1.702, 7.0, 1.0)),
        ("mixtral", Activation("gelu_tanh", gated=True)),
    ],
)
def test_functions_are_known_by_what_they_compute(family, expected):
    assert of_cpu.find_activation(_mixture(family)) == expected


def test_a_factor_that_no_number_of_the_module_has():
    module = _mixture("qwen3_moe")
    module.act_fn = ACT2FN["quick_gelu"]
    assert of_cpu.find_activation(module) == Activation("silu", True, 1.702)


def test_a_function_that_the_op_lacks():
    module = _mixture("qwen3_moe")
    module.act_fn = torch.nn.Tanh()
    with pytest.raises(ValueError, match="Tanh"):
        of_cpu.find_activation(module)


def test_rounding():
    x = torch.tensor([[1.0, -127.0, 0.4, *[0.0] * 29], [0.0] * 32])
    assert rounded(x, 32)[0, :3].tolist() == [1.0, -127.0, 0.0]
    assert not rounded(x, 32)[1].any()
    bad = rounded(torch.tensor([[math.inf] * 32, [1.0] * 32]), 32)
    assert bool(bad[0].isnan().all())
    assert torch.allclose(bad[1], torch.ones(32))


def _arguments(chosen: list[list[int]]):
    fmt = WeightFormat("int4", 32)
    generator = torch.Generator().manual_seed(0)

    def packed(rows: int) -> torch.Tensor:
        return torch.stack([fmt.pack(torch.randn(rows, 32, generator=generator)) for _ in range(3)])

    x = torch.randn(len(chosen), 32, generator=generator)
    weights = torch.rand(len(chosen), 2, generator=generator)
    others = ("int4", 32, "int4", 32, "silu", True, 1.0, math.inf, 0.0)
    return (x, torch.tensor(chosen), weights, packed(64), packed(32), None, None, *others)


def test_the_op_is_one_of_torchs():
    torch.library.opcheck(routed_experts, _arguments([[0, 2], [1, 1]]))


def test_indices_that_are_no_experts_are_refused():
    for bad in (3, -1):
        with pytest.raises(ValueError, match="experts from 0 to 2"):
            routed_experts(*_arguments([[0, bad]]))


@pytest.mark.parametrize(("name", "gated"), [("gelu", True), ("silu", False)])
def test_a_factor_that_nothing_reads_is_refused(name, gated):
    with pytest.raises(ValueError, match=r"alpha is 3\.0"):
        Activation(name, gated, alpha=3.0)
