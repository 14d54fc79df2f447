"""Writes a model with the shapes of a published one. Its weights repeat, so that they compress well.

``python benches/repeating_model.py llama-3.2-1b FOLDER`` writes a Hugging Face folder in bfloat16: config.json,
model.safetensors, and a tokenizer whose ids are the bytes of the text. Steps take as long as with trained weights,
and a program of 2.5 GB compresses to a few MB. The model's answers are meaningless.

Every tensor repeats a sequence of random values. The length of the sequence differs from tensor to tensor, so that no
two tensors are equal: a program would store equal tensors once. The length is a multiple of 64, so that quantized
groups repeat too.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BOS, EOS = 256, 257
"""Ids that follow the ids of the bytes."""

POSITIONS = 16384
"""The context of every model, and of a program that is exported with ``--max-context``: enough for 8,192 tokens and
an answer."""

SHAPES = {
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 500000.0,
    },
    # The text part.
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
        "full_attention_interval": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "rms_norm_eps": 1e-6,
    },
    # A minimal model, for trials of the benchmark.
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rope_theta": 10000.0,
    },
}
"""Name -> settings in config.json of the published model."""


def config(name: str) -> dict:
    """Returns the settings in config.json of the model ``name``, a key of ``SHAPES``."""
    shape = {"model_type": "llama", "rms_norm_eps": 1e-5, **SHAPES[name]}
    return {
        **shape,
        "architectures": ["LlamaForCausalLM" if shape["model_type"] == "llama" else "Qwen3_5ForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def tensors(settings: dict) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's tensors, in the order of the file. The head is tied to the embedding."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def values(shapes: dict[str, tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Yields each tensor's values, flattened, as bfloat16 bits in unsigned integers. Norms are ones."""
    rng = np.random.default_rng(1)
    for number, dims in enumerate(shapes.values()):
        n = int(np.prod(dims))
        if len(dims) == 1:
            pattern = np.ones(64, np.float32)
        else:
            pattern = rng.normal(0.0, 0.02, 4096 + 64 * number).astype(np.float32)
        # The upper half of a float32 is a bfloat16, rounded towards zero.
        yield np.resize((pattern.view(np.uint32) >> 16).astype("<u2"), n)


def tokenizer() -> dict:
    """Returns the contents of tokenizer.json: the ids are the bytes, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The characters that byte-level tokenizers use for bytes: a printable byte is represented by itself.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    return json.loads(made.to_str())


def write(name: str, folder: Path) -> Path:
    """Writes the model ``name``, a key of ``SHAPES``, to ``folder``, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = config(name)
    shapes = tensors(settings)
    header: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, dims in shapes.items():
        size = 2 * int(np.prod(dims))
        header[tensor] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, offset + size]}
        offset += size
    # The values must begin at a multiple of 8 bytes, so the header is padded with spaces.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in values(shapes):
            file.write(array.tobytes())
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    # config.json is written last: a folder with config.json is complete.
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return folder


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write(arguments.name, arguments.folder)


if __name__ == "__main__":
    main()
