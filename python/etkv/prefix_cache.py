"""Prefixes in memory, found by their texts, so that a cache can reuse the rows of a text that another cache has
read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from etkv._capi import ask, call, ffi, lib, struct, text_options
from etkv.cache import Cache
from etkv.errors import EtkvError
from etkv.prefix_store import PrefixStore


class PrefixStatistics(NamedTuple):
    """Counters of a prefix cache: its contents and its requests."""

    prefixes: int
    """Number of prefixes in memory."""
    pinned: int
    """Number of pinned prefixes."""
    bytes: int
    """Bytes of the rows of all prefixes. Rows that several prefixes share count once."""
    tokens_asked: int
    """Number of tokens of the texts that were passed to :meth:`PrefixCache.attach`."""
    tokens_in_memory: int
    """Number of the requested tokens that were in memory."""
    tokens_in_store: int
    """Number of the requested tokens that came from the store."""
    ahead_waiting: int
    """Number of texts in the read-ahead queue, including the text that is being read."""
    ahead_read: int
    """Number of texts that were read ahead into memory, wholly or partly."""
    tokens_ahead: int
    """Number of tokens that were read ahead."""
    ahead_failed: int
    """Number of texts for which reading ahead failed. The log has the reasons."""


class PrefixPin:
    """Keeps a prefix in memory until it is closed. A context manager."""

    def __init__(self, raw: Any) -> None:
        self._pin = ffi.gc(raw, lib().etkv_prefix_pin_free)

    def close(self) -> None:
        """Unpin the prefix. Closing twice does nothing."""
        ffi.release(self._pin)

    def __enter__(self) -> PrefixPin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PrefixCache:
    """Prefixes, found by the fingerprint of the model, the layers and formats of the cache, and the text's token ids.

    Any number of threads may use it. ``fingerprint`` is :func:`etkv.fingerprint` of the program, or another string
    that identifies the model.
    """

    def __init__(self, max_bytes: int | None = None, *, store: PrefixStore | None = None) -> None:
        """Create an empty prefix cache.

        ``max_bytes`` limits the bytes of all rows; None for no limit. The least recently used prefixes are removed
        first, pinned prefixes never. A ``store`` supplies texts that are not in memory, and stores every text that is
        kept. Its files contain the texts of users.
        """
        if max_bytes is not None and not 0 < max_bytes < 2**64:
            raise EtkvError(f"max_bytes is {max_bytes}, expected 1 to {2**64 - 1}, or None for no limit")
        behind = ffi.NULL if store is None else store._store
        options = struct("etkv_prefix_cache_options", max_bytes=max_bytes or 0, store=behind)
        raw = ask("etkv_prefix_cache_new", "etkv_prefix_cache*", options)
        self._prefixes = ffi.gc(raw, lib().etkv_prefix_cache_free)
        self.store = store

    def attach(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> int:
        """Attach an empty cache to the longest kept prefix of ``tokens``, and return the prefix's length.

        Pass the text without its last token: the program must run at least one token for its logits. If the store
        fails, only memory is searched, and the log has a warning.

        Raises :class:`~etkv.EtkvError` if the cache is not empty.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_cache_attach", "size_t", self._prefixes, cache._raw(), options)

    def find(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> int:
        """Return the length that :meth:`attach` would return for an empty cache with the config of ``cache``."""
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_cache_find", "size_t", self._prefixes, cache._raw(), options)

    def keep(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> bool:
        """Keep the contents of a cache. ``tokens`` are its text. Return whether the text is then in memory.

        The text is not in memory if its rows exceed ``max_bytes``, or if :meth:`Cache.convert` was called on the cache.
        The cache is attached to the new prefix. An older prefix whose text is the beginning of ``tokens`` is removed if
        the new prefix can replace it.

        Raises :class:`~etkv.EtkvError` unless the cache holds exactly the positions of ``tokens``, in sequence 0 and
        without candidates. Raises what :meth:`Cache.freeze` raises.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_cache_keep", "bool", self._prefixes, cache._raw(), options)

    def prefetch(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> bool:
        """Let a background thread read the longest prefix of ``tokens`` in the store into memory.

        A later :meth:`attach` of a cache with the config of ``cache`` then finds this prefix in memory. Does not wait
        for the read. Returns whether the text was queued. A text is not queued if all of it is in memory, if there is
        no store, or if the queue has 16 texts already. :meth:`statistics` counts reads that fail, for example for lack
        of memory. For a minute after a read, :meth:`attach` does not query the store for the text as long as the text
        is in memory.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_cache_prefetch", "bool", self._prefixes, cache._raw(), options)

    def pin(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> PrefixPin:
        """Pin a prefix that holds all of ``tokens``, for the config of ``cache``. A pinned prefix stays in memory.

        Raises :class:`~etkv.EtkvError` if no prefix has the text.
        """
        options, _keep = text_options(tokens, fingerprint)
        return PrefixPin(ask("etkv_prefix_cache_pin", "etkv_prefix_pin*", self._prefixes, cache._raw(), options))

    def reclaim(self, n_bytes: int) -> int:
        """Remove prefixes until ``n_bytes`` are freed. Return the number of freed bytes.

        The least recently used prefixes are removed first. Prefixes that are pinned or that a cache reads stay.
        """
        if not 0 <= n_bytes < 2**64:
            raise EtkvError(f"n_bytes is {n_bytes}, expected 0 to {2**64 - 1}")
        return ask("etkv_prefix_cache_reclaim", "uint64_t", self._prefixes, n_bytes)

    def clear(self) -> None:
        """Remove all prefixes that are not pinned. The files of the store stay."""
        call("etkv_prefix_cache_clear", self._prefixes)

    def statistics(self) -> PrefixStatistics:
        """Return the counters."""
        counts = struct("etkv_prefix_statistics")
        call("etkv_prefix_cache_read", self._prefixes, counts)
        return PrefixStatistics(
            counts.n_prefixes,
            counts.n_pinned,
            counts.n_bytes,
            counts.tokens_asked,
            counts.tokens_in_memory,
            counts.tokens_in_store,
            counts.n_ahead_waiting,
            counts.n_ahead_read,
            counts.tokens_ahead,
            counts.n_ahead_failed,
        )

    def __repr__(self) -> str:
        counts = self.statistics()
        return f"<PrefixCache: {counts.prefixes} prefixes, {counts.bytes} bytes>"
