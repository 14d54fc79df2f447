"""The tensors in the files of a checkpoint: names, shapes and dtypes. Values are read on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from etkv.errors import EtkvError, first_line

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U32": "uint32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""safetensors' name of a dtype -> torch's name."""

_POINTER = b"version https://git-lfs"
"""The beginning of a file whose contents Git LFS has not downloaded."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. ``dtype`` is torch's name of the dtype, such as ``float8_e4m3fn``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]
    """Returns the values."""
    read_one: Callable[[int], torch.Tensor] | None = None
    """Returns the values at an index of the first axis, without reading the others. None in torch's format."""

    def one(self, index: int) -> Stored:
        """Return the part of this tensor at an index of its first axis."""
        read = (lambda: self.read()[index]) if self.read_one is None else partial(self.read_one, index)
        return Stored(f"{self.name}[{index}]", self.shape[1:], self.dtype, read)

    @property
    def is_float(self) -> bool:
        """Whether the values are floating-point numbers of 16 bits or more."""
        return self.dtype in ("float64", "float32", "float16", "bfloat16")

    def described(self) -> str:
        """Return dtype and shape, for messages."""
        return f"{self.dtype} {list(self.shape)}"


def read_headers(files: list[Path]) -> dict[str, Stored]:
    """Return the tensors of ``files``, in the format of safetensors or torch: name -> tensor.

    Raises :class:`EtkvError` for an unsupported dtype, and for a file that is not readable or damaged.
    """
    found: dict[str, Stored] = {}
    for file in files:
        try:
            found |= _of_safetensors(file) if file.suffix == ".safetensors" else _of_torch(file)
        except EtkvError:
            raise
        except Exception as error:
            raise EtkvError(f"the weights in {file} cannot be loaded: {_reason(file, error)}") from error
    return found


def _reason(file: Path, error: Exception) -> str:
    """Return why the weights in ``file`` cannot be loaded, and what to do."""
    try:
        # safetensors reports every failure to open a file as a missing file.
        with file.open("rb") as start:
            if start.read(len(_POINTER)) == _POINTER:
                return "it is a pointer of Git LFS; run git lfs pull in its folder"
    except OSError as failure:
        return str(failure.strerror)
    return f"{first_line(error)}; its {file.stat().st_size} bytes are damaged or incomplete, so download it again"


def _of_safetensors(file: Path) -> dict[str, Stored]:
    found = {}
    # Every tensor keeps the file open. Pages of the file are read when the tensor is read.
    tensors: Any = safe_open(file, framework="pt")
    for name in tensors.keys():  # noqa: SIM118 (the object is no mapping)
        header = tensors.get_slice(name)
        dtype = _DTYPES.get(header.get_dtype())
        if dtype is None:
            raise EtkvError(f"tensor {name} of {file} has the unsupported dtype {header.get_dtype()}")
        found[name] = Stored(
            name, tuple(header.get_shape()), dtype, partial(tensors.get_tensor, name), header.__getitem__
        )
    return found


def _of_torch(file: Path) -> dict[str, Stored]:
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {
        name: Stored(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), partial(torch.clone, tensor))
        for name, tensor in loaded.items()
        if isinstance(tensor, torch.Tensor)
    }
