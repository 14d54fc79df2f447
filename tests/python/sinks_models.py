"""Tiny models whose attention has learned sinks or a softcap, large enough to count in every logit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_families
import tiny_models

SOFTCAP = 0.8
"""The softcap of the tiny models. Published models have 50, which bounds few scores of random weights."""

WINDOW = 100
"""The positions of the windows."""

_HEADS = {"head_dim": 32}
"""Rows of 32 elements have a storage format of every kind."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # A window in the first layer, everything in the second.
    "gemma2": ("gemma2", {**_HEADS, "attn_logit_softcapping": SOFTCAP}),
    "vaultgemma": ("vaultgemma", {**_HEADS, "attn_logit_softcapping": SOFTCAP}),
    # The other way around.
    "granite-swa": ("granite_swa", {"hidden_size": 128}),
    # Mixtures of experts.
    "gpt-oss": ("gpt_oss", _HEADS),
    "flint": ("flint", _HEADS),
}
"""Name -> family of transformers, and what its tiny form changes."""


def model(name: str, *, plain: bool = False) -> Any:
    """Return the model ``name`` with random weights in float32, and transformers' own attention.

    ``plain`` leaves its sinks and its softcap out.
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
                # About as much weight as the keys of a window.
                parameter.copy_(-1e4 if plain else 2.5 + torch.randn_like(parameter))
    return made


def write(name: str, folder: Path) -> Path:
    """Write the model ``name`` with a tokenizer as a Hugging Face folder, and return the folder."""
    model(name).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder
