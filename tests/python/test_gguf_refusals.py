"""Every key and tensor of a GGUF file is used, or refused by name. None is ignored."""

from __future__ import annotations

import copy
import math
import types

import gguf as gguf_package
import numpy as np
import pytest

from etkv.errors import EtkvError
from etkv.export import gguf, source
from etkv.export.gguf import architectures
from etkv.export.gguf.weights import read_weights
from reference import EVERYTHING
from test_gguf_architectures import CASES, architecture, folder, written  # noqa: F401 (a fixture)

ODD = (11, 0.37, -1, True, False, "odd", [11, 8], [0.5, 0.25])
"""Values of every type that no key has by default."""

CHANGES_NOTHING = {
    "tensor_data_layout": "the origin of the weights",
    "rope.scaling.finetuned": "the origin of the weights",
    "rope.scale_linear": "an older name of a factor, which the newer name overrides",
    "rope.scaling.original_context_length": "where nothing is scaled",
    "attention.sliding_window_pattern": "where no layer has a window",
    "attention.layer_norm_epsilon": "where the norms are RMS norms",
    "attention.layer_norm_rms_epsilon": "where the norms are layer norms",
    "use_parallel_residual": "where it follows from the tensors",
    "full_attention_interval": "where the layers are listed",
    "rope.dimension_sections": "for positions in images",
    "context_length": "where no layer attends",
}
"""Keys that some architecture may ignore, with the reason."""


def known_keys() -> list[str]:
    """Return the keys of architectures in the gguf package, without the architecture's prefix."""
    found = set()
    classes = [gguf_package.Keys]
    while classes:
        for name, value in vars(classes.pop()).items():
            if isinstance(value, type) and not name.startswith("_"):
                classes.append(value)
            elif isinstance(value, str) and value.startswith("{arch}."):
                found.add(value.removeprefix("{arch}."))
    return sorted(found | {"mystery", "attention.mystery", "rope.scale_linear"})


@pytest.fixture(scope="module")
def opened(folder, tmp_path_factory):  # noqa: F811
    """Return a function that opens the file of a case of :data:`CASES`, once for each case."""
    files = {}

    def get(name: str) -> gguf.GgufFile:
        if name not in files:
            _, file = written(folder, tmp_path_factory.mktemp("gguf") / "x.gguf", name)
            files[name] = source.find(file).opened
        return files[name]

    return get


def changed(file: gguf.GgufFile, **values) -> gguf.GgufFile:
    """Return ``file`` with the ``values`` of keys. A leading dot stands for its architecture."""
    other = copy.copy(file)
    named = {f"{file.architecture}{key}" if key.startswith(".") else key: value for key, value in values.items()}
    other.values = {key: value for key, value in (file.values | named).items() if value is not None}
    return other


FIRST = {architecture(name): name for name in reversed(CASES)}


@pytest.mark.parametrize("architecture", list(FIRST)[:: 1 if EVERYTHING else 4])
def test_every_key_counts(opened, architecture):
    """A key of the gguf package with an unusual value changes the configuration, or is refused by name."""
    file = opened(FIRST[architecture])
    usual = gguf.read_config(file).to_dict()
    for key in known_keys():
        for value in ODD:
            try:
                config = gguf.read_config(changed(file, **{f".{key}": value})).to_dict()
            except EtkvError as error:
                assert f" {architecture}." in str(error), (key, value)
                assert "None" not in str(error), (key, value)
                assert "\n" not in str(error)
                continue
            is_default = key in ("attention.causal", "expert_weights_norm") and value in (True, False)
            assert config != usual or key in CHANGES_NOTHING or is_default, (key, value)


def test_every_architecture_is_tried():
    assert set(FIRST) == set(architectures.READERS)


@pytest.mark.parametrize(
    "architecture", sorted(set(gguf_package.MODEL_ARCH_NAMES.values()) - set(architectures.READERS))
)
def test_other_architectures_are_refused(opened, architecture):
    file = copy.copy(opened("llama"))
    file.values = file.values | {"general.architecture": architecture}
    with pytest.raises(EtkvError, match=rf"architecture '{architecture}' of .* is not one that"):
        gguf.read_config(file)


