"""Reads the parts of GGUF files that transformers leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from etkv.errors import EtkvError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MAGIC = b"GGUF"


def check_magic(path: Path) -> None:
    """Raise :class:`EtkvError` if ``path`` cannot be read or is not a GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise EtkvError(f"file {path} cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        raise EtkvError(f"file {path} is not a GGUF file: it begins with {magic!r}, not with {_MAGIC!r}")


def restore_pre_tokenizer(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make ``tokenizer`` split text by the file's ``tokenizer.ggml.pre``, if transformers does not do so.

    A GGUF file names its pre-tokenizer, and transformers uses GPT-2's for a name that it does not support. SmolLM's
    separates every digit first. Without that, white space before a digit becomes other tokens than the model was
    trained on.
    """
    if _pre_tokenizer_name(path) != "smollm":
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def forget_quantization(model: PreTrainedModel) -> None:
    """Mark a model whose weights transformers has dequantized as not quantized.

    ``save_pretrained`` refuses a model that is marked as quantized.
    """
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _pre_tokenizer_name(path: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())
