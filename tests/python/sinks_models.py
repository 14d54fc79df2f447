"""Tiny models whose attention has learned sinks or a softcap that affect every logit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_families
import tiny_models

SOFTCAP = 0.8
"""The softcap of the tiny models. Published models have 50, which would hardly change the scores of random weights."""

WINDOW = 64
"""Number of positions that a window contains."""

_HEADS = {"head_dim": 32}
"""Rows have 32 elements, which fit every kind of storage format."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # The first layer has a window, the second has full history.
    "gemma2": ("gemma2", {**_HEADS, "attn_logit_softcapping": SOFTCAP}),
    "vaultgemma": ("vaultgemma", {**_HEADS, "attn_logit_softcapping": SOFTCAP}),
    # The first layer has full history, the second has a window.
    "granite-swa": ("granite_swa", {"hidden_size": 128}),
    # Mixtures of experts.
    "gpt-oss": ("gpt_oss", _HEADS),
    "flint": ("flint", _HEADS),
}
"""Name -> family of transformers, and changes to the settings of its tiny model."""


def model(name: str, *, plain: bool = False) -> Any:
    """Return the model ``name`` with random weights in float32, with transformers' own attention.

    With ``plain``, sinks and softcap have no effect.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from etkv.export import attention

    attention.register()
    family, changes = FAMILIES[name]
    config = tiny_families.config(family, max_position_embeddings=512, sliding_window=WINDOW, **changes)
    if plain and "attn_logit_softcapping" in changes:
        config.attn_logit_softcapping = None
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for at, parameter in made.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if at.endswith(".sinks"):
                # Without ``plain``, a sink has about the same weight as all keys of a window.
                parameter.copy_(-1e4 if plain else 2.5 + torch.randn_like(parameter))
    return made


def write(name: str, folder: Path) -> Path:
    """Write the model ``name`` with a tokenizer as a Hugging Face folder, and return the folder."""
    model(name).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder
