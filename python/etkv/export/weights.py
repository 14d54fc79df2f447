"""Finds the weights of a folder, and refuses checkpoints with weights that an export would silently ignore."""

from __future__ import annotations

import copy
import json
import re
import traceback
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
"""The checkpoints that transformers looks for, in order. transformers reads the first one that exists."""

_OF_TRAINING = re.compile(r"(training_args|optimizer|scheduler|rng_state.*|random_states.*)\.bin")
"""Files that training leaves next to the weights."""

_COPIES = re.compile(
    r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?|consolidated(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
"""The same weights in other formats. Many published folders have them next to the weights that transformers reads."""

_WITHOUT_EFFECT = re.compile(
    # Models compute these: frequencies, positions, and causal masks that were once buffers.
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|(.*\.)?position_ids"
    r"|(.*\.)?(attn|attention|self_attn|self_attention)\.(bias|masked_bias)"
    # These are for images and audio, which a language model does not use.
    r"|(.*\.)?(vision_tower|vision_model|vision_embed_tokens|visual|audio_tower|multi_modal_projector|embed_vision"
    r"|embed_audio|image_newline)(\..*)?"
    # These predict something other than the next token: a value, a class, or tokens after the next.
    r"|(score|v_head|classifier)\..*"
    r"|(.*\.)?mtp\..*"
)
"""Names of weights that the model may lack, because logits do not depend on them."""

_MASK = re.compile(r"(.*\.)?(attn|attention|self_attn|self_attention)\.bias")
"""Names of masks that were once buffers, and of biases."""

_SETTINGS = ("quantization_config", "compression_config", "quantization")
"""The entries of a configuration with the settings of a quantization. The second name is that of older packages."""

_NAMED = 3
"""Maximum number of names of weights in a message. Further weights are counted."""


def find_files(folder: Path) -> list[Path]:
    """Return the files of ``folder`` from which transformers reads weights.

    Raises :class:`EtkvError` if the folder has an adapter, weights that transformers would not read, or an index with
    files that are missing.
    """
    adapters = sorted(
        file.name for file in folder.glob("adapter_*") if file.suffix in (".json", ".safetensors", ".bin")
    )
    if adapters:
        raise EtkvError(
            f"folder {folder} has an adapter ({', '.join(adapters)}), which an export would ignore: merge it into the "
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
            raise EtkvError(f"folder {folder} lacks {_few(absent)}, which its {checkpoint} lists")
    there = {file.name for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern)}
    there |= {name for name in _CHECKPOINTS if (folder / name).is_file()}
    # mlx-lm also writes an index for a single file.
    there -= {name for name in there - read if name.endswith(".json") and _shards(folder / name) <= read}
    unread = sorted(name for name in there - read if not _OF_TRAINING.fullmatch(name) and not _COPIES.fullmatch(name))
    if unread:
        raise EtkvError(
            f"folder {folder} has more weights than those of its {checkpoint}, which an export would ignore: move "
            f"{_few(unread)} out of the folder"
        )
    return sorted(folder / name for name in read if not name.endswith(".json"))


def _shards(index: Path) -> set[str]:
    """Return the names of the files that an index lists."""
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise EtkvError(f"{index} is not an index of weights: {first_line(error)}") from error


def read_quantized(path: Path, files: list[Path], config: PreTrainedConfig) -> Checkpoint | None:
    """Return the quantized weights in ``files`` of the folder ``path``. A weight is decoded when it is read.

    Return None if they are not quantized. Reads only the sizes of tensors. Raises :class:`EtkvError` for a quantization
    that cannot be decoded.
    """
    from etkv.export import published

    settings = _quantization_settings(path, config)
    if not settings:
        published.check_plain(path, files, _WITHOUT_EFFECT)
        return None
    return published.read(path, files, _method(settings), settings, _WITHOUT_EFFECT)


def check_loaded(path: Path, model: PreTrainedModel, report: dict[str, Any], dropped: range) -> None:
    """Raise :class:`EtkvError` unless the weights of ``path`` and of ``model`` match one to one.

    ``report`` is transformers' report of the loaded weights. The model may lack weights of the layers ``dropped``.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise EtkvError(
            f"{path} lacks {len(missing)} weights of its model: {_few(missing)}; download it again, or correct its "
            "config.json"
        )
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise EtkvError(
            f"{path} has {len(mismatched)} weights whose shape differs from its configuration, the first is {name}: "
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
            f"{path} has {len(unexpected)} weights that model family {model.config.model_type!r} does not have with "
            f"this configuration, and that an export would ignore: {_few(unexpected)}; correct config.json, or remove "
            "them from the checkpoint"
        )


def unreadable(path: Path, error: Exception) -> EtkvError:
    """Return the error for weights that transformers cannot load."""
    line = first_line(error)
    if _is_of_construction(error):
        return EtkvError(f"the model of {path} cannot be built from its config.json: {line}")
    return EtkvError(f"the weights of {path} cannot be loaded: {line}")


def _is_of_construction(error: Exception) -> bool:
    """Return whether ``error`` comes from the constructor of a module, which knows only the configuration."""
    import torch

    return any(
        frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _method(settings: dict[str, Any]) -> str:
    """Return the method of a checkpoint's quantization."""
    if "quant_method" not in settings and {"bits", "group_size"} <= settings.keys():
        return "mlx"
    return str(settings.get("quant_method") or "by a method that it does not name")


def plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of ``config`` without settings of a quantization."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        for name in _SETTINGS:
            if hasattr(part, name):
                delattr(part, name)
    return config


def _quantization_settings(path: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a checkpoint's quantization; empty if it is not quantized.

    Raises :class:`EtkvError` if an entry of the configuration with settings is not a mapping.
    """
    found: dict[str, Any] = {}
    for part in (config, config.get_text_config()):
        for name in _SETTINGS:
            settings = getattr(part, name, None)
            if settings is None:
                continue
            # transformers may have made an object of the settings.
            settings = settings.to_dict() if hasattr(settings, "to_dict") else settings
            _check_mapping(path, name, settings)
            found = found or settings
    return dict(found)


def check_config(folder: Path) -> None:
    """Raise :class:`EtkvError` if the settings of a quantization in ``config.json`` are not a mapping.

    transformers would fail with a message that does not name the entry. It reports other faults of the file.
    """
    try:
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    parts = (whole, whole.get("text_config")) if isinstance(whole, dict) else ()
    for part in parts:
        for name in _SETTINGS:
            if isinstance(part, dict) and part.get(name) is not None:
                _check_mapping(folder, name, part[name])


def _check_mapping(path: Path, name: str, settings: Any) -> None:
    if not isinstance(settings, dict):
        raise EtkvError(f"{name} in the configuration of {path} is {settings!r}, expected a mapping")


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
        # Reads only sizes.
        tensors = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        found |= {name for name in wanted & set(tensors) if _is_square(tensors[name].shape)}
    return found


def _is_square(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and shape[-1] == shape[-2]


def _few(names: list[str]) -> str:
    """Return the first names, and the number of further names."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
