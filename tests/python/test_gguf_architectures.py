"""For every architecture that the exporter reads, the logits of a GGUF file equal those of its source folder."""

from __future__ import annotations

import math

import numpy as np
import pytest

import gguf_cases
import tiny_gguf
import tiny_models
from etkv.export import source
from etkv.export.gguf.weights import read_weights
from etkv.export.published.weight import State
from gguf_cases import EXPERTS, LOCAL_EXPERTS, LONGROPE, LONGROPE_TENSORS, PARTIAL, YARN, YARN_KEYS
from tiny_gguf import Case

TOKENS = [(index * 37 + 11) % 250 for index in range(120)]
SHAPE = {
    **tiny_models.SHAPE,
    # The scaled rotary embeddings of the cases are for four times their original context.
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama3_factors(dim: int) -> np.ndarray:
    """Return the factors that the converter stores for Llama 3, from 1 for short wavelengths to the full factor for
    long wavelengths.
    """
    factors = []
    for index in range(0, dim, 2):
        wave = 2 * math.pi * LLAMA3["rope_theta"] ** (index / dim)
        share = (LLAMA3["original_max_position_embeddings"] / wave - 1.0) / (4.0 - 1.0)
        share = min(max(share, 0.0), 1.0)
        factors.append(1 / ((1 - share) / LLAMA3["factor"] + share))
    return np.array(factors)


CASES = {
    "llama": Case("llama"),
    "llama, all biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": Case("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": Case("llama", {"head_dim": 32}),
    "llama, linear": Case(
        "llama",
        {"rope_parameters": LINEAR},
        {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
    ),
    "llama, linear by its old name": Case(
        "llama",
        {"rope_parameters": LINEAR},
        {".rope.scale_linear": 4.0},
    ),
    "llama, longer cosines": Case(
        "llama",
        {
            "rope_parameters": {
                **LONGROPE,
                **{"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
                **{"original_max_position_embeddings": 256, "attention_factor": 1.3},
            }
        },
        {".rope.scaling.attn_factor": 1.3},
    ),
    "llama, 3.1": Case("llama", {"rope_parameters": LLAMA3}, {}, {"rope_freqs.weight": llama3_factors(16)}),
    "llama, mistral": Case("mistral", {"sliding_window": 24}, {".attention.sliding_window": 24}),
    "llama, mixtral": Case("mixtral", LOCAL_EXPERTS),
    "qwen2": Case("qwen2"),
    "qwen2, yarn": Case("qwen2", {"rope_parameters": YARN}, YARN_KEYS),
    "qwen2, yarn whole": Case(
        "qwen2",
        {"rope_parameters": YARN | {"attention_factor": 1.7, "beta_fast": 20.0, "beta_slow": 2.0}},
        YARN_KEYS
        | {
            ".rope.scaling.yarn_attn_factor": 1.7,
            ".rope.scaling.yarn_beta_fast": 20.0,
            ".rope.scaling.yarn_beta_slow": 2.0,
        },
    ),
    "qwen2moe": Case("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "qwen3moe": Case("qwen3_moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3moe, not normed": Case("qwen3_moe", {**EXPERTS, "head_dim": 32}, {".expert_weights_norm": False}),
    "gemma": Case("gemma", {"head_dim": 32}),
    "gemma2": Case(
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
        {
            ".attn_logit_softcapping": 3.0,
            ".final_logit_softcapping": 5.0,
            ".attention.sliding_window": 24,
        },
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 24,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {".attention.sliding_window": 24, ".rope.scaling.type": "linear", ".rope.scaling.factor": 8.0},
    ),
    "gemma3, its own scale and bases": Case(
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 4.0,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {
            ".attention.scale": 20**-0.5,
            ".attention.sliding_window": 24,
            ".attention.sliding_window_pattern": [False, True],
            ".rope.freq_base_swa": 500.0,
            ".final_logit_softcapping": 4.0,
        },
    ),
    "phi2": Case("phi", {"rope_parameters": PARTIAL}),
    "phi3": Case("phi3", {}, {".rope.scaling.original_context_length": 256}),
    "phi3, window": Case("phi3", {"sliding_window": 24}, {".attention.sliding_window": 24}),
    "phi3, partial": Case("phi3", {"rope_parameters": PARTIAL}, {".attention.sliding_window": 0}),
    "phi3, long": Case(
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        {
            ".rope.scaling.original_context_length": 64,
            ".rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)),
        },
        LONGROPE_TENSORS,
    ),
    "starcoder2": Case("starcoder2"),
    "starcoder2, untied": Case("starcoder2", {"tie_word_embeddings": False}),
    "stablelm": Case("stablelm", {"rope_parameters": PARTIAL, "use_qkv_bias": True}, {".use_parallel_residual": True}),
    "stablelm, parallel and normed": Case(
        "stablelm",
        {"rope_parameters": PARTIAL, "use_parallel_residual": True, "qk_layernorm": True},
        {".use_parallel_residual": True},
    ),
    "gpt2": Case("gpt2", {"intermediate_size": None, "n_inner": 96, "rope_parameters": None}),
    "gptneox": Case("gpt_neox", {"rope_parameters": PARTIAL}, {".use_parallel_residual": True}),
    "gptneox, sequential": Case(
        "gpt_neox", {"rope_parameters": PARTIAL, "use_parallel_residual": False}, {".use_parallel_residual": False}
    ),
    "nemotron": Case("nemotron", {"rope_parameters": PARTIAL}),
    "nemotron, no scaling": Case(
        "nemotron", {"rope_parameters": PARTIAL}, {".rope.scaling.type": "none", ".rope.scaling.factor": 2.0}
    ),
    "granite": Case(
        "granite",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        {".attention.scale": 0.1, ".embedding_scale": 3.0, ".residual_scale": 0.5, ".logit_scale": 2.0},
    ),
    "granitemoe": Case("granitemoe", {**LOCAL_EXPERTS, "attention_multiplier": 0.25}),
    "granitemoe, shared": Case(
        "granitemoeshared", {**LOCAL_EXPERTS, "attention_multiplier": 0.25, "shared_intermediate_size": 48}
    ),
    "smollm3": Case("smollm3", {"num_hidden_layers": 4}),
    "olmo2": Case("olmo2"),
    "olmo2, olmo3": Case(
        "olmo3",
        {"num_hidden_layers": 4, "sliding_window": 24},
        {".attention.sliding_window": 24, ".attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "olmoe": Case("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo": Case("olmo", {"clip_qkv": 0.7}, {".attention.clamp_kqv": 0.7, ".attention.layer_norm_epsilon": 1e-5}),
    "exaone4": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4, windows": Case(
        "exaone4",
        {"num_hidden_layers": 4, "sliding_window": 24, "rope_parameters": LLAMA3},
        {".attention.sliding_window": 24, ".attention.sliding_window_pattern": [True, True, True, False]},
        {"rope_freqs.weight": llama3_factors(16)},
    ),
    "seed_oss": Case("seed_oss", {"head_dim": 32}),
    "arcee": Case("arcee"),
    "ernie4_5": Case("ernie4_5", {"head_dim": 32}),
    "mistral3": Case(
        "ministral3",
        {"head_dim": 32, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
        YARN_KEYS | {".rope.scaling.yarn_log_multiplier": 1.0, ".attention.temperature_scale": 0.3},
    ),
    "command-r": Case("cohere", {"use_qk_norm": True, "logit_scale": 0.5}, {".logit_scale": 0.5}),
    "cohere2": Case(
        "cohere2",
        {"num_hidden_layers": 4, "sliding_window": 24, "logit_scale": 0.5, "head_dim": 32},
        {".logit_scale": 0.5, ".attention.sliding_window": 24, ".rope.dimension_count": 32},
    ),
    "apertus": Case("apertus", {"rope_parameters": LLAMA3}, {}, {"rope_freqs.weight": llama3_factors(16)}),
    **gguf_cases.CASES,
}
"""Name -> case."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that writes the folder of a family with settings and random weights."""

    def make(model_type: str, settings: dict):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        made = tmp_path_factory.mktemp(model_type)
        arguments = {**SHAPE, **settings}
        if model_type in ("gpt2", "gpt_neox"):
            arguments.pop("num_key_value_heads")
        # In these families, a setting of None does not mean the default. In other families it does.
        if model_type not in ("deepseek_v2", "exaone4"):
            arguments = {name: value for name, value in arguments.items() if value is not None}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**arguments)).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(made)
        tokenizer = tiny_models.tokenizer()
        tokenizer.save_pretrained(made)
        return made

    return make


def logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0].numpy()


def read(file):
    """Return the model of a GGUF file with transformers' own attention."""
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    origin = source.find(file)
    config = source.read_config(origin)
    weights = State(read_weights(origin.opened, config))
    model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


BY_ELEMENTS = ("deepseek2", "deepseek2, softmax")
"""Cases whose matrix that expands latents is stored as two tensors, of which one is transposed."""


def architecture(name: str) -> str:
    """Return the architecture of a case."""
    return name.partition(",")[0]


def written(folder, file, name: str, quantize: str | None = None):
    """Write the file of a case. Return the model's folder and the file."""
    case = CASES[name]
    origin = folder(case.family, case.settings)
    options = {"architecture": architecture(name), "keys": case.keys, "tensors": case.tensors, "quantize": quantize}
    return origin, tiny_gguf.write(origin, file, **options)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_folder(folder, tmp_path, name):
    import torch
    from transformers import AutoModelForCausalLM

    origin, file = written(folder, tmp_path / "x.gguf", name)
    original = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32, attn_implementation="eager")
    expected = logits(original)
    np.testing.assert_allclose(logits(read(file)), expected, rtol=1e-3, atol=1e-3 * expected.std())


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_integers_stand_for_the_weights(folder, tmp_path, name):
    """Quantized matrices are read as integers and scales, whatever the order of their rows or columns in a file."""
    _, file = written(folder, tmp_path / "x.gguf", name, "Q8_0")
    origin = source.find(file)
    stored = read_weights(origin.opened, source.read_config(origin))
    quantized = {name: weight for name, weight in stored.items() if weight.is_quantized and len(weight.shape) > 1}
    assert quantized
    for parameter, weight in quantized.items():
        groups, values = weight.groups(), weight.read()
        if parameter.endswith("kv_b_proj.weight") and name in BY_ELEMENTS:
            assert groups is None
            continue
        assert groups is not None, parameter
        # The matrices of GPT-2 are transposed, and so are those of some experts.
        orders = (values, values.swapaxes(-1, -2))
        assert any(groups.values().equal(order.reshape(groups.codes.shape)) for order in orders), parameter
