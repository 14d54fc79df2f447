"""Reads the weights of Hugging Face folders in the quantizations in which models are published.

Each weight is decoded exactly, in float32 and only with torch, when a loader reads it. Before that, only the sizes of
tensors are read, so unsupported layouts are refused early.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etkv.errors import EtkvError
from etkv.export.published.awq import Awq
from etkv.export.published.bitsandbytes import BitsAndBytes
from etkv.export.published.compressed_tensors import CompressedTensors
from etkv.export.published.format import Format
from etkv.export.published.fp8 import Fp8
from etkv.export.published.gptq import Gptq
from etkv.export.published.mlx import Mlx
from etkv.export.published.modelopt import ModelOpt
from etkv.export.published.mxfp4 import Mxfp4
from etkv.export.published.settings import REMEDY, Settings
from etkv.export.published.stored import Stored, read_headers
from etkv.export.published.weight import Plain, Weight

__all__ = ["METHODS", "REMEDY", "Checkpoint", "Weight", "check_plain", "read"]


METHODS: dict[str, type[Format]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mlx": Mlx,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
}
"""The name of a quantization method in a configuration -> its format."""

_OF_ACTIVATIONS = re.compile(
    r".*[._](activation_scale|qscale_act)|.*\.(input|output)_(scale|scale_ub|global_scale|zero_point)"
)
"""Names of scales for rounding activations."""

_OF_CACHES = re.compile(r".*\.(k|v|q|kv|prob)_(scale|zero_point|global_scale)")
"""Names of scales for storing keys and values in 8 bits."""


_BYTES = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8", "uint32")


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a folder, by their names in the files.

    ``remarks`` are sentences about behaviour of the publisher's runtimes that a program lacks.
    """

    weights: dict[str, Weight]
    remarks: tuple[str, ...]


def read(
    path: Path, files: list[Path], method: str | None, settings: Mapping[str, Any], without_effect: re.Pattern[str]
) -> Checkpoint:
    """Return the weights in ``files`` of the folder ``path``, quantized by ``method`` with ``settings``.

    Tensors ``without_effect`` may have any dtype. Raises :class:`EtkvError` for an unsupported method, setting or
    layout.
    """
    form = METHODS.get(method or "")
    if form is None:
        raise EtkvError(
            f"the weights of {path} are quantized ({method}), but the exporter reads {', '.join(sorted(METHODS))}; "
            f"{REMEDY}"
        )
    reader = form(Settings(path, str(method), settings))
    tensors = read_headers(files)
    parts: dict[str, dict[str, Stored]] = {}
    plain = {}
    for name, stored in tensors.items():
        owner = reader.owner(name, tensors)
        if owner is None:
            plain[name] = stored
        else:
            parts.setdefault(owner[0], {})[owner[1]] = stored
    weights: dict[str, Weight] = {}
    for name, own in parts.items():
        if name in plain:
            own["weight"] = plain.pop(name)
        weights |= reader.weights(name, own)
    of_activations = {name for name in plain if _OF_ACTIVATIONS.fullmatch(name)}
    of_caches = {name for name in plain if _OF_CACHES.fullmatch(name)} - of_activations
    plain = {name: stored for name, stored in plain.items() if name not in of_activations | of_caches}
    _check_plain(path, plain.values(), without_effect)
    remarks = []
    if reader.activations is not None or of_activations:
        how = reader.activations or "of few bits"
        remarks.append(f"the folder is for activations {how}, but the program does not round activations")
    if of_caches or settings.get("kv_cache_scheme"):
        remarks.append("the folder has scales of keys and values in 8 bits, which an etkv cache does not use")
    return Checkpoint({**weights, **{name: Plain(stored) for name, stored in plain.items()}}, tuple(remarks))


def check_plain(path: Path, files: list[Path], without_effect: re.Pattern[str]) -> None:
    """Raise :class:`EtkvError` for a matrix of 8 bits or less in ``files``: a loader would mistake it for weights.

    Tensors ``without_effect`` may have any dtype.
    """
    _check_plain(path, read_headers(files).values(), without_effect)


def _check_plain(path: Path, tensors: Iterable[Stored], without_effect: re.Pattern[str]) -> None:
    for stored in tensors:
        if stored.dtype in _BYTES and len(stored.shape) > 1 and not without_effect.fullmatch(stored.name):
            raise EtkvError(
                f"tensor {stored.name} of {path} is {stored.described()}, but the configuration does not say how it is "
                f"quantized; {REMEDY}"
            )
