"""Tiny random-weight models of the families that ExecuTorch's own MLX exporters support but etkv's exporter does not.

They are complete Hugging Face folders, like those of :mod:`tiny_models`, with the processors that the exporters load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import tiny_models
from tiny_models import BOS, EOS, SHAPE, VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEL_BINS, FRAMES = 16, 100
"""The shape of Whisper's input: one second of audio."""

WHISPER_SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
WHISPER_IDS = {text: 256 + index for index, text in enumerate(WHISPER_SPECIAL)}

AUDIO = 260
"""The id of an audio token in Voxtral's texts."""

TAPPED = (0, 2)
"""Layers of the target whose hidden states the DFlash draft reads."""

MASK = 259
"""The id of the mask token, for which the DFlash draft proposes a token."""


def _gemma4(**overrides):
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **{
            **SHAPE,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 64,
            "head_dim": 32,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            **overrides,
        }
    )


def _whisper():
    from transformers import WhisperConfig

    return WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=MEL_BINS,
        max_source_positions=FRAMES // 2,
        max_target_positions=128,
        init_std=0.2,
        decoder_start_token_id=WHISPER_IDS["<|startoftranscript|>"],
        bos_token_id=WHISPER_IDS["<|endoftext|>"],
        eos_token_id=WHISPER_IDS["<|endoftext|>"],
        pad_token_id=WHISPER_IDS["<|endoftext|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def _qwen3_target():
    from transformers import Qwen3Config

    return Qwen3Config(**{**SHAPE, "num_hidden_layers": 4, "head_dim": 32, "tie_word_embeddings": True})


def _gemma4_31b():
    """Return a configuration with the parts of Gemma 4 31B: full layers have fewer and wider heads, and use keys as
    values.

    With a window of 32, the ring wraps around within a test. Full layers rotate all dimensions, because with a partial
    rotation the exporter rotates the wrong ones. The output layer has separate weights, as in the exporter's
    checkpoints: a random model with tied weights would repeat one token.
    """
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **{**SHAPE, "hidden_size": 128, "num_hidden_layers": 4},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32, "head_dim": 64},
        **{"global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "tie_word_embeddings": False},
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.0, "rope_theta": 1_000_000.0},
        },
    )


TEXT = {
    # The last two layers share the keys and values of the first two.
    "tiny-gemma4": lambda: _gemma4(num_kv_shared_layers=2),
    # In published models, heads of full layers are wider.
    "tiny-gemma4-wide": lambda: _gemma4(num_kv_shared_layers=2, global_head_dim=64),
    "tiny-gemma4-31b": _gemma4_31b,
    "tiny-dflash-target": _qwen3_target,
}
"""Model name -> function that returns its transformers configuration, for text models."""

NAMES = (*tiny_models.CONFIGS, *TEXT, "tiny-whisper", "tiny-voxtral", "tiny-dflash-draft")


def sound(seconds: int = 1) -> np.ndarray:
    """Return a recording at 16 kHz: a rising tone and noise."""
    time = np.arange(16_000 * seconds) / 16_000
    noise = np.random.default_rng(0).normal(0, 0.1, len(time))
    return (np.sin(2 * np.pi * (200 + 300 * time / seconds) * time) + noise).astype(np.float32)


def write(name: str, folder: Path) -> Path:
    """Write the model ``name``, one of :data:`NAMES`, to ``folder`` and return it."""
    if name in tiny_models.CONFIGS:
        return tiny_models.write(name, folder)
    import torch

    torch.manual_seed(0)
    if name == "tiny-whisper":
        return _write_whisper(folder)
    if name == "tiny-voxtral":
        return _write_voxtral(folder)
    if name == "tiny-dflash-draft":
        return _write_dflash_draft(folder)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(TEXT[name](), dtype=torch.float32)
    if name == "tiny-gemma4-31b":
        _scale_scores(model)
    _write(model, folder)
    tiny_models.tokenizer().save_pretrained(folder)
    if name == "tiny-gemma4-31b":
        _write_quantized(folder)
    return folder


