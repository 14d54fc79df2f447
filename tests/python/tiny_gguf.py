"""Writes tiny models as GGUF files, in the layout of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tiny_gguf_layouts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's token types."""

_INTERLEAVED = ("arcee", "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "olmo", "smollm3")
_SHIFTED_NORMS = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
_SIZES = {
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_inner": "feed_forward_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
"""Names of settings in a configuration -> keys of an architecture."""


class Case(NamedTuple):
    """A model, and its file if that differs from a plain one. The case's name begins with the architecture."""

    family: str
    """The family in transformers."""
    settings: Mapping[str, Any] = {}
    keys: Mapping[str, Any] = {}
    tensors: Mapping[str, Any] = {}


def write(
    folder: Path,
    file: Path,
    pre_tokenizer: str = "smollm",
    *,
    architecture: str = "llama",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    tensors_of_a_part: int = 0,
    quantize: str | None = None,
) -> Path:
    """Write the model in ``folder`` to ``file`` with float32 weights and return ``file``.

    ``pre_tokenizer`` is the name of the pre-tokenizer in the file. ``keys`` and ``tensors`` are added, and replace
    existing ones. A key with a leading dot belongs to the architecture. ``None`` omits a key or a tensor.
    ``tensors_of_a_part`` splits the model into parts with that many tensors, with llama.cpp's file names. ``quantize``
    is the format of matrices whose rows have a multiple of 32 elements.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    values = _sizes(config, architecture) | _tokenizer(folder, config, pre_tokenizer)
    values |= tiny_gguf_layouts.keys(architecture, _state(folder))
    values |= {f"{architecture}{key}" if key.startswith(".") else key: value for key, value in (keys or {}).items()}
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=tensors_of_a_part)
    for key, value in values.items():
        if value is not None:
            add(writer, key, value)
    for name, weight in {**_weights(folder, config, architecture), **(tensors or {})}.items():
        values = np.ascontiguousarray(weight, dtype=np.float32)
        if quantize is None or values.ndim == 1 or values.shape[-1] % 32:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer, key: str, value: Any) -> None:
    """Write ``key`` with the type of ``value``: a boolean, an integer, a number, a text or a list."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _sizes(config: dict, architecture: str) -> dict[str, Any]:
    sizes = {key: config.get(name) for name, key in _SIZES.items() if config.get(name) is not None}
    head_dim = config.get("head_dim")
    if head_dim is not None and architecture not in ("granite", "granitemoe"):
        sizes |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    rope = config.get("rope_parameters") or {}
    base = rope.get("rope_theta") or (rope.get("full_attention") or {}).get("rope_theta")
    if base is not None:
        sizes["rope.freq_base"] = float(base)
    if architecture in ("llama", "granite", "granitemoe"):
        sizes["rope.dimension_count"] = head_dim or config["hidden_size"] // config["num_attention_heads"]
    if "partial_rotary_factor" in rope:
        head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
        sizes["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    return {f"{architecture}.{key}": value for key, value in sizes.items()}


def _tokenizer(folder: Path, config: dict, pre_tokenizer: str) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = {index: text for text, index in tokenizer["model"]["vocab"].items()} | special
    # Add a token of two spaces, so that the ids depend on how text is split.
    texts[len(texts)] = "ĠĠ"
    # The vocabulary of a GGUF file has as many tokens as the embedding.
    texts |= {index: f"<unused{index}>" for index in range(len(texts), config["vocab_size"])}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        "tokenizer.ggml.tokens": [texts[index] for index in range(config["vocab_size"])],
        "tokenizer.ggml.token_type": [CONTROL if index in special else NORMAL for index in range(config["vocab_size"])],
        "tokenizer.ggml.merges": ["Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def _state(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    return {name: weight.float().numpy() for name, weight in load_file(folder / "model.safetensors").items()}


def _weights(folder: Path, config: dict, architecture: str) -> dict[str, np.ndarray]:
    """Return the weights by their names in GGUF files, with elements in llama.cpp's order."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    written: dict[str, np.ndarray] = {}
    for name, parameter in model.state_dict().items():
        if name in tied:
            continue
        weight = parameter.numpy()
        own = tiny_gguf_layouts.stored(architecture, model.config, name, weight)
        if own is not None:
            written |= own
            continue
        layer = next((part for part in name.split(".") if part.isdigit()), "")
        if name.endswith(("experts.gate_up_proj", "shared_mlp.input_linear.weight")):
            kind = "exps" if "experts" in name else "shexp"
            gate, up = np.split(weight, 2, axis=-2)
            written |= {f"blk.{layer}.ffn_gate_{kind}.weight": gate, f"blk.{layer}.ffn_up_{kind}.weight": up}
        elif name.endswith("experts.down_proj"):
            written[f"blk.{layer}.ffn_down_exps.weight"] = weight
        elif name.endswith("block_sparse_moe.router.weight"):
            written[f"blk.{layer}.ffn_gate_inp.weight"] = weight
        elif "projections." in name:
            # Projections of Gemma 3n are in one tensor, in the order of their numbers.
            key = "altup_unembd_proj.weight" if "unembed" in name else "altup_proj.weight"
            written[key] = np.concatenate([written[key], weight[None]]) if key in written else weight[None]
        elif "_layernorm.norms." in name:
            key = f"blk.{layer}.attn_{name.split('_layernorm')[0][-1]}_norm.weight"
            written[key] = np.concatenate([written[key], weight[None]]) if key in written else weight[None]
        else:
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            written["output.weight" if name == "lm_head.weight" else known] = _stored(
                architecture, config, name, weight
            )
    return written


def _stored(architecture: str, config: dict, name: str, weight: np.ndarray) -> np.ndarray:
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    for projection, count in heads.items():
        if architecture in _INTERLEAVED and f"{projection}." in name:
            return _interleaved(weight, count)
    if architecture in _SHIFTED_NORMS and name.endswith(("norm.weight", "layernorm.weight")):
        return weight + 1
    if architecture == "gpt2" and weight.ndim == 2 and ".h." in name:
        return weight.T
    if architecture == "gptneox" and "query_key_value" in name:
        apart = weight.reshape(config["num_attention_heads"], 3, -1, *weight.shape[1:])
        return np.concatenate([apart[:, part].reshape(-1, *weight.shape[1:]) for part in range(3)])
    return weight


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of a projection in the order of llama.cpp's rotary embedding, with interleaved halves of a head."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
