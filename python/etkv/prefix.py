"""Prefixes: frozen contents of a cache, from which any number of caches go on without a copy."""

from __future__ import annotations

from typing import Any, NoReturn

from etkv._capi import ffi, lib
from etkv.errors import EtkvError


class Prefix:
    """A sequence from position 0 on, read-only. :meth:`Cache.freeze` makes one, :meth:`Cache.attach` reads it.

    Its rows are freed when it and every cache that reads them are gone, in any order. Any thread may use it.
    """

    def __init__(self, raw: Any) -> None:
        self._prefix = ffi.gc(raw, lib().etkv_prefix_free)

    @property
    def length(self) -> int:
        """The number of positions."""
        return int(lib().etkv_prefix_length(self._prefix))

    @property
    def rewindable_to(self) -> int:
        """The least length that a cache can attach at. It is more than 1 if layers with windows have dropped rows that
        an earlier query would see.
        """
        return int(lib().etkv_prefix_rewindable_to(self._prefix))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, without rows of an earlier prefix that the cache was attached to."""
        return int(lib().etkv_prefix_bytes(self._prefix))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise EtkvError("a Prefix is neither copied nor sent to another process: use a PrefixStore")

    def __repr__(self) -> str:
        return f"<Prefix: {self.length} positions, {self.nbytes} bytes>"
