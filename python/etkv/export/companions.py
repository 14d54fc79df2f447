"""The files beside a program that a runner needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUIRED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
"""Files beside every program."""

OPTIONAL = ("chat_template.jinja",)
"""Files beside a program if the model has them."""


def write(folder: Path, tokenizer: PreTrainedTokenizerBase, generation: dict[str, Any]) -> list[str]:
    """Write the files to ``folder`` and return their names."""
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    return [name for name in (*REQUIRED, *OPTIONAL) if (folder / name).is_file()]
