"""Published quantized weights are decoded exactly, or refused by name."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import published_packers as packers
import read_models
import tiny_families
from etkv.errors import EtkvError
from etkv.export import weights
from etkv.export.published import REMEDY

LAYER = "model.layers.0.self_attn.q_proj"
ROWS, COLUMNS, GROUP = 32, 64, 32
SHUFFLED = [column // GROUP for column in range(COLUMNS)]
random.Random(0).shuffle(SHUFFLED)

Tensors = dict[str, torch.Tensor]


class _Config:
    """A configuration with only the settings of a quantization."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.quantization_config = settings

    def get_text_config(self) -> _Config:
        return self


def _read(folder: Path, tensors: Tensors, settings: dict[str, Any]):
    """Read the parts of ``LAYER``, and other tensors, which are given with full names."""
    file = folder / "model.safetensors"
    whole = {name if name.startswith("model.") else f"{LAYER}.{name}": x.contiguous() for name, x in tensors.items()}
    save_file(whole, file)
    checkpoint = weights.read_quantized(folder, [file], _Config(settings))
    assert checkpoint is not None
    return checkpoint


def _groups(form: str, **of_weights: Any) -> dict[str, Any]:
    """Return settings of compressed-tensors with one group for all linear layers."""
    of_weights = {"type": "int", "symmetric": True, **of_weights}
    group = {"targets": ["Linear"], "weights": of_weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _gptq(bits: int = 4, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **settings}


def _packed(bits: int, symmetric: bool = True) -> dict[str, Any]:
    return _groups("pack-quantized", num_bits=bits, strategy="group", group_size=GROUP, symmetric=symmetric)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 48]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SHAPE = (ROWS, COLUMNS)

