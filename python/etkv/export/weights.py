"""Finds the weights of a folder, and refuses checkpoints with weights that an export would silently drop."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from etkv.export.published import Checkpoint

_CHECKPOINTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The checkpoints that transformers looks for, in order. It reads the first that exists."""

_OF_TRAINING = re.compile(r"(training_args|optimizer|scheduler|rng_state.*|random_states.*)\.bin")
"""Files that a training leaves beside its weights."""

_COPIES = re.compile(
    r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?|consolidated(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
"""The same weights in another format. Many published folders have them beside the weights that transformers reads."""

_WITHOUT_EFFECT = re.compile(
    # Models compute these: frequencies, positions, and causal masks that were once buffers.
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|(.*\.)?position_ids"
    r"|(.*\.)?(attn|attention|self_attn|self_attention)\.(bias|masked_bias)"
    # A language model without images and audio omits these.
    r"|(.*\.)?(vision_tower|vision_model|vision_embed_tokens|visual|audio_tower|multi_modal_projector|embed_vision"
    r"|embed_audio|image_newline)(\..*)?"
    # Other predictions than the next token: a value, a class, tokens after the next.
    r"|(score|v_head|classifier)\..*"
    r"|(.*\.)?mtp\..*"
)
"""Names of weights that may have no place in the model: its logits do not depend on them."""

_MASK = re.compile(r"(.*\.)?(attn|attention|self_attn|self_attention)\.bias")
"""Names of masks that were once buffers, and of biases."""

_SETTINGS = ("quantization_config", "compression_config")
"""Where a configuration has the settings of a quantization. The second name is that of older packages."""

_NAMED = 3
"""The most names of weights in a message. Other weights are counted."""


def find_files(folder: Path) -> list[Path]:
    """Return the files of weights of ``folder``, those that transformers reads.

    It may have one checkpoint, whole or in shards, and no adapter. Raises :class:`EtkvError` if it has weights that
    transformers would not read, or lacks weights that it names.
    """
    adapters = sorted(
        file.name for file in folder.glob("adapter_*") if file.suffix in (".json", ".safetensors", ".bin")
    )
    if adapters:
        raise EtkvError(
            f"folder {folder} has an adapter ({', '.join(adapters)}), which the program would lack: merge it into the "
            "weights and export those, or move it out of the folder"
        )
    checkpoint = next((name for name in _CHECKPOINTS if (folder / name).is_file()), None)
    if checkpoint is None:
        raise EtkvError(
            f"folder {folder} has no weights under a name that transformers reads: {', '.join(_CHECKPOINTS)}"
        )
    read = {checkpoint}
    if checkpoint.endswith(".json"):
        read |= (shards := _shards(folder / checkpoint))
        absent = sorted(name for name in shards if not (folder / name).is_file())
        if absent:
            raise EtkvError(f"folder {folder} lacks {_few(absent)}, of the weights that its {checkpoint} names")
    there = {file.name for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern)}
    there |= {name for name in _CHECKPOINTS if (folder / name).is_file()}
    unread = sorted(name for name in there - read if not _OF_TRAINING.fullmatch(name) and not _COPIES.fullmatch(name))
    if unread:
        raise EtkvError(
            f"folder {folder} has weights beside those of its {checkpoint}, which the program would lack: move "
            f"{_few(unread)} out of the folder"
        )
    return sorted(folder / name for name in read if not name.endswith(".json"))


def _shards(index: Path) -> set[str]:
    """Return the names of the files that an index names."""
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise EtkvError(f"{index} is no index of weights: {first_line(error)}") from error


def read_quantized(path: Path, files: list[Path], config: PreTrainedConfig) -> Checkpoint | None:
    """Return the weights in ``files`` of the folder ``path``, decoded as they are read; None if they are plain.

    Reads the sizes of tensors only. Raises :class:`EtkvError` for a quantization that cannot be decoded.
    """
    from etkv.export import published

    settings = _quantization_settings(config)
    if not settings:
        published.check_plain(path, files, _WITHOUT_EFFECT)
        return None
    return published.read(path, files, quantization(config), settings, _WITHOUT_EFFECT)


def check_loaded(path: Path, model: PreTrainedModel, report: dict[str, Any], dropped: range) -> None:
    """Raise :class:`EtkvError` unless the weights of ``path`` and of ``model`` match one to one.

    ``report`` is transformers' report of what it loaded. Weights of the layers ``dropped`` need no place.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise EtkvError(f"{path} lacks {len(missing)} weights of its model, the first is {missing[0]}")
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise EtkvError(
            f"{path} has {len(mismatched)} weights of another shape than its configuration says, the first is {name}: "
            f"{list(found)}, expected {list(expected)}"
        )
    masks = _masks(path, report["unexpected_keys"])
    unexpected = sorted(
        name
        for name in report["unexpected_keys"]
        if (not _WITHOUT_EFFECT.fullmatch(name) or (_MASK.fullmatch(name) and name not in masks))
        and _layer(name) not in dropped
    )
    if unexpected:
        raise EtkvError(
            f"{path} has {len(unexpected)} weights that model family {model.config.model_type!r} has no place for with "
            f"this configuration, and that the program would lack: {_few(unexpected)}; mend config.json, or take them "
            "out of the checkpoint"
        )


def unreadable(path: Path, error: Exception) -> EtkvError:
    """Return the error for weights that transformers cannot load."""
    line = f"{first_line(error)} is missing" if isinstance(error, KeyError) else first_line(error)
    return EtkvError(f"the weights of {path} cannot be loaded: {line}")


def quantization(config: PreTrainedConfig) -> str | None:
    """Return the method by which a checkpoint is quantized; None if it is not."""
    settings = _quantization_settings(config)
    if not settings:
        return None
    return str(settings.get("quant_method") or "by a method that it does not name")


def plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of ``config`` that says nothing of a quantization."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        for name in _SETTINGS:
            if hasattr(part, name):
                delattr(part, name)
    return config


def _quantization_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of the quantization of a checkpoint; empty if it has none."""
    for part in (config, config.get_text_config()):
        for name in _SETTINGS:
            settings = getattr(part, name, None)
            if settings:
                return dict(settings if isinstance(settings, dict) else settings.to_dict())
    return {}


def _layer(name: str) -> int | None:
    """Return the layer of the weight ``name``, or None."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _masks(path: Path, names: Iterable[str]) -> set[str]:
    """Return the ``names`` that are masks ``[.., n, n]``, by the shapes in the files of ``path``."""
    import torch
    from safetensors import safe_open

    wanted = {name for name in names if _MASK.fullmatch(name)}
    found: set[str] = set()
    for file in path.glob("*.safetensors") if wanted else ():
        with safe_open(file, framework="numpy") as weights:
            for name in wanted & set(weights.keys()):
                if _is_square(weights.get_slice(name).get_shape()):
                    found.add(name)
    for file in path.glob("*.bin") if wanted - found else ():
        # Only sizes are read.
        tensors = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        found |= {name for name in wanted & set(tensors) if _is_square(tensors[name].shape)}
    return found


def _is_square(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and shape[-1] == shape[-2]


def _few(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
