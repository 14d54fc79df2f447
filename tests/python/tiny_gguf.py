"""Writes a tiny Llama folder as a GGUF file, the way llama.cpp's converter lays one out."""

from __future__ import annotations

import json
from pathlib import Path

_NORMAL, _CONTROL = 1, 3  # llama.cpp's token types


def write(folder: Path, file: Path, pre_tokenizer: str = "smollm") -> Path:
    """Write the Llama model in ``folder`` to ``file`` with float32 weights and return ``file``.

    ``pre_tokenizer`` is the name that the file gives for its way of splitting text.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder, config, pre_tokenizer)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in weights.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for projection, count in heads.items():
            if f"{projection}.weight" in name:
                weight = _interleaved(weight, count)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer, folder: Path, config: dict, pre_tokenizer: str) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = {index: text for text, index in tokenizer["model"]["vocab"].items()} | special
    # A token of two spaces, so that how text is split shows in the ids.
    texts[len(texts)] = "ĠĠ"
    # The vocabulary of a GGUF file is as long as the embedding.
    texts |= {index: f"<unused{index}>" for index in range(len(texts), config["vocab_size"])}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([texts[index] for index in range(config["vocab_size"])])
    writer.add_token_types([_CONTROL if index in special else _NORMAL for index in range(config["vocab_size"])])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _interleaved(weight, heads: int):
    """Rows of a projection in the order that llama.cpp's rotary embedding wants: the two halves of a head in turn."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)