CASES = {
    "awq": lambda: (packers.awq(*SHAPE, GROUP), AWQ),
    "awq-gemv": lambda: (packers.awq(*SHAPE, GROUP, is_gemv=True), {**AWQ, "version": "gemv"}),
    **{f"gptq-{bits}": lambda bits=bits: (packers.gptq(*SHAPE, GROUP, bits), _gptq(bits)) for bits in (2, 3, 4, 8)},
    "gptq-v2": lambda: (packers.gptq(*SHAPE, GROUP, 4, is_second=True), _gptq(checkpoint_format="gptq_v2")),
    "gptq-symmetric": lambda: (packers.gptq(*SHAPE, GROUP, 4, symmetric=True), _gptq(sym=True)),
    "gptq-order": lambda: (packers.gptq(*SHAPE, GROUP, 4, group_of=SHUFFLED), _gptq(desc_act=True)),
    "gptq-rows": lambda: (packers.gptq(*SHAPE, COLUMNS, 4), _gptq(group_size=-1)),
    "gptq-own-bits": lambda: (packers.gptq(*SHAPE, GROUP, 8), _gptq(4, dynamic={"+:.*": {"bits": 8}})),
    **{
        f"packed-{bits}": lambda bits=bits: (packers.packed_integers(*SHAPE, GROUP, bits), _packed(bits))
        for bits in (1, 4, 8)
    },
    "packed-zeros": lambda: (packers.packed_integers(*SHAPE, GROUP, 3, symmetric=False), _packed(3, False)),
    "packed-channel": lambda: (
        packers.packed_integers(*SHAPE, COLUMNS, 4),
        _groups("pack-quantized", num_bits=4, strategy="channel"),
    ),
    "int8": lambda: (packers.integers(*SHAPE), _groups("int-quantized", num_bits=8, strategy="channel")),
    "int8-zeros": lambda: (
        packers.integers(*SHAPE, symmetric=False),
        _groups("naive-quantized", num_bits=8, strategy="channel", symmetric=False),
    ),
    # The last blocks of both axes are smaller, as in DeepSeek-V3.
    "fp8-blocks": lambda: (packers.fp8(*SHAPE, (24, 48)), {**FP8, "weight_block_size": [24, 48]}),
    "fp8-powers": lambda: (packers.fp8(*SHAPE, (16, 48), as_powers=True), FP8),
    "fp8-tensor": lambda: (packers.fp8(*SHAPE, None, scale_shape=()), {**FP8, "weight_block_size": None}),
    "fbgemm": lambda: (
        packers.fp8(*SHAPE, None, scale_shape=(ROWS, 1), scale_name="weight_scale"),
        {"quant_method": "fbgemm_fp8"},
    ),
    "float-blocks": lambda: (
        packers.fp8(*SHAPE, (16, 32), scale_name="weight_scale"),
        _groups("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
    ),
    "float-rows": lambda: (
        packers.fp8(*SHAPE, None, scale_shape=(ROWS, 1), scale_name="weight_scale"),
        _groups("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    # The format of packages of 2024.
    "float-tensor": lambda: (
        packers.fp8(*SHAPE, None, scale_shape=(1,), scale_name="weight_scale"),
        _groups("naive-quantized", num_bits=8, type="float", strategy="tensor") | {"quantization_status": "frozen"},
    ),
    "mxfp8": lambda: (
        packers.fp8(*SHAPE, (1, 32), scale_name="weight_scale", as_powers=True),
        _groups("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
    ),
    "mxfp4": lambda: (
        packers.mxfp4(*SHAPE),
        _groups("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    ),
    "nvfp4": lambda: (
        packers.nvfp4(*SHAPE, divides=True),
        _groups("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "bitsandbytes": lambda: (packers.bitsandbytes(*SHAPE, is_nested=False), BNB),
    "bitsandbytes-nested": lambda: (packers.bitsandbytes(*SHAPE, is_nested=True), BNB),
    "llm-int8": lambda: (packers.llm_int8(*SHAPE), {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "modelopt": lambda: (packers.nvfp4(*SHAPE, divides=False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_format_is_decoded_exactly(tmp_path, case):
    (tensors, expected), settings = CASES[case]()
    bias = torch.randn(ROWS).bfloat16()
    found = _read(tmp_path, {**tensors, "bias": bias}, settings).weights
    assert found.keys() == {f"{LAYER}.weight", f"{LAYER}.bias"}
    decoded = found[f"{LAYER}.weight"].read()
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, expected)
    assert torch.equal(found[f"{LAYER}.bias"].read(), bias)


def test_groups_of_layers_have_formats_of_their_own(tmp_path):
    """A group with the name of a layer takes precedence over a group with its class."""
    (integers, expected), (floats, others) = (
        packers.packed_integers(*SHAPE, GROUP, 4),
        packers.fp8(*SHAPE, None, scale_shape=(ROWS, 1), scale_name="weight_scale"),
    )
    other = "model.layers.0.mlp.up_proj"
    settings = _packed(4) | {"format": "mixed-precision"}
    of_integers = {**settings["config_groups"]["group_0"], "targets": ["re:.*q_proj"], "format": "pack-quantized"}
    of_floats = {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    }
    settings["config_groups"] = {"group_0": of_integers, "group_1": of_floats}
    found = _read(tmp_path, {**integers, **{f"{other}.{part}": x for part, x in floats.items()}}, settings).weights
    assert torch.equal(found[f"{LAYER}.weight"].read(), expected)
    assert torch.equal(found[f"{other}.weight"].read(), others)


def test_experts_in_mxfp4_are_decoded_exactly(tmp_path):
    experts = [packers.mxfp4(*SHAPE, seed=seed) for seed in range(3)]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = _read(tmp_path, _of_experts(name, experts), {"quant_method": "mxfp4"}).weights
    assert found.keys() == {name}
    assert torch.equal(found[name].read(), torch.stack([expected.T for _, expected in experts]))


def _of_experts(name: str, experts: list[packers.Packed]) -> Tensors:
    """Return the tensors of experts in mxfp4, as in folders of gpt-oss."""
    codes, exponents = (torch.stack([made[part] for made, _ in experts]) for part in ("weight_packed", "weight_scale"))
    return {f"{name}_blocks": codes.unflatten(2, (-1, 16)), f"{name}_scales": exponents}


def test_scales_of_activations_and_of_caches_are_said(tmp_path):
    tensors, _ = packers.fp8(*SHAPE, (16, 48))
    scales = {"input_scale": torch.tensor(0.1), "model.layers.0.self_attn.k_scale": torch.tensor(0.2)}
    found = _read(tmp_path, {**tensors, **scales}, FP8)
    assert found.weights.keys() == {f"{LAYER}.weight"}
    assert found.remarks == (
        "the folder is for activations in 8 bits, but the program does not round activations",
        "the folder has scales of keys and values in 8 bits, which an etkv cache does not use",
    )
    tensors, _ = packers.awq(*SHAPE, GROUP)
    assert not _read(tmp_path, tensors, AWQ).remarks


TENSORS: dict[str, Callable[[], Tensors]] = {
    "awq": lambda: packers.awq(*SHAPE, GROUP)[0],
    "gptq": lambda: packers.gptq(*SHAPE, GROUP, 4)[0],
    "fp8": lambda: packers.fp8(*SHAPE, (16, 48))[0],
    "compressed-tensors": lambda: packers.packed_integers(*SHAPE, GROUP, 4)[0],
    "bitsandbytes": lambda: packers.bitsandbytes(*SHAPE, is_nested=False)[0],
    "modelopt": lambda: packers.nvfp4(*SHAPE, divides=False)[0],
}
"""Method of quantization -> a function that returns the tensors of a layer."""


def _only_group(**group: Any) -> dict[str, Any]:
    return _packed(4) | {"config_groups": {"group_0": group}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": (
        {"quant_method": "unheard-of"},
        "(unheard-of), but the exporter reads awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, ",
    ),
    "no method": ({"bits": 4}, "(by a method that it does not name)"),
    "awq bits": ({**AWQ, "bits": 8}, "bits is 8, but the exporter reads 4"),
    "awq version": ({**AWQ, "version": "marlin"}, "version is 'marlin', expected gemm or gemv"),
    "awq layout": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gemv_fast"},
        "checkpoint_format is 'gemv_fast', expected gemm or gemv",
    ),
    "awq layouts": ({**AWQ, "format": "gemv"}, "version and format differ: gemm and gemv"),
    "awq group": ({**AWQ, "group_size": 64}, f"tensor {LAYER}.qzeros is int32 [2, 4], expected int32 [1, 4]"),
    "gptq bits": (_gptq(5), "bits is 5, but the exporter reads 2, 3, 4, 8"),
    "gptq other bits": (_gptq(8), f"tensor {LAYER}.qweight is int32 [8, 32], expected int32 [16, 32]"),
    "gptq group": (_gptq(group_size=16), "has 2 groups in 64 columns, but group_size is 16"),
    "gptq format": (_gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    "gptq formats": (
        _gptq(checkpoint_format="gptq", format="gptq_v2"),
        "checkpoint_format and format differ: gptq and gptq_v2",
    ),
    "bits that are no integer": (_gptq(bits=4.0), "bits is 4.0, but the"),
    "fp8 grid": (
        {**FP8, "weight_block_size": [16, 16]},
        f"tensor {LAYER}.weight_scale_inv is float32 [2, 2], expected [2, 4] or [32, 1] for a weight [32, 64]",
    ),
    "fp8 block": ({**FP8, "weight_block_size": [16]}, "weight_block_size is"),
    "sparse": (
        _packed(4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config is {'format': 'sparse-24-bitmask'}, which the exporter does not support",
    ),
    "sparse by name": (_packed(4) | {"sparsity_config": "dense"}, "sparsity_config is 'dense', expected a mapping"),
    "weights of a group": (_only_group(targets=["Linear"], weights="int4"), "weights is 'int4', expected a mapping"),
    "activations of a group": (
        _only_group(targets=["Linear"], input_activations=8),
        "input_activations is 8, expected a mapping",
    ),
    "targets": (_only_group(targets=[7]), "targets is [7], expected a list of names"),
    "ignored by number": (_packed(4) | {"ignore": [7]}, "ignore is [7], expected a list of names"),
    "group": (_packed(4) | {"config_groups": {"group_0": "int4"}}, "group_0 is 'int4', expected a mapping"),
    "rotations": (
        _packed(4) | {"transform_config": {"config_groups": {"R1": {}}}},
        "transform_config is {'config_groups': {'R1': {}}}",
    ),
    "ignored": (
        _packed(4) | {"ignore": ["re:.*q_proj"]},
        f"layer {LAYER} is among the ignored layers, but is quantized",
    ),
    "class": (_only_group(targets=["LlamaMLP"]), "a group is for layers of class LlamaMLP"),
    "no group": (_only_group(targets=["re:.*v_proj"]), f"0 groups of config_groups are for layer {LAYER}"),
    "format": (_groups("marlin-24", num_bits=4, strategy="channel"), "format is 'marlin-24'"),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "quant_algo is 'W4A8_AWQ', but the exporter reads 'FP8', 'NVFP4'",
    ),
}
"""Settings of a quantization that are refused, and a part of the message."""

REFUSED_TENSORS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "awq part": (AWQ, lambda given: _without("qzeros", given), f"weight {LAYER}.weight lacks its qzeros"),
    "gptq zero": (
        _gptq(),
        # A stored zero point of -1, which stands for 0.
        lambda given: given | {"qzeros": torch.full((2, 4), -1, dtype=torch.int32)},
        "has a zero point of 0, which checkpoints of format gptq store as -1: packages read it as 0 or as 16",
    ),
    "gptq without an order": (
        _gptq(desc_act=True),
        lambda given: _without("g_idx", given),
        f"weight {LAYER}.weight lacks its g_idx",
    ),
    "gptq order": (
        _gptq(desc_act=True),
        lambda given: given | {"g_idx": torch.full((COLUMNS,), 2, dtype=torch.int32)},
        f"tensor {LAYER}.g_idx has groups outside of the 2 groups of {LAYER}.weight",
    ),
    "fp8 without a scale": (
        FP8,
        lambda given: _without("weight_scale_inv", given),
        "is float8_e4m3fn [32, 64], but the configuration does not say how it is quantized",
    ),
    "block": (
        _groups("float-quantized", num_bits=8, strategy="block", block_structure="16x48", type="float"),
        lambda _: packers.fp8(*SHAPE, (16, 48), scale_name="weight_scale")[0],
        "block_structure is '16x48', expected two numbers",
    ),
    "zeros": (
        _packed(4),
        lambda _: packers.packed_integers(*SHAPE, GROUP, 4, symmetric=False)[0],
        f"weight {LAYER}.weight is symmetric, but has {LAYER}.weight_zero_point",
    ),
    "bitsandbytes sizes": (
        BNB,
        lambda given: (
            given | {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b'{"shape": [32, 64]}')).byte()}
        ),
        f"tensor {LAYER}.weight.quant_state.bitsandbytes__nf4 has no sizes of weight {LAYER}.weight",
    ),
    "bitsandbytes layout": (
        BNB,
        lambda _: packers.llm_int8(*SHAPE)[0] | {"weight_format": torch.tensor(2, dtype=torch.uint8)},
        f"weight {LAYER}.weight has the layout 2, expected 0 (row by row)",
    ),
}
"""Settings, a function that changes the tensors of their method, and a part of the message."""


def _without(part: str, tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != part}


def _refuse(folder: Path, tensors: Callable[[Tensors], Tensors], settings: dict[str, Any], expected: str) -> None:
    """Check that the tensors of the settings' method, changed by ``tensors``, are refused."""
    given = TENSORS.get(settings.get("quant_method"), TENSORS["awq"])()
    with pytest.raises(EtkvError) as caught:
        _read(folder, tensors(given), settings)
    said = str(caught.value)
    assert expected in said
    assert said.endswith(REMEDY)
    assert "\n" not in said


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_refused(tmp_path, case):
    settings, expected = REFUSED[case]
    _refuse(tmp_path, lambda given: given, settings, expected)


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_tensors_that_are_refused(tmp_path, case):
    settings, tensors, expected = REFUSED_TENSORS[case]
    _refuse(tmp_path, tensors, settings, expected)


def quantize(folder: Path, plain: Path, settings: dict[str, Any], pack: Any, chosen: str) -> None:
    """Quantize the weights of ``folder`` whose names contain ``chosen``. Write their dequantized values to
    ``plain``.
    """
    loaded = load_file(folder / "model.safetensors")
    quantized, meant = dict(loaded), dict(loaded)
    for number, name in enumerate(name for name, x in loaded.items() if chosen in name and x.dim() == 2):
        tensors, meant[name] = pack(*loaded[name].shape, seed=number)
        del quantized[name]
        quantized |= {f"{name.removesuffix('weight')}{part}": x for part, x in tensors.items()}
    save_file(quantized, folder / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    read_models.configure(folder, quantization_config=settings)


@pytest.mark.parametrize(
    ("name", "settings", "pack", "chosen"),
    [
        ("tiny-llama", AWQ, lambda *shape, seed: packers.awq(*shape, GROUP, seed=seed), "self_attn"),
        # Phi-3 has queries, keys and values in one matrix.
        ("tiny-phi3", _gptq(3), lambda *shape, seed: packers.gptq(*shape, GROUP, 3, seed=seed), "self_attn"),
        # Experts are stacked after they are decoded.
        ("tiny-qwen3-moe", FP8, lambda *shape, seed: packers.fp8(*shape, (16, 48), seed=seed), ".experts."),
    ],
    ids=["awq", "gptq", "fp8"],
)
def test_a_model_is_loaded_as_its_decoded_weights(tiny, tmp_path, name, settings, pack, chosen):
    folder, plain = (shutil.copytree(tiny(name), tmp_path / part) for part in ("quantized", "plain"))
    quantize(folder, plain, settings, pack, chosen)
    notes: list[str] = []
    model, expected = read_models.plain(folder, note=notes.append), read_models.plain(plain)
    assert bool(notes) == (settings is FP8)
    assert not hasattr(model.config, "quantization_config")
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for weight, values in expected.state_dict().items():
        assert torch.equal(found[weight], values), weight


def gpt_oss(tmp_path: Path, kinds: tuple[str, ...] = ("full_attention",)) -> tuple[Path, Path]:
    """Return a folder of a tiny gpt-oss with experts in mxfp4, and a folder with the decoded values."""
    from transformers import GptOssForCausalLM

    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    config = tiny_families.config("gpt_oss", num_hidden_layers=len(kinds), layer_types=list(kinds))
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    for made in (folder, plain):
        model.save_pretrained(made)
    loaded = load_file(plain / "model.safetensors")
    quantized = dict(loaded)
    for number, name in enumerate(name for name, x in loaded.items() if x.dim() == 3):
        experts, columns, rows = loaded[name].shape
        packed = [packers.mxfp4(rows, columns, seed=10 * number + expert) for expert in range(experts)]
        loaded[name] = torch.stack([values.T for _, values in packed]).contiguous()
        del quantized[name]
        quantized |= _of_experts(name, packed)
    save_file(loaded, plain / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    read_models.configure(folder, quantization_config=settings)
    save_file(quantized, folder / "model.safetensors", {"format": "pt"})
    return folder, plain


def test_experts_of_gpt_oss_are_loaded_as_their_decoded_weights(tmp_path):
    found, expected = (read_models.plain(made).state_dict() for made in gpt_oss(tmp_path))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())