def _write(model: PreTrainedModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _move_vectors(model)
    model.save_pretrained(folder)


def _move_vectors(model) -> None:
    """Change norms and biases from ones and zeros, so that a wrongly applied norm or bias has an effect."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _scale_scores(model: PreTrainedModel) -> None:
    """Scale the norms so that scores are divided by the root of the head size: Gemma 4 has no other scale."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(len(parameter) ** -0.25)


def _write_quantized(folder: Path) -> None:
    """Write the checkpoint of Gemma 4 31B that ExecuTorch's exporter reads, to ``quantized`` in its folder.

    ExecuTorch's own command fixes the group size of the embedding to the width of the published model. This function
    calls the same functions with the width of this model.
    """
    from executorch.examples.models.gemma4_31b.model import _hf_to_model_key
    from executorch.extension.llm.export.quant import QuantConfig, QuantRecipe, QuantRule, quantize_stream
    from safetensors.torch import load_file, save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    config = json.loads((folder / "config.json").read_text())
    whole_row = QuantConfig(bits=8, group_size=config["hidden_size"], symmetric=True, method="min_max")
    groups = QuantConfig(bits=4, group_size=32, symmetric=False, method="min_max")
    recipe = QuantRecipe(
        [
            QuantRule(r"embed_tokens\.weight", whole_row),
            QuantRule(r".*(norm\.weight|layer_scalar)", None),
            QuantRule(r".*\.weight", groups),
        ]
    )
    weights = {_hf_to_model_key(name): weight for name, weight in load_file(folder / "model.safetensors").items()}
    made = dict(quantize_stream(weights.items(), recipe))
    tensors, metadata = flatten_tensor_state_dict(made)
    (folder / "quantized").mkdir()
    save_file(tensors, folder / "quantized" / "model.safetensors", metadata=metadata)
    # The exporter reads these entries from where older versions of transformers wrote them.
    flat = {"global_head_dim": 128, "num_global_key_value_heads": 1}
    (folder / "quantized" / "config.json").write_text(json.dumps({**config, **flat}))


def _write_whisper(folder: Path) -> Path:
    from transformers import (
        AddedToken,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    _write(WhisperForConditionalGeneration(_whisper()).eval(), folder)
    letters = json.loads(tiny_models.tokenizer().backend_tokenizer.to_str())["model"]["vocab"]
    tokenizer = WhisperTokenizer(vocab=letters, merges=[])
    tokenizer.add_tokens([AddedToken(text, special=True) for text in WHISPER_SPECIAL], special_tokens=True)
    # One second of audio. The model reads two frames of 10 ms for each position.
    extractor = WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1)
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


def _write_voxtral(folder: Path) -> Path:
    """Write a Voxtral for pieces of 30 seconds, as the exporter's preprocessor returns them, with 75 tokens each."""
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    encoder = {
        **{"hidden_size": 64, "intermediate_size": 1280, "num_hidden_layers": 2, "num_attention_heads": 4},
        "initializer_range": 0.1,
    }
    text = {**SHAPE, "model_type": "llama", "max_position_embeddings": 512}
    config = VoxtralConfig(audio_config=encoder, text_config=text, audio_token_id=AUDIO, projector_hidden_act="gelu")
    _write(VoxtralForConditionalGeneration(config).eval(), folder)
    return folder


def _write_dflash_draft(folder: Path) -> Path:
    """Write a draft for ``tiny-dflash-target`` in the published form: without embedding and output layer."""
    from executorch.backends.mlx.examples.llm.dflash.model import DFlashDraftModel, load_dflash_config
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **{name: size for name, size in SHAPE.items() if not name.endswith("_token_id")},
        "model_type": "qwen3",
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "block_size": 5,
        "dflash_config": {"target_layer_ids": list(TAPPED), "mask_token_id": MASK},
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = DFlashDraftModel(load_dflash_config(folder))
    _move_vectors(model)
    left_out = ("embed_tokens.", "lm_head.")
    save_file({k: v for k, v in model.state_dict().items() if not k.startswith(left_out)}, folder / "model.safetensors")
    return folder


__all__ = ["BOS", "EOS", "NAMES", "TEXT", "write"]
