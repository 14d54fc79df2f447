"""Sessions: caches with keys, under which programs find them.

The same program runs with every class of session. :class:`DecodeSession` holds one growing sequence.
:class:`SeqSession` holds several sequences that share cells. :class:`TreeSession` also holds trees of candidates.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from etkv._capi import ask, call, ffi, follow_log_levels, lib, text
from etkv._library import MLX_BACKEND
from etkv._raw_config import raw_config
from etkv.cache import Cache, SeqCache, TreeCache
from etkv.config import CacheConfig, LayerConfigs
from etkv.errors import EtkvError
from etkv.metadata import Backend

LOGITS = ("all", "last", "proposed")
"""The rows of logits that a program returns: ``all`` as exported, or ``last`` for only the last token's row.
``proposed``, for MLX programs, is ``all`` in steps of candidates (:meth:`TreeSession.propose`) and of declared
sequences (:meth:`SeqSession.begin_step`), and ``last`` in other steps."""

Logits: TypeAlias = Literal["all", "last", "proposed"]
"""One of :data:`LOGITS`."""

PASSES = ("default", "interpreted", "none")
"""The passes over an MLX program when it is loaded. ``default`` runs the passes that make the program faster on its
device. ``interpreted`` runs the same passes, but no step runs as a CUDA graph. ``none`` runs only passes that other
options need. ``gpu`` runs the passes of a GPU on any device, for tests.
"""

Passes: TypeAlias = Literal["default", "interpreted", "none", "gpu"]
"""One of :data:`PASSES`, or ``gpu``."""

_Self = TypeVar("_Self", bound="Session")


class Session(Cache):
    """A cache that programs find by :attr:`key` while the session is open.

    It is a context manager: leaving it closes the session. Programs that were loaded with it keep the cache until they
    are closed too.
    """

    KIND: ClassVar[str] = "contiguous"

    _open = False

    def __init__(self, config: CacheConfig, *, backend: Backend | None = None) -> None:
        """Create the cache and register it. ``backend`` runs the programs: see :attr:`etkv.ModelCacheParams.backend`.

        None is the backend of the program from which the config's layers were read, or else MLX.

        Raises :class:`EtkvError` for a config that is not valid. The message names the value and its limit.
        """
        follow_log_levels()
        raw, _keep = raw_config(config)
        known = config.layers.backend if isinstance(config.layers, LayerConfigs) else None
        chosen = backend or known or MLX_BACKEND
        handle = ask("etkv_session_new", "etkv_session*", chosen.encode(), self.KIND.encode(), raw)
        self._session = ffi.gc(handle, lib().etkv_session_free)
        self.config = config
        self._open = True
        super().__init__(lib().etkv_session_cache(handle))

    @property
    def key(self) -> str:
        """Return the key, for the backend option ``cache_key`` of a program. It is unique in the process.

        Raises :class:`EtkvError` if the session is closed.
        """
        self._raw()
        return text(lib().etkv_session_key(self._session))

    def close(self) -> None:
        """Remove the key from the registry and release the cache. Closing twice does nothing."""
        if self._open:
            self._open = False
            for name in ("_session", "_trees", "_sequences", "_cache"):
                if name in self.__dict__:
                    ffi.release(self.__dict__[name])

    @property
    def closed(self) -> bool:
        """Return whether :meth:`close` was called."""
        return not self._open

    @contextlib.contextmanager
    def bound(self, *, logits: Logits = "all", passes: Passes = "default") -> Iterator[None]:
        """Bind every program that this thread loads in the block to this session.

        This is for ExecuTorch's own runtime, which passes no options to backends:

        .. code-block:: python

            with session.bound():
                forward = Runtime.get().load_program(path).load_method("forward")

        ``logits`` is one of :data:`etkv.session.LOGITS`, and ``passes`` one of :data:`etkv.session.PASSES`.
        """
        with load_options(self.key, logits, passes):
            yield

    def _raw(self) -> Any:
        if not self._open:
            raise EtkvError("the session is closed: load the program with an open session")
        return super()._raw()

    def __enter__(self: _Self) -> _Self:
        self._raw()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return super().__repr__() if self._open else f"<{type(self).__name__}: closed>"


class DecodeSession(Session):
    """One growing sequence. The fastest kind for a single sequence."""


class SeqSession(Session, SeqCache):
    """Up to 256 sequences, which one step may batch. Sequences fork by sharing cells, and can be removed."""

    KIND = "seq"


class TreeSession(Session, TreeCache):
    """Sequences as in :class:`SeqSession`, with trees of candidates after them."""

    KIND = "tree"


_of_thread = threading.local()


@contextlib.contextmanager
def load_options(
    key: str | None, logits: Logits, passes: Passes = "default", buffers: str | None = None
) -> Iterator[None]:
    """Set the load options of this thread within the block: the key of the cache or None, the rows of logits, the
    passes, and a name for the buffers that programs keep.

    Blocks nest. In a block without a key, programs are bound to no cache, even if an outer block has a key.
    """
    if logits not in LOGITS:
        raise EtkvError(f"logits is {logits!r}, expected one of {', '.join(LOGITS)}")
    if passes not in (*PASSES, "gpu"):
        raise EtkvError(f"passes is {passes!r}, expected one of {', '.join(PASSES)}")
    lib()
    before = getattr(_of_thread, "options", (ffi.NULL, ffi.NULL, ffi.NULL, ffi.NULL))
    options = tuple(
        ffi.NULL if text is None else ffi.new("char[]", text.encode()) for text in (key, logits, passes, buffers)
    )
    try:
        call("etkv_delegate_set_load_options", *options)
        _of_thread.options = options
        yield
    finally:
        call("etkv_delegate_set_load_options", *before)
        _of_thread.options = before
