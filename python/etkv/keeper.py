"""Keeps the contents of a program's cache for later texts, in memory or in files. Failures are logged and ignored."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from etkv.cache import Cache
from etkv.cache import fingerprint as fingerprint_of
from etkv.errors import EtkvError
from etkv.graph_cache import GraphCache
from etkv.prefix_cache import PrefixCache
from etkv.prefix_store import PrefixStore
from etkv.runtime import Program

_log = logging.getLogger("etkv.chat")


class Keeper:
    """A prefix cache or store, together with the cache of a program and the fingerprint of its model."""

    def __init__(self, program: Program, kept: PrefixCache | PrefixStore, fingerprint: str | None) -> None:
        """Compute the program's fingerprint if ``fingerprint`` is None. Raises :class:`EtkvError` for a cache in the
        graph.
        """
        if isinstance(kept, PrefixCache):
            self._name, self._load, self._save = "prefix_cache", kept.attach, kept.keep
        else:
            self._name, self._load, self._save = "prefix_store", kept.load, kept.save
        self._find = kept.find
        if program.cache is None or isinstance(program.cache, GraphCache):
            raise EtkvError(f"a {self._name} needs a program with a DecodeSession, this one has its cache in its graph")
        self.cache: Cache = program.cache
        drops = any(layer.window or layer.chunk for layer in program.cache.config.layers)
        self.has_windows = isinstance(kept, PrefixCache) and drops
        """Whether layers have windows. A later text can then continue only near the end of a kept text, so keeping
        more texts pays off.
        """
        self._fingerprint = fingerprint_of(program.path) if fingerprint is None else fingerprint

    def find(self, text: Sequence[int]) -> int:
        """Return the length of the longest kept prefix of ``text``."""
        with self._warning():
            return self._find(self.cache, text, fingerprint=self._fingerprint)
        return 0

    def attach(self, text: Sequence[int]) -> int:
        """Attach the empty cache to the longest kept prefix of ``text``, and return the prefix's length."""
        with self._warning():
            return self._load(self.cache, text, fingerprint=self._fingerprint)
        return 0

    def keep(self, text: Sequence[int]) -> None:
        """Keep the contents of the cache, whose text is ``text``."""
        if text:
            with self._warning():
                self._save(self.cache, text, fingerprint=self._fingerprint)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Log an error of the block instead of raising it."""
        try:
            yield
        except EtkvError as error:
            _log.warning("the %s is skipped: %s", self._name.replace("_", " "), error)