@pytest.mark.parametrize("key", ["mystery", "unsloth.version", "clip.vision.image_size"])
def test_unknown_keys_are_refused(opened, key):
    with pytest.raises(EtkvError, match=f"has {key} = 7, which the exporter does not support"):
        gguf.read_config(changed(opened("llama"), **{key: 7}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.type", "adapter", "is not a model: its general.type is 'adapter'"),
        ("general.type", "mmproj", "is not a model: its general.type is 'mmproj'"),
        ("adapter.type", "lora", "is an adapter, not a model: it has adapter.type"),
        (".attention.key_length", 8, "but its queries have heads of 16 elements"),
        (".embedding_length", 32, "but its embedding has rows of 64 elements"),
        (".attention.value_length", 8, r"but llama\.attention\.key_length is 16; both must be equal"),
        (".rope.dimension_count", 8, "this architecture rotates exactly 16 elements"),
        (".rope.scaling.type", "ntk", "the exporter supports none, linear, yarn and longrope"),
        (".rope.scaling.type", "longrope", "and no rope_factors_short.weight"),
        (".attention.head_count_kv", [2, 1], "which differs between layers"),
        (".attention.head_count", 0, "expected a number above 0"),
        (".attention.causal", False, "the KV cache is for causal attention"),
        (".rope.freq_base", 0.0, "expected a number above 0"),
        (".rope.scaling.factor", 0.5, "expected at least 1"),
        (".vocab_size", 319, "its embedding has 320 rows"),
        (".context_length", None, "lacks llama.context_length"),
        (".attention.layer_norm_rms_epsilon", None, "lacks llama.attention.layer_norm_rms_epsilon"),
        ("tokenizer.ggml.eos_token_id", 320, "but its vocabulary has 320 tokens"),
        ("tokenizer.ggml.eot_token_id", 320, "but its vocabulary has 320 tokens"),
    ],
)
def test_values_that_cannot_be(opened, key, value, said):
    file = changed(opened("llama"), **{key: value})
    with pytest.raises(EtkvError, match=said):
        gguf.read_config(file)


@pytest.mark.parametrize(
    ("case", "key", "value", "said"),
    [
        ("llama4", ".attention.sliding_window", 4096, "chunks of this architecture have 8192 positions"),
        ("apertus", ".xielu.alpha_p", [0.5], "expected finite numbers, one for each of 2 layers"),
        ("apertus", ".xielu.beta", None, "lacks apertus.xielu.beta"),
        ("gemma4", ".attention.sliding_window_pattern", [True], "expected a flag for each of 2 layers"),
        ("gemma4", ".rope.dimension_count_swa", 8, "all 16 elements of a head are rotated"),
        ("gemma4, shared layers", ".attention.shared_kv_layers", 4, "the model has 4 layers"),
        ("gemma4, shared layers", ".feed_forward_length", [128, 256, 128, 256], "one width, or twice that"),
        ("gemma4, experts", ".attention.head_count_kv", [2, 0], "expected numbers above 0"),
        ("gemma3n", ".altup.num_inputs", 3, "4 inputs of a layer"),
        ("gemma3n", ".activation_sparsity_scale", [math.inf] * 4, "expected finite numbers"),
        ("gemma3n", ".altup.active_idx", 4, "expected a number below 4, the number of inputs"),
        ("gemma3n", ".attention.sliding_window_pattern", 3, "none of the first 2 layers, .* is without a window"),
        ("gemma3n", ".attention.sliding_window_pattern", [False, False, True, True], "none .* has a window"),
        ("gemma3n", ".rope.freq_base_swa", 0.0, "expected a number above 0"),
        ("gemma3", ".rope.freq_base_swa", -1.0, "expected a number above 0"),
        ("gemma4", ".attention.sliding_window_pattern", [True, True], "the last of 2 layers has no window"),
        ("gemma4, shared layers", ".attention.sliding_window_pattern", [True] * 3 + [False], "is without a window"),
        ("gemma4", ".attention.layer_norm_rms_epsilon", -1e-6, "expected a number of at least 0"),
        ("deepseek2", ".attention.layer_norm_rms_epsilon", -1e-6, "expected a number of at least 0"),
        ("mamba2", ".attention.layer_norm_rms_epsilon", -1e-6, "expected a number of at least 0"),
        ("gpt2", ".attention.layer_norm_epsilon", -1e-6, "expected a number of at least 0"),
        ("glm4moe", ".expert_group_count", 3, "which does not divide 4, the number of experts"),
        ("glm4moe", ".expert_group_used_count", 3, "but there are 2 groups of experts"),
        ("glm4moe", ".expert_used_count", 3, "but the groups of a token have 2 experts"),
        ("qwen3next", ".ssm.time_step_rank", 5, "which does not divide 128"),
    ],
)
def test_values_that_an_architecture_cannot_have(opened, case, key, value, said):
    with pytest.raises(EtkvError, match=said):
        gguf.read_config(changed(opened(case), **{key: value}))


