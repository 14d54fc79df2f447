"""Reads the model to export: a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError, first_line
from etkv.export import gguf, weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from etkv.export.packing import Packing

_WEIGHTS = ("*.safetensors", "*.bin")

_TOKENIZER_FILES = ("token*", "vocab*", "*.model")
"""Files of tokenizers, in old and new formats."""


@dataclass(frozen=True)
class Source:
    """The source of a model.

    ``folder`` contains the files. ``gguf_file`` is the name of the GGUF file in it; ``None`` for a Hugging Face folder.
    """

    folder: Path
    gguf_file: str | None

    @property
    def path(self) -> Path:
        """Return the path of the model: the folder or the GGUF file."""
        return self.folder / self.gguf_file if self.gguf_file else self.folder

    def files(self) -> list[Path]:
        """Return the files that the export reads, in a fixed order."""
        if self.gguf_file:
            return gguf.find_files(self.path)
        wanted = (*_WEIGHTS, "*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt")
        return sorted({file for pattern in wanted for file in self.folder.glob(pattern) if file.is_file()})

    @cached_property
    def opened(self) -> gguf.GgufFile:
        """The opened GGUF file. Raises :class:`EtkvError` if it cannot be read."""
        return gguf.GgufFile(self.path)


def find(model: Path) -> Source:
    """Check the files at ``model``, and return the source. Raises :class:`EtkvError` if there is no model."""
    if model.is_dir():
        if not (model / "config.json").is_file():
            raise EtkvError(f"folder {model} has no config.json; expected a Hugging Face model folder")
        if not any(file for pattern in _WEIGHTS for file in model.glob(pattern)):
            raise EtkvError(f"folder {model} has no weights ({' or '.join(_WEIGHTS)})")
        return Source(model, None)
    if model.suffix.lower() != ".gguf":
        raise EtkvError(f"file {model} does not end in .gguf; expected a Hugging Face folder or a .gguf file")
    gguf.find_files(model)
    return Source(model.parent, model.name)


def read_config(source: Source) -> PreTrainedConfig:
    """Return the model's configuration.

    Raises :class:`EtkvError` if it cannot be read or is of a family that is not a causal language model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from etkv.export import text_part

    try:
        if source.gguf_file:
            config = gguf.read_config(source.opened)
        else:
            weights.check_config(source.folder)
            config = AutoConfig.from_pretrained(source.folder, local_files_only=True)
    except EtkvError:
        raise
    except Exception as error:
        raise EtkvError(f"the configuration of {source.path} cannot be read: {_why_invalid(error)}") from error
    _name_outputs(config)
    if type(text_part.config(config)) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EtkvError(f"model family {config.model_type!r} of {source.path} is not a causal language model")
    return config


def _why_invalid(error: Exception) -> str:
    """Return the reason why transformers refuses a configuration, in one line."""
    if isinstance(error, KeyError):
        # The error has either a key or a sentence.
        missing = " ".join(map(str, error.args))
        return missing if " " in missing else f"it lacks {missing!r}"
    return first_line(error)


def _name_outputs(config: PreTrainedConfig) -> None:
    """Let the models of ``config`` return outputs by name, even if the configuration asks for tuples."""
    config.return_dict = True
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            _name_outputs(part)


