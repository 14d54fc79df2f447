"""Beginnings of texts that outlive the process: a folder or a bucket of files with what caches have read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from etkv._capi import ask, call, encoded_path, ffi, lib, text_options
from etkv.cache import Cache
from etkv.errors import EtkvError


class Usage(NamedTuple):
    """The files of a store, and their bytes."""

    files: int
    bytes: int


class PrefixStore:
    """A folder or a bucket of texts that caches have read, for any number of threads and processes.

    The files hold keys, values and token ids: what users wrote can be read from them. They are written where
    :meth:`save` is called and by a :class:`~etkv.PrefixCache` that has the store behind it, and nowhere else.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        """Open a folder, which is made, for the user alone, if it is not there.

        Its files take ``max_bytes`` at most: :meth:`save` removes those that were used least recently. In a library
        that was built with ``ETKV_BUCKETS`` it may be the address of a bucket, such as ``s3://bucket/prefix``; the
        environment has the credentials and the endpoint. Raises :class:`~etkv.CacheFileError` if the folder cannot be
        made or read, and :class:`~etkv.UnsupportedError` for an address in a library without buckets.
        """
        if not 0 <= max_bytes < 2**64:
            raise EtkvError(f"max_bytes is {max_bytes}, expected 0 to {2**64 - 1}")
        made = ask("etkv_prefix_store_open", "etkv_prefix_store*", encoded_path(folder, "folder"), max_bytes)
        self._store = ffi.gc(made, lib().etkv_prefix_store_free)
        self.folder = os.fspath(folder)

    def usage(self) -> Usage:
        """Return the number of files in the folder, and their bytes."""
        files, held = ffi.new("size_t*"), ffi.new("uint64_t*")
        call("etkv_prefix_store_usage", self._store, files, held)
        return Usage(files[0], held[0])

    def save(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> bool:
        """Store the contents of a cache of one sequence, whose text is ``tokens``. Return whether a file was written.

        None is for a text of fewer than 32 tokens, one that the folder has already as the beginning of another, and one
        that takes more bytes than the folder may have; nor for a cache that was converted by hand. Files go whose texts
        this one begins with, if it serves all that they do. ``fingerprint`` is :func:`etkv.fingerprint` of the program,
        or another name of the model.

        Raises :class:`~etkv.EtkvError` if the cache does not hold the positions of all tokens, of sequence 0 alone and
        without candidates, and what :meth:`Cache.save` raises.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_store_save", "bool", self._store, cache._raw(), options)

    def load(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> int:
        """Load the longest beginning of ``tokens`` that the folder has into an empty cache, and return its length.

        The program runs the rest, at least one token, whose logits it needs: so pass the text without its last token.
        0 if there is none of 32 tokens or more. A file that is damaged is passed by, with a warning in the log.

        Raises :class:`~etkv.EtkvError` if the cache is not empty.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_store_load", "size_t", self._store, cache._raw(), options)

    def find(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> int:
        """Return how many tokens :meth:`load` would load for a cache like this one, which may hold something."""
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_store_find", "size_t", self._store, cache._raw(), options)

    def __repr__(self) -> str:
        return f"<PrefixStore: {self.folder}>"