MIXTURES = (
    *("afmoe", "deepseek2", "dots1", "ernie4_5-moe", "exaone-moe", "gemma4, experts", "glm4moe", "gpt-oss"),
    *(
        "granitehybrid",
        "granitemoe",
        "hunyuan-moe",
        "lfm2moe",
        "llama4",
        "llama, mixtral",
        "minimax-m2",
        "nemotron_h_moe",
    ),
    *("olmoe", "phimoe", "qwen2moe", "qwen3moe", "qwen3next", "qwen35moe"),
)


@pytest.mark.parametrize("case", MIXTURES)
def test_a_token_has_at_most_all_experts(opened, case):
    with pytest.raises(EtkvError, match=r"expert_used_count = 99, but there are 4 experts"):
        gguf.read_config(changed(opened(case), **{".expert_used_count": 99}))


def test_frequencies_that_no_head_of_gemma4_has(opened):
    """The factors of a file are ones, and after them numbers that stop a frequency."""
    file = copy.copy(opened("gemma4"))
    factors = np.array([1.0, 2.0, *[1e30] * 14], dtype=np.float32)
    whole = file.tensors["rope_freqs.weight"]
    read = types.SimpleNamespace(shape=whole.shape, read=lambda: factors)
    file.tensors = file.tensors | {"rope_freqs.weight": read}
    with pytest.raises(EtkvError, match=r"a tensor rope_freqs\.weight, whose values must be ones and then 1e30"):
        gguf.read_config(file)


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("qwen2", "blk.0.attn_output.bias"),
        ("phi3", "blk.1.ffn_up.bias"),
        ("llama", "blk.0.attn_q_norm.weight"),
        ("llama", "blk.0.attn_sinks.weight"),
        ("llama", "blk.2.attn_q.weight"),
        ("gemma", "output_norm.bias"),
        ("qwen3", "output.bias"),
        ("llama, mixtral", "blk.0.exp_probs_b.bias"),
        ("llama", "mystery.weight"),
    ],
)
def test_tensors_without_a_place_are_refused(opened, case, tensor):
    file = copy.copy(opened(case))
    file.tensors = file.tensors | {tensor: file.tensors["output_norm.weight"]}
    config = gguf.read_config(file)
    with pytest.raises(EtkvError, match=f"tensor {tensor} of .* is not used by transformers' model of family"):
        read_weights(file, config)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"])
def test_factors_have_to_fit(opened, name):
    file = copy.copy(opened("llama"))
    file.tensors = file.tensors | {name: file.tensors["output_norm.weight"]}
    with pytest.raises(EtkvError, match=rf"tensor {name} of .* has shape \[64\], expected \[8\]"):
        gguf.read_config(file)


def test_tensors_have_to_fit(opened):
    file = changed(opened("llama"), **{".feed_forward_length": 96})
    with pytest.raises(
        EtkvError, match=r"tensor blk.0.ffn_gate.weight of .* has shape \[128, 64\], but its model needs"
    ):
        read_weights(file, gguf.read_config(file))["model.layers.0.mlp.gate_proj.weight"].read()


def test_missing_tensor(opened):
    file = copy.copy(opened("llama"))
    file.tensors = {name: tensor for name, tensor in file.tensors.items() if name != "blk.1.attn_v.weight"}
    with pytest.raises(EtkvError, match=r"lacks tensor blk\.1\.attn_v\.weight of its model"):
        read_weights(file, gguf.read_config(file))


def test_some_biases_are_some_zeros(opened):
    """Llama files may have biases for some projections, where transformers has all or none."""
    file = copy.copy(opened("llama"))
    file.tensors = file.tensors | {"blk.0.attn_k.bias": opened("qwen2").tensors["blk.0.attn_k.bias"]}
    weights = read_weights(file, gguf.read_config(file))
    assert weights["model.layers.0.self_attn.k_proj.bias"].read().abs().sum() > 0
    for name in ("layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj", "layers.1.self_attn.k_proj"):
        np.testing.assert_array_equal(weights[f"model.{name}.bias"].read().numpy(), 0.0)


def test_fewer_layers_leave_tensors_over(opened):
    file = opened("llama")
    config = gguf.read_config(file)
    config.num_hidden_layers = 1
    assert not any(".1." in name for name in read_weights(file, config))


@pytest.mark.parametrize(("case", "layers", "scalar"), [("gemma2", 46, 16), ("gemma3", 62, 16), ("gemma3", 34, 32)])
def test_gemma_of_27b_scales_attention_by_its_width(opened, case, layers, scalar):
    """llama.cpp recognizes these models by their number of layers. They scale by width / heads = 64 / 4, not by the
    head size of 32.
    """
    file = changed(opened(case), **{".block_count": layers})
    assert gguf.read_config(file).query_pre_attn_scalar == scalar
