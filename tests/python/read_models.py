"""Models as the exporter reads them: with plain weights, or with weights packed for a backend."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etkv.export import ExportRequest, experts, lowering, packing, source
from etkv.export.packing import Packing
from etkv.export.scratch import Scratch


def configure(folder: Path, **changes: Any) -> None:
    """Change entries of the configuration of a model's folder."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def plain(path: Path, **how: Any) -> Any:
    """Return the model of a folder or a GGUF file in float32."""
    origin = source.find(path)
    return source.read_model(origin, source.read_config(origin), "float32", **how)


def packed(path: Path, folder: Path, quantize: str, group_size: int | None = None) -> tuple[Any, Packing]:
    """Return a model with weights packed for the backend of ``quantize``, by way of files in ``folder``."""
    folder.mkdir(exist_ok=True)
    backend = "cpu" if "da" in quantize else "mlx"
    wanted = ExportRequest(path, folder / "model.pte", backend=backend, quantize=quantize, group_size=group_size)
    # The weights stay readable after the files are removed.
    with Scratch(folder, source.find(path).files()) as scratch:
        made = Packing(lowering.packer(wanted, group_size or 32, scratch), scratch)
        return plain(path, packing=made), made


@dataclass(frozen=True)
class PackedWeights:
    """The weights of a packed model, dequantized, and their packing."""

    layers: dict[str, torch.Tensor]
    """Name of a linear layer or an embedding -> its matrix."""
    formats: dict[str, str | None]
    """Name of such a layer -> its format on the CPU, or None on MLX."""
    experts: dict[str, torch.Tensor]
    kept: int
    """The number of matrices that keep the integers of the file."""
    repacked: int
    """The number of matrices that are quantized in the file, and are quantized again."""


def packed_weights(path: Path, folder: Path, quantize: str, group_size: int | None = None) -> PackedWeights:
    """Return the weights of the model of :func:`packed`."""
    model, made = packed(path, folder, quantize, group_size)
    layers = dict(packing.layers(model))
    return PackedWeights(
        {name: layer.plain().clone() for name, layer in layers.items()},
        {name: getattr(layer, "etkv_format", None) for name, layer in layers.items()},
        experts.plain_weights(model),
        made.kept,
        made.repacked,
    )
