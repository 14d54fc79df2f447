"""Tiny random-weight models of the families that the exporter supports, built in seconds.

Each one is a complete Hugging Face folder: configuration, float32 safetensors weights, a byte-level tokenizer and a
chat template, so that everything that works on a published model works on it.

From a shell, ``python tests/python/tiny_models.py OUTDIR`` writes every model to ``OUTDIR/<name>/``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from etkv.export import hf_folder

VOCABULARY = 320
"""Number of ids: 256 bytes, three special tokens, and unused ids."""

BOS, EOS, IM_START = 256, 257, 258

CONTEXT = 2048
"""Positions of a model: enough for the longest texts of the runners' tests."""

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    # With random weights of this size, logits of different tokens differ clearly, so greedy ids do not depend on the
    # last bit.
    "initializer_range": 0.2,
}
"""Arguments that the configurations of all families have in common."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(name: str, **settings):
    """Return a configuration of transformers' class ``name`` with :data:`SHAPE` and ``settings``."""
    import transformers

    return getattr(transformers, name)(**{**SHAPE, **settings})


CONFIGS = {
    "tiny-llama": lambda: config("LlamaConfig", tie_word_embeddings=True),
    "tiny-llama-untied": lambda: config("LlamaConfig", tie_word_embeddings=False, num_key_value_heads=1),
    "tiny-llama3": lambda: config(
        "LlamaConfig",
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "tiny-qwen2": lambda: config("Qwen2Config", tie_word_embeddings=True),
    "tiny-qwen3": lambda: config("Qwen3Config", head_dim=32, tie_word_embeddings=True),
    # Windows in every layer, and in only the second layer.
    "tiny-mistral-window": lambda: config("MistralConfig", head_dim=16, tie_word_embeddings=True, sliding_window=64),
    "tiny-qwen2-mixed": lambda: config(
        "Qwen2Config", tie_word_embeddings=True, use_sliding_window=True, sliding_window=64, max_window_layers=1
    ),
    "tiny-qwen3-untied": lambda: config("Qwen3Config", head_dim=32, tie_word_embeddings=False),
    # The first layer has a window, the second has full history. Their rotary bases differ.
    "tiny-gemma3": lambda: config(
        "Gemma3TextConfig", head_dim=32, query_pre_attn_scalar=24, sliding_window=64, sliding_window_pattern=2
    ),
    "tiny-phi": lambda: config("PhiConfig", tie_word_embeddings=False),
    "tiny-phi3": lambda: config(
        "Phi3Config",
        tie_word_embeddings=False,
        sliding_window=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    # The second layer has no rotary embedding.
    "tiny-smollm3": lambda: config("SmolLM3Config", no_rope_layer_interval=2),
    "tiny-mixtral": lambda: config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    # The second layer has no experts.
    "tiny-qwen3-moe": lambda: config(
        "Qwen3MoeConfig",
        **{"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64},
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}
"""Model name -> function that returns its transformers configuration."""

MIXTURES = ("tiny-mixtral", "tiny-qwen3-moe")
"""The models that are mixtures of experts."""


def write(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the model ``name`` (a key of :data:`CONFIGS`) with weights from ``seed`` to ``folder`` and return it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases start as ones and zeros. With these, a wrongly applied norm or bias would have no
            # effect.
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    hf_folder.name_for_mlx_lm(folder / "config.json")
    return folder


def tokenizer():
    """Return a tokenizer whose ids are the bytes of the text, with ChatML's two special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel.alphabet()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The byte-level alphabet, ordered by the bytes that its letters stand for.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(sorted(set(range(256)) - set(printable))):
        order[byte] = chr(256 + offset)
    assert set(order.values()) == set(letters)
    raw = Tokenizer(models.BPE(vocab={order[byte]: byte for byte in range(256)}, merges=[]))
    raw.pre_tokenizer = byte_level
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_end|>", "<|im_start|>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=_CHAT_TEMPLATE,
    )


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: tiny_models.py OUTDIR", file=sys.stderr)
        return 2
    for name in CONFIGS:
        print(write(name, Path(arguments[0]) / name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
