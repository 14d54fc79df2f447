"""Prefixes: frozen contents of a cache, from which any number of caches continue without a copy."""

from __future__ import annotations

from typing import Any, NoReturn

from etkv._capi import ffi, lib
from etkv.errors import EtkvError


class Prefix:
    """A read-only sequence that begins at position 0. :meth:`Cache.freeze` creates it, :meth:`Cache.attach` reads it.

    Its rows are freed once the prefix and all attached caches are gone, in any order. Any thread may use it.
    """

    def __init__(self, raw: Any) -> None:
        self._prefix = ffi.gc(raw, lib().etkv_prefix_free)

    @property
    def length(self) -> int:
        """The number of positions."""
        return int(lib().etkv_prefix_length(self._prefix))

    @property
    def rewindable_to(self) -> int:
        """The smallest length at which a cache can attach. It exceeds 1 if layers with windows have dropped rows that
        queries at smaller positions would see.
        """
        return int(lib().etkv_prefix_rewindable_to(self._prefix))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, without the rows of an earlier prefix to which the cache was attached."""
        return int(lib().etkv_prefix_bytes(self._prefix))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise EtkvError("a Prefix cannot be copied or sent to another process: use a PrefixStore")

    def __repr__(self) -> str:
        return f"<Prefix: {self.length} positions, {self.nbytes} bytes>"
