"""Files with the contents of caches, in a folder or a bucket. They outlive the process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from etkv._capi import ask, call, encoded_path, ffi, lib, text_options
from etkv.cache import Cache
from etkv.errors import EtkvError


class Usage(NamedTuple):
    """The number of files in a store, and their bytes."""

    files: int
    bytes: int


class PrefixStore:
    """A folder or a bucket with the contents of caches, for any number of threads and processes.

    The files contain keys, values and token ids, which reveal the texts of users. Only :meth:`save`, and a
    :class:`~etkv.PrefixCache` with this store, write files.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        """Open a folder. If it does not exist, it is created with access for the user only.

        ``max_bytes`` limits the bytes of the files: :meth:`save` removes the least recently used files. In a library
        that was built with ``ETKV_BUCKETS``, ``folder`` may be the address of a bucket, such as ``s3://bucket/prefix``.
        Credentials and endpoint come from environment variables. Raises :class:`~etkv.CacheFileError` if the folder
        cannot be created or read, and :class:`~etkv.UnsupportedError` for an address in a library without buckets.
        """
        if not 0 <= max_bytes < 2**64:
            raise EtkvError(f"max_bytes is {max_bytes}, expected 0 to {2**64 - 1}")
        raw = ask("etkv_prefix_store_open", "etkv_prefix_store*", encoded_path(folder, "folder"), max_bytes)
        self._store = ffi.gc(raw, lib().etkv_prefix_store_free)
        self.folder = os.fspath(folder)

    def usage(self) -> Usage:
        """Return the number of files in the folder, and their bytes."""
        files, n_bytes = ffi.new("size_t*"), ffi.new("uint64_t*")
        call("etkv_prefix_store_usage", self._store, files, n_bytes)
        return Usage(files[0], n_bytes[0])

    def save(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> bool:
        """Store the contents of a cache of one sequence. ``tokens`` are its text. Return whether a file was written.

        No file is written for a text of fewer than 32 tokens, for the beginning of a stored text, for contents of more
        than ``max_bytes``, and if :meth:`Cache.convert` was called on the cache. A file whose text is the beginning of
        ``tokens`` is removed if the new file can replace it. ``fingerprint`` is :func:`etkv.fingerprint` of the
        program, or another string that identifies the model.

        Raises :class:`~etkv.EtkvError` unless the cache holds exactly the positions of ``tokens``, in sequence 0 and
        without candidates. Raises what :meth:`Cache.save` raises.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_store_save", "bool", self._store, cache._raw(), options)

    def load(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> int:
        """Load the longest stored prefix of ``tokens`` into an empty cache, and return its length.

        Returns 0 if there is no prefix of 32 tokens or more. Pass the text without its last token: the program must
        run at least one token for its logits. A damaged file is skipped, with a warning in the log.

        Raises :class:`~etkv.EtkvError` if the cache is not empty.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_store_load", "size_t", self._store, cache._raw(), options)

    def find(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> int:
        """Return the length that :meth:`load` would return for an empty cache with the config of ``cache``."""
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_store_find", "size_t", self._store, cache._raw(), options)

    def __repr__(self) -> str:
        return f"<PrefixStore: {self.folder}>"
