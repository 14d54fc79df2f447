"""Experts of gpt-oss in folders of mlx-lm.

In these folders a gate and the product that it gates are separate tensors. In transformers their rows alternate in one
tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from etkv.export.published.stored import Stored
from etkv.export.published.weight import Decoded, Groups, Plain, Weight, joined

_NAME = re.compile(r"(.*\.mlp\.experts)\.(gate|up|down)_proj\.(weight|scales|biases|bias)")
_OWNER = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")


def owner(name: str) -> tuple[str, str] | None:
    """Return the weight of transformers to which the tensor ``name`` belongs, and its part; None for other tensors."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    product = "down" if found[2] == "down" else "gate_up"
    ending = "_bias" if found[3] == "bias" else ""
    return f"{found[1]}.{product}_proj{ending}", f"{found[2]}_proj.{found[3]}"


def weight(
    name: str, parts: Mapping[str, Stored], matrix: Callable[[str, Mapping[str, Stored]], Weight]
) -> Weight | None:
    """Return the weight ``name`` of :func:`owner`; None for other names, and if one of its tensors is missing.

    ``matrix`` returns the weight ``[rows, columns]`` of a name in the folder.
    """
    found = _OWNER.fullmatch(name)
    if found is None:
        return None
    products = ("gate_proj", "up_proj") if found[2] == "gate_up" else ("down_proj",)
    last = "bias" if found[3] else "weight"
    whole = [parts.get(f"{product}.{last}") for product in products]
    rows = [stored for stored in whole if stored is not None and len(stored.shape) == (2 if found[3] else 3)]
    if len(rows) < len(products) or len({stored.shape for stored in rows}) > 1:
        return None
    if found[3]:
        return Decoded(lambda: torch.stack([stored.read() for stored in rows], dim=2).flatten(1).float())
    n_experts = rows[0].shape[0]
    made = []
    for product in products:
        own = {
            part: parts[f"{product}.{part}"] for part in ("weight", "scales", "biases") if f"{product}.{part}" in parts
        }
        flat = {part: _flat(stored) for part, stored in own.items()}
        made.append(matrix(f"{found[1]}.{product}.weight", flat) if len(flat) > 1 else Plain(flat["weight"]))
    return _Experts(tuple(made), n_experts)


def _flat(stored: Stored) -> Stored:
    """Return the rows of all experts."""
    return replace(
        stored, shape=(stored.shape[0] * stored.shape[1], *stored.shape[2:]), read=lambda: stored.read().flatten(0, 1)
    )


@dataclass(frozen=True)
class _Experts(Weight):
    """One product of all experts. Each of ``parts`` is ``[experts * rows, columns]``."""

    parts: tuple[Weight, ...]
    n_experts: int

    def read(self) -> torch.Tensor:
        """Return the values, ``[experts, columns, rows of all parts]`` in float32."""
        rows = self._alternating(torch.cat([part.read().float() for part in self.parts]))
        made: torch.Tensor = rows.unflatten(0, (self.n_experts, -1)).transpose(1, 2).contiguous()
        return made

    def groups(self) -> Groups | None:
        """Return the rows of all experts as integers."""
        found = [part.groups() for part in self.parts]
        stored = [groups for groups in found if groups is not None]
        made = joined(stored) if len(stored) == len(found) else None
        return None if made is None else made.rows(self._alternating)

    def _alternating(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = rows.unflatten(0, (len(self.parts), self.n_experts, -1)).permute(1, 2, 0, 3).flatten(0, 2)
        return made
