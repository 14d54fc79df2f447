"""Stores weights in files during an export, because the weights of a large model do not fit into memory.

A file is mapped, so a tensor in it is read and written like any other tensor. Its pages count as memory of the process
from their first use until :meth:`Scratch.release`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from etkv.errors import EtkvError
from etkv.export.staging import TemporaryFolder

SMALL = 1 << 20
"""Maximum bytes of a tensor that stays in memory."""

_AT_ONCE = 1 << 28
"""Number of used bytes after which pages are released."""

_PIECE = 1 << 24
"""Number of elements that are copied at once."""

_DROP = 4
"""``MADV_DONTNEED``."""

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ...([ps]) \S+ \S+ \d+ +(/.*)")
"""A line of Linux's list of mappings: addresses, whether the mapping is shared, and the file."""


class Scratch(TemporaryFolder):
    """A temporary folder of tensors in ``folder``. Tensors that are still in use keep their pages after it is removed.

    ``sources`` are the files of the model.
    """

    def __init__(self, folder: Path, sources: Sequence[Path] = ()) -> None:
        super().__init__(folder)
        self._sources = {str(file.resolve()) for file in sources}
        self._numbers = itertools.count()
        self._unreleased = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in a file, or in memory if it is small.

        Raises :class:`EtkvError` if the disk has no room for it.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        if size <= SMALL:
            return torch.empty(tuple(shape), dtype=dtype)
        path = self.path / str(next(self._numbers))
        self._allocate(path, size)
        # Map bytes, because torch maps files only in some dtypes.
        mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        # The mapping keeps the file alive, and the file vanishes with the process even after a crash.
        path.unlink()
        return mapped.view(dtype).view(tuple(shape))

    def _allocate(self, path: Path, size: int) -> None:
        """Allocate a file of ``size`` bytes on the disk. Writing to a mapping crashes the process if the disk is
        full.
        """
        with path.open("wb") as file:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
            except OSError as error:
                path.unlink()
                raise EtkvError(
                    f"{self.folder} has no room for {size} bytes of weights: {error.strerror}; "
                    "an export needs twice the size of the program"
                ) from error

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` in a file; ``tensor`` itself if it is small or in a file already."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if tensor.nbytes <= SMALL or any(first <= begin < end <= last for first, last, _ in self._mappings("maps")):
            return tensor
        kept = self.empty(tensor.shape, tensor.dtype)
        if not tensor.is_contiguous():
            kept.copy_(tensor)
            return kept
        for part, own in zip(kept.view(-1).split(_PIECE), tensor.view(-1).split(_PIECE), strict=True):
            part.copy_(own)
            self.used(part.nbytes)
        return kept

    def used(self, size: int) -> None:
        """Add ``size`` to the bytes of files that were used. Release pages from time to time."""
        self._unreleased += size
        if self._unreleased > _AT_ONCE:
            self.release()

    def release(self) -> None:
        """Release the pages of files, and of freed memory, to the system.

        Pages that are used again are read again. Only Linux lists the pages of files. Other systems reclaim them
        automatically when memory is short.
        """
        self._unreleased = 0
        if sys.platform != "linux":
            return
        system = ctypes.CDLL(None)
        for first, last, is_kept in self._mappings("smaps"):
            if is_kept:
                system.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DROP)
        if hasattr(system, "malloc_trim"):
            # Freed parts of weights leave holes between smaller tensors, into which the next parts do not fit.
            system.malloc_trim(0)

    def _mappings(self, table: str) -> Iterator[tuple[int, int, bool]]:
        """Yield for each mapping of the files its begin, its end, and whether the file has all written data.

        The table ``maps`` does not show whether the model's files have all written data: the third value is then False.
        """
        if sys.platform != "linux":
            return
        found: tuple[int, int] | None = None
        written = 0
        with Path(f"/proc/{os.getpid()}/{table}").open(encoding="utf-8") as lines:
            for line in lines:
                if match := _MAPPING.match(line):
                    begin, end, mode, path = match.groups()
                    addresses = int(begin, 16), int(end, 16)
                    found = addresses if path in self._sources else None
                    if path.startswith(f"{self.path}{os.sep}"):
                        yield *addresses, mode == "s"
                    elif found is not None and table == "maps":
                        yield *addresses, False
                    written = 0
                elif found is not None and line.startswith(("Anonymous:", "Swap:")):
                    # A private page that was written to is no longer a page of the file.
                    written += int(line.split()[1])
                    if line.startswith("Swap:"):
                        yield *found, written == 0
                        found = None
