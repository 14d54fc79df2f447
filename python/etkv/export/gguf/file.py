"""GGUF files: their metadata and tensors. A model may be split into several files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError, first_line

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

_MAGIC = b"GGUF"
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
"""The name of a file of a split model, as llama.cpp's gguf-split writes it. Parts are counted from 1."""


def find_files(path: Path) -> list[Path]:
    """Return the files of the model at ``path``: only ``path``, or all files of a split model in order.

    Reads only names and first bytes. Raises :class:`EtkvError` if a file is missing, cannot be read or is not a GGUF
    file, or if ``path`` is not the first part of a split model.
    """
    files = [path]
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is not None:
        count = int(name["count"])
        files = [path.with_name(f"{name['stem']}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
        if int(name["number"]) != 1:
            raise EtkvError(
                f"file {path} is part {int(name['number'])} of {count} of a split model; name its first part"
            )
    for file in files:
        _check_magic(file)
    return files


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise EtkvError(f"file {path} cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        raise EtkvError(f"file {path} is not a GGUF file: it begins with {magic!r}, not with {_MAGIC!r}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. ``shape`` begins with the slowest axis."""

    name: str
    shape: tuple[int, ...]
    _tensor: Any

    def read(self) -> np.ndarray:
        """Return the values in float32. Raises :class:`EtkvError` for a format that the ``gguf`` package lacks."""
        from gguf import dequantize

        try:
            values: np.ndarray = dequantize(self._tensor.data, self._tensor.tensor_type)
        except NotImplementedError as error:
            kind = self._tensor.tensor_type.name
            raise EtkvError(f"tensor {self.name} is stored as {kind}, which cannot be dequantized") from error
        return values.astype("float32", copy=False).reshape(self.shape)

    @property
    def kind(self) -> str:
        """llama.cpp's name of the format, such as ``Q4_0``."""
        name: str = self._tensor.tensor_type.name
        return name

    def blocks(self) -> np.ndarray:
        """Return the bytes of a tensor whose format has blocks, ``[.., rows, bytes]``."""
        data: np.ndarray = self._tensor.data
        return data


class GgufFile:
    """The metadata and the tensors of a GGUF model. Tensors stay on disk until they are read."""

    def __init__(self, path: Path) -> None:
        """Open the model at ``path``, with all parts of a split model.

        Raises :class:`EtkvError` if a file cannot be read, or if the files are not of one model.
        """
        files = find_files(path)
        readers = [_open(file) for file in files]
        self.path = path
        self.values = _values(path, readers[0])
        """The metadata of the first file: key -> value. Later parts have no further metadata."""
        self.tensors: dict[str, StoredTensor] = {}
        """Tensor name -> tensor, in the order of the files."""
        for file, reader in zip(files, readers, strict=True):
            for tensor in reader.tensors:
                if tensor.name in self.tensors:
                    raise EtkvError(f"file {file} repeats tensor {tensor.name}")
                shape = tuple(int(length) for length in reversed(tensor.shape))
                self.tensors[tensor.name] = StoredTensor(tensor.name, shape, tensor)
        self._check_split(files, readers)

    def _check_split(self, files: list[Path], readers: list[GGUFReader]) -> None:
        """Raise :class:`EtkvError` unless the metadata of every file has the part number of its name."""
        count = self.values.get("split.count", 1) or 1
        if count != len(files):
            raise EtkvError(
                f"file {self.path} is one of {count} parts of a split model, but its name is not that of a part "
                "(NAME-00001-of-0000N.gguf); restore the names, or merge the parts with llama-gguf-split --merge"
            )
        if count == 1:
            return
        for index, (file, reader) in enumerate(zip(files, readers, strict=True)):
            field = reader.fields.get("split.no")
            number = None if field is None else field.contents()
            if number != index:
                said = "no part" if number is None else f"part {number + 1}"
                raise EtkvError(f"file {file} contains {said} of its model; restore the names of the parts")
        total = self.values.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise EtkvError(f"the parts of {self.path} have {len(self.tensors)} tensors, expected {total}")

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture. Raises :class:`EtkvError` if the file has none."""
        name = self.values.get("general.architecture")
        if not isinstance(name, str):
            raise EtkvError(f"file {self.path} does not name its architecture (general.architecture)")
        return name


def _open(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # the package raises many types of exceptions for damaged files
        raise EtkvError(f"file {path} cannot be read as GGUF; is it whole? {first_line(error)}") from error


def _values(path: Path, reader: GGUFReader) -> dict[str, Any]:
    try:
        return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    except Exception as error:
        raise EtkvError(f"the metadata of {path} cannot be read: {first_line(error)}") from error
