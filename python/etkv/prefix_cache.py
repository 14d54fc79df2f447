"""Prefixes in memory, by the texts that they hold. A text that one cache has read, another cache reuses."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from etkv._capi import ask, call, ffi, lib, struct, text_options
from etkv.cache import Cache
from etkv.errors import EtkvError
from etkv.prefix_store import PrefixStore


class PrefixStatistics(NamedTuple):
    """The contents and the requests of a prefix cache."""

    prefixes: int
    """Prefixes in memory."""
    pinned: int
    """Prefixes that are pinned."""
    bytes: int
    """Bytes of their rows. Rows that several prefixes share count once."""
    tokens_asked: int
    """Tokens of the texts that were passed to :meth:`PrefixCache.attach`."""
    tokens_in_memory: int
    """Of these, tokens that memory had."""
    tokens_in_store: int
    """Of these, tokens that the store had."""
    ahead_waiting: int
    """Texts that wait to be read ahead, and the text that is being read."""
    ahead_read: int
    """Texts that were read ahead into memory, in whole or in part."""
    tokens_ahead: int
    """Tokens that were read ahead."""
    ahead_failed: int
    """Texts that could not be read ahead. The log has the reasons."""


class PrefixPin:
    """Keeps a prefix in memory until it is closed. A context manager."""

    def __init__(self, raw: Any) -> None:
        self._pin = ffi.gc(raw, lib().etkv_prefix_pin_free)

    def close(self) -> None:
        """Unpin the prefix. Closing twice does nothing."""
        ffi.release(self._pin)

    def __enter__(self) -> PrefixPin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class PrefixCache:
    """Prefixes by the model's fingerprint, the layers and formats of the cache, and the token ids of the text.

    Any number of threads may use one. ``fingerprint`` is :func:`etkv.fingerprint` of the program, or another name of
    the model.
    """

    def __init__(self, max_bytes: int | None = None, *, store: PrefixStore | None = None) -> None:
        """Make a prefix cache without prefixes.

        Rows of prefixes take ``max_bytes`` at most; None is no limit. The least recently used prefixes go first; pinned
        ones stay. A ``store`` supplies texts that memory lacks, and stores every text that is kept. Its files contain
        what users wrote.
        """
        if max_bytes is not None and not 0 < max_bytes < 2**64:
            raise EtkvError(f"max_bytes is {max_bytes}, expected 1 to {2**64 - 1}, or None for no limit")
        behind = ffi.NULL if store is None else store._store
        options = struct("etkv_prefix_cache_options", max_bytes=max_bytes or 0, store=behind)
        raw = ask("etkv_prefix_cache_new", "etkv_prefix_cache*", options)
        self._prefixes = ffi.gc(raw, lib().etkv_prefix_cache_free)
        self.store = store

    def attach(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> int:
        """Attach an empty cache to the longest beginning of ``tokens`` that is kept, and return its length.

        Pass the text without its last token: the program must run at least one token for its logits. A store that fails
        is skipped, with a warning in the log.

        Raises :class:`~etkv.EtkvError` if the cache is not empty.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_cache_attach", "size_t", self._prefixes, cache._raw(), options)

    def find(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> int:
        """Return how many tokens :meth:`attach` would find for a cache like this one, which need not be empty."""
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_cache_find", "size_t", self._prefixes, cache._raw(), options)

    def keep(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> bool:
        """Keep the contents of a cache, whose text is ``tokens``. Return whether memory then has the text.

        It has not if the text takes more than ``max_bytes``, or if the cache was converted by hand. The cache goes on
        from the kept prefix itself. A prefix whose text is the beginning of this text is removed, if this one can
        replace it.

        Raises :class:`~etkv.EtkvError` unless the cache holds the positions of all tokens in sequence 0 alone, without
        candidates. Raises what :meth:`Cache.freeze` raises.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_cache_keep", "bool", self._prefixes, cache._raw(), options)

    def prefetch(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> bool:
        """Ask another thread to read the longest beginning of ``tokens`` that the store has into memory, for a later
        :meth:`attach` of a cache like this one. Does not wait.

        Return whether the text waits to be read: not if memory has all of it, if there is no store, or if 16 other
        texts wait. :meth:`statistics` counts texts that cannot be read, also for lack of memory. For a minute after the
        read, :meth:`attach` does not ask the store for the text while memory has it.
        """
        options, _keep = text_options(tokens, fingerprint)
        return ask("etkv_prefix_cache_prefetch", "bool", self._prefixes, cache._raw(), options)

    def pin(self, cache: Cache, tokens: Sequence[int], *, fingerprint: str) -> PrefixPin:
        """Pin a prefix that holds all of ``tokens``, for caches like this one. A pinned prefix stays in memory.

        Raises :class:`~etkv.EtkvError` if no prefix has the text.
        """
        options, _keep = text_options(tokens, fingerprint)
        return PrefixPin(ask("etkv_prefix_cache_pin", "etkv_prefix_pin*", self._prefixes, cache._raw(), options))

    def reclaim(self, n_bytes: int) -> int:
        """Free prefixes that are not pinned and that no cache reads, least recently used first, until ``n_bytes`` are
        free. Return the bytes that were freed.
        """
        if not 0 <= n_bytes < 2**64:
            raise EtkvError(f"n_bytes is {n_bytes}, expected 0 to {2**64 - 1}")
        return ask("etkv_prefix_cache_reclaim", "uint64_t", self._prefixes, n_bytes)

    def clear(self) -> None:
        """Drop all prefixes that are not pinned. The files of the store stay."""
        call("etkv_prefix_cache_clear", self._prefixes)

    def statistics(self) -> PrefixStatistics:
        """Return the contents and the requests in numbers."""
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
