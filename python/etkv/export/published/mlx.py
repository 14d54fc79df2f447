"""Folders of mlx-lm: integers with a scale and a bias for each group, or MLX's block floats.

The tensor ``weight`` of a matrix contains its codes as a stream of bits. A second tensor has the ``scales``, and
integers also have ``biases``. The experts of a layer have one tensor with three axes for each product, under
``switch_mlp``. The configuration has the settings of the folder, and settings of single layers under the layers' names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from etkv.export.published import mlx_experts
from etkv.export.published.format import Format, beside
from etkv.export.published.fp4 import groups_of
from etkv.export.published.packing import power_scales, unpack_words, words_of
from etkv.export.published.settings import FLOATS, Settings, is_one_of
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Decoded, Grouped, Groups, Weight

METHOD = "mlx"
"""The name of this method. The configurations of mlx-lm do not name a method."""

_MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""The name of a mode -> the default size of a group, and the default bits."""

_EXPERTS = ".switch_mlp."
"""The part of the names of experts that replaces ``.experts.N.``."""

_OF_MIXTRAL = {"gate_proj.weight": "w1.weight", "down_proj.weight": "w2.weight", "up_proj.weight": "w3.weight"}
"""The names of products in mlx-lm -> their names in the published folders of Mixtral and similar models."""


class Mlx(Format):
    """Decodes the modes of MLX."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._folder = self._mode("quantization", settings.values)
        # Layers that are not quantized may also have a setting.
        for name in settings.values:
            if "." in name:
                self._of_layer(name)

    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:
        return mlx_experts.owner(name) or beside(name, tensors, {".scales": "scales", ".biases": "biases"})

    def weights(self, name: str, parts: Mapping[str, Stored]) -> dict[str, Weight]:
        experts = mlx_experts.weight(name, parts, self.weight)
        if experts is not None:
            return {name: experts}
        if _EXPERTS not in name:
            return {name: self.weight(name, parts)}
        weights = self._settings.part(parts, name, "weight")
        if any(len(part.shape) != 3 or part.shape[0] != weights.shape[0] for part in parts.values()):
            raise self._settings.refuse(
                f"tensor {weights.name} is {weights.described()}, expected a matrix for each expert"
            )
        block, _, product = name.rpartition(_EXPERTS)
        if block.endswith(".block_sparse_moe"):
            product = _OF_MIXTRAL.get(product, product)
        return {
            f"{block}.experts.{expert}.{product}": self.weight(
                name, {part: stored.one(expert) for part, stored in parts.items()}
            )
            for expert in range(weights.shape[0])
        }

    def _mode(self, name: str, values: Mapping[str, Any]) -> tuple[str, int, int]:
        """Return the mode, the size of a group and the bits in ``values``, the settings of ``name``."""
        mode = self._one_of(name, values, "mode", "affine", _MODES)
        usual_size, usual_bits = _MODES[mode]
        is_affine = mode == "affine"
        group_size = self._one_of(name, values, "group_size", usual_size, (32, 64, 128) if is_affine else (usual_size,))
        bits = self._one_of(name, values, "bits", usual_bits, (2, 3, 4, 5, 6, 8) if is_affine else (usual_bits,))
        return mode, group_size, bits

    def _one_of(self, name: str, values: Mapping[str, Any], key: str, usual: Any, known: Iterable[Any]) -> Any:
        """Return the setting ``key`` of ``name``; ``usual`` if it is absent or null."""
        value = values.get(key)
        if value is None:
            return usual
        if not is_one_of(value, known):
            raise self._settings.refuse(f"{key} of {name} is {value!r}, expected {' or '.join(map(str, known))}")
        return value

    def _of_layer(self, path: str) -> tuple[str, int, int] | None:
        """Return the mode, the size of a group and the bits of the layer ``path``; None if it is not quantized."""
        own = self._settings.values.get(path, True)
        if isinstance(own, bool):
            return self._folder if own else None
        if not isinstance(own, Mapping):
            raise self._settings.refuse(f"the setting of layer {path} is {own!r}, expected true, false or a mapping")
        return self._mode(path, own)

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        settings = self._settings
        path = name.removesuffix(".weight")
        of_layer = self._of_layer(path)
        if of_layer is None:
            raise settings.refuse(f"weight {name} has scales, but the configuration says that it is not quantized")
        mode, group_size, bits = of_layer
        codes, scales = (settings.part(parts, name, part) for part in ("weight", "scales"))
        if len(codes.shape) != 2 or len(scales.shape) != 2:
            raise settings.refuse(f"tensor {codes.name} is {codes.described()}, expected a matrix")
        rows, groups = scales.shape
        columns = groups * group_size
        settings.check(codes, ("uint32",), (rows, words_of(columns, bits)))
        if mode == "affine":
            biases = settings.part(parts, name, "biases")
            settings.check(scales, FLOATS, (rows, groups))
            settings.check(biases, FLOATS, (rows, groups))
            return Grouped(partial(_affine, codes, scales, biases, bits, columns))
        if "biases" in parts:
            raise settings.refuse(f"weight {name} has biases, but mode {mode} has none")
        settings.check(scales, ("uint8",), (rows, groups))
        if mode == "mxfp8":
            return Decoded(partial(_mxfp8, codes, scales))
        return Grouped(partial(_fp4, codes, scales, mode))


def _words(codes: Stored) -> torch.Tensor:
    return codes.read().contiguous().view(torch.int32)


def _affine(codes: Stored, scales: Stored, biases: Stored, bits: int, columns: int) -> Groups:
    numbers = unpack_words(_words(codes), bits, columns)
    return Groups(numbers, scales.read().float(), None, biases=biases.read().float())


def _fp4(codes: Stored, scales: Stored, mode: str) -> Groups:
    factors = scales.read()
    of_groups = factors.view(torch.float8_e4m3fn).float() if mode == "nvfp4" else power_scales(factors)
    return groups_of(_words(codes).view(torch.uint8), of_groups)


def _mxfp8(codes: Stored, scales: Stored) -> torch.Tensor:
    groups = _words(codes).view(torch.float8_e4m3fn).float().unflatten(1, (scales.shape[1], -1))
    made: torch.Tensor = (groups * power_scales(scales.read()).unsqueeze(2)).flatten(1)
    return made
