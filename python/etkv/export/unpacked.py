"""Finds the matrices of a model that are not packed, for a remark of the export with the reasons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

_NAMED = 4
"""Maximum number of kinds of matrices in a remark. Further kinds are counted."""


def remarks(modules: Iterable[tuple[str, torch.nn.Module]]) -> list[str]:
    """Return a remark on the matrices among the parameters of ``modules``; empty if there are none.

    Packed weights are not parameters.
    """
    sizes: Counter[str] = Counter()
    n, dtypes = 0, set()
    for path, module in modules:
        for name, weight in module.named_parameters(recurse=False):
            if weight.squeeze().dim() >= 2:
                kind = re.sub(r"\.\d+(?=\.)", ".*", f"{path}.{name}")
                sizes[f"{kind} ({_why(module)})"] += weight.numel()
                n += 1
                dtypes.add(str(weight.dtype).removeprefix("torch."))
    if not n:
        return []
    largest = [kind for kind, _ in sizes.most_common()]
    more = f" and {len(largest) - _NAMED} more kinds" if len(largest) > _NAMED else ""
    return [
        f"{n} matrices stay in {', '.join(sorted(dtypes))}, with {sum(sizes.values()):,} weights: "
        f"{', '.join(largest[:_NAMED])}{more}; linear layers, embeddings and mixtures of experts are packed"
    ]


def _why(module: Any) -> str:
    """Return the reason why the matrices of ``module`` are not packed: its role or its class."""
    if isinstance(module, torch.nn.Linear):
        return "expands latents in parts"
    return "a convolution" if isinstance(module, torch.nn.Conv1d) else type(module).__name__