def read_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, a fast tokenizer that can be written as ``tokenizer.json``.

    Raises :class:`EtkvError` if it cannot be read or is not a fast tokenizer.
    """
    from transformers import AutoTokenizer

    if source.gguf_file:
        return gguf.read_tokenizer(source.opened)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    except Exception as error:
        if not any(path for name in _TOKENIZER_FILES for path in source.folder.glob(name)):
            raise EtkvError(f"{source.path} has no tokenizer: expected tokenizer.json next to config.json") from error
        # In the message, a list of ways to get a tokenizer follows these words.
        why = first_line(error).partition(" from one of:")[0]
        raise EtkvError(f"the tokenizer of {source.path} cannot be read: {why}") from error
    if not tokenizer.is_fast:
        raise EtkvError(f"the tokenizer of {source.path} has no tokenizer.json form ({type(tokenizer).__name__})")
    return tokenizer


def read_model(
    source: Source,
    config: PreTrainedConfig,
    dtype: str,
    dropped: range = range(0),
    note: Callable[[str], None] = lambda text: None,
    packing: Packing | None = None,
    is_packed: bool = True,
) -> PreTrainedModel:
    """Return the text model of ``config`` with weights of ``dtype`` and attention that calls the KV cache op.

    ``dropped`` are the layers of the source that ``config`` leaves out. ``note`` receives remarks on behaviour of the
    publisher's runtimes, with quantized weights, that a program lacks. ``packing`` packs the weights while they are
    read, unless ``is_packed`` is False.

    Raises :class:`EtkvError` if weights are missing, unexpected or unreadable, or if the family's attention cannot be
    replaced.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from etkv.export import attention, experts, text_part
    from etkv.export.gguf.weights import read_weights as read_gguf_weights
    from etkv.export.published.weight import State

    attention.register()
    experts.register()
    quantized, state = None, None
    if source.gguf_file is None:
        try:
            quantized = weights.read_quantized(source.path, weights.find_files(source.folder), config)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise weights.unreadable(source.path, error) from error
        if quantized is not None:
            config = weights.plain(config)
    is_part = text_part.config(config) is not config
    family: Any = text_part.whole_class(config) if is_part else AutoModelForCausalLM
    origin: dict[str, Any] = {"local_files_only": True}
    try:
        if source.gguf_file:
            state = State(read_gguf_weights(source.opened, config))
        if quantized is not None:
            for remark in quantized.remarks:
                note(remark)
            state = State(quantized.weights)
        if state is not None:
            origin = {"state_dict": state}
        if state is not None and not is_part:
            family = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        taken = list if state is None else state.taken
        with packing.reading(is_packed, taken) if packing is not None else contextlib.nullcontext():
            model, report = family.from_pretrained(
                source.folder if state is None else None,
                config=config,
                dtype=getattr(torch, dtype),
                # The image part of a model may not support other attention implementations.
                attn_implementation="eager" if is_part else attention.NAME,
                output_loading_info=True,
                # The loading report then lists the mismatched sizes.
                ignore_mismatched_sizes=True,
                **origin,
            )
    except EtkvError:
        raise
    except Exception as error:
        if state is not None and state.failure is not None:
            raise state.failure from error
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            raise EtkvError(
                f"model family {config.model_type!r} cannot be exported: the KV cache op cannot replace its attention"
            ) from error
        raise weights.unreadable(source.path, error) from error
    weights.check_loaded(source.path, model, report, dropped)
    model.eval()
    if packing is not None and is_packed:
        packing.finish(model)
    if is_part:
        model = text_part.take(model)
        model.set_attn_implementation(attention.NAME)
    return model


def generation_settings(source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the contents of ``generation_config.json``, with every eos token id of model and tokenizer.

    The model's ids are those with which transformers ends a generation: from ``generation_config.json``, or else from
    the configuration, with the family's default. The token that ends a turn is often only in the model's settings or
    only in the tokenizer's. ``eos_token_id`` is a list that begins with the model's ids. ``bos_token_id`` is present if
    the model or the tokenizer has one.
    """
    from transformers import GenerationConfig

    file = source.folder / "generation_config.json"
    if source.gguf_file is None and file.is_file():
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    else:
        settings = {
            key: value
            for key, value in model.generation_config.to_dict().items()
            if key in ("bos_token_id", "eos_token_id", "pad_token_id") and value is not None
        }
    of_config = GenerationConfig.from_model_config(model.config)
    ends = settings.get("eos_token_id")
    if ends is None:
        ends = of_config.eos_token_id
    settings["eos_token_id"] = list(dict.fromkeys([*_ids(ends), *_ids(tokenizer.eos_token_id)]))
    for start in (of_config.bos_token_id, tokenizer.bos_token_id):
        if settings.get("bos_token_id") is None and start is not None:
            settings["bos_token_id"] = start
    return settings


def vocabulary_remarks(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, generation: dict[str, Any]
) -> list[str]:
    """Return remarks on tokens that the model lacks: a program refuses their ids, and never returns them."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is None:
        return []
    remarks = []
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= size)
    if beyond:
        number, token = beyond[0]
        remarks.append(
            f"the tokenizer has {len(beyond)} tokens beyond the {size} of the model, the first is {token!r} "
            f"({number}): the program refuses texts with them"
        )
    ends = generation["eos_token_id"]
    if not any(0 <= number < size for number in ends):
        which = f"eos token ids {ends} are beyond the {size} tokens of the model" if ends else "there is no eos token"
        remarks.append(f"{which}: answers end only at their limit of tokens")
    return remarks


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(item) for item in value]
