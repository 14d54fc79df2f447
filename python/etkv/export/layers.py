"""Selects the layers of a model to export, and checks the layers to tap."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from etkv.errors import EtkvError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

_ONE_A_LAYER = (
    *("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "layer_rope_theta"),
    "num_attention_heads_per_layer",
)
"""Entries of a configuration that are lists with an element for each layer."""

_ATTENDING = "attn_layer_indices"
"""An entry with the indices of the attention layers."""


def keep_first(config: PreTrainedConfig, count: int | None) -> range:
    """Reduce ``config`` to the first ``count`` layers of its model; ``None`` keeps all layers.

    Returns the indices of the removed layers. Raises :class:`EtkvError` if the model has fewer layers.
    """
    if count is None:
        return range(0)
    there: int = config.get_text_config().num_hidden_layers
    if count > there:
        raise EtkvError(f"layers {count} is above the {there} layers of the model")
    _check_apart("layers", count, config)
    _keep(config, slice(count))
    return range(count, there)


def last(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Return a configuration with the last ``count`` layers of ``config``'s model. ``config`` does not change.

    Raises :class:`EtkvError` unless the model has more than ``count`` layers.
    """
    there = config.get_text_config().num_hidden_layers
    if count >= there:
        raise EtkvError(f"draft {count} is above {there - 1}, the number of layers after the first")
    _check_apart("draft", count, config)
    config = copy.deepcopy(config)
    _keep(config, slice(there - count, there))
    return config


def _check_apart(option: str, count: int, config: PreTrainedConfig) -> None:
    """Raise :class:`EtkvError` if some layers of ``config``'s model cannot run without the other layers."""
    text_config = config.get_text_config()
    if count == text_config.num_hidden_layers:
        return
    what = {
        "hidden_size_per_layer_input": "have embeddings for each layer in one weight",
        "num_kv_shared_layers": "share keys and values",
    }
    for name, shared in what.items():
        if getattr(text_config, name, 0):
            raise EtkvError(
                f"{option} {count}: layers of model family {config.model_type!r} {shared} ({name} "
                f"{getattr(text_config, name)}); export the whole model"
            )


def _keep(config: PreTrainedConfig, kept: slice) -> None:
    text_config = config.get_text_config()
    n_layers = text_config.num_hidden_layers
    text_config.num_hidden_layers = len(range(n_layers)[kept])
    begin, end, _ = kept.indices(n_layers)
    # A list may have two names in a family.
    for name in dict.fromkeys(text_config.attribute_map.get(name, name) for name in _ONE_A_LAYER):
        # A family may also compute the list from other entries.
        is_made = isinstance(getattr(type(text_config), name, None), property)
        if not is_made and getattr(text_config, name, None) is not None:
            setattr(text_config, name, list(getattr(text_config, name))[kept])
    if getattr(text_config, _ATTENDING, None) is not None:
        attending = [index - begin for index in getattr(text_config, _ATTENDING) if begin <= index < end]
        setattr(text_config, _ATTENDING, attending)


def check_taps(taps: tuple[int, ...], config: PreTrainedConfig) -> None:
    """Raise :class:`EtkvError` if one of the indices ``taps`` is not a layer of ``config``."""
    if taps and max(taps) > (last := config.get_text_config().num_hidden_layers - 1):
        raise EtkvError(f"tap-layers {max(taps)} is above {last}, the last layer of the model")


def modules(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the decoder layers of ``model``. Raises :class:`EtkvError` if the family has no list of them."""
    layers: torch.nn.ModuleList | None = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise EtkvError(f"tap-layers: model family {model.config.model_type!r} has no list of layers to tap")
    return layers
