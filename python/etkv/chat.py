"""A conversation on one cache. A turn runs only the tokens that the cache does not hold yet."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from etkv.cache import fingerprint as fingerprint_of
from etkv.errors import EtkvError
from etkv.generation import GenerateOptions, Generation, generate_tokens, with_eos_token_ids
from etkv.graph_cache import GraphCache
from etkv.prefix_store import PrefixStore
from etkv.runtime import Program
from etkv.session import DecodeSession
from etkv.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("etkv.chat")


class Chat:
    """Turns of a conversation under the model's chat template.

    ``messages`` are dicts ``{"role": …, "content": …}``. The caller may change them between turns: the next turn keeps
    the beginning that the cache shares with them, and runs the rest. ``generation`` is the :class:`Generation` of the
    last turn, or None before the first.
    """

    def __init__(
        self,
        program: Program,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        prefix_store: PrefixStore | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Begin a conversation, and clear the cache of ``program``, which is for this chat alone: a
        :class:`DecodeSession`, or the :class:`GraphCache` of a program that keeps its cache in its graph.

        ``system`` is the content of the system message; None for no such message. With a ``prefix_store`` the chat
        loads what its texts begin with from there, and stores each turn that ends. ``fingerprint`` names the model;
        None for :func:`etkv.fingerprint` of the program. A store that fails is passed by, with a warning in the log.

        Raises :class:`EtkvError` if ``program`` has no cache or one of another type, and for a ``prefix_store`` with a
        cache in the graph.
        """
        if not isinstance(program.cache, (DecodeSession, GraphCache)):
            raise EtkvError(f"a chat needs a program with a DecodeSession, this one has {program.cache!r}")
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.generation: Generation | None = None
        self._program, self._cache, self._tokenizer = program, program.cache, tokenizer
        self._store, self._fingerprint = prefix_store, fingerprint or ""
        if prefix_store is not None:
            if not isinstance(program.cache, DecodeSession):
                raise EtkvError(
                    "a prefix_store needs a program with a DecodeSession, this one has its cache in its graph"
                )
            if fingerprint is None:
                self._fingerprint = fingerprint_of(program.path)
        self._held: list[int] = []
        self._cache.clear()

    def send_message(self, text: str, **options: Unpack[GenerateOptions]) -> Iterator[str]:
        """Yield the model's answer to ``text`` in pieces. ``options`` are those of :func:`etkv.generate_tokens`.

        If the caller stops early, ``messages`` keeps the turn with the text so far. If the turn is refused or fails,
        its messages are removed, and the next turn goes on from the messages before it.
        """
        before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._turn(options)
        except Exception:
            del self.messages[before:]
            raise

    def _turn(self, options: GenerateOptions) -> Iterator[str]:
        """Yield the answer to the last message. Append the answer to ``messages``, also if the turn stops early."""
        ids = self._tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)
        self._held = ids[: self._rewind_to_shared(ids)]
        self._load_stored(ids)
        shared = len(self._held)
        options = with_eos_token_ids(options, self._program, self._tokenizer)
        self.generation = generation = generate_tokens(self._program, ids[shared:], **options)
        detokenizer = self._tokenizer.detokenizer
        try:
            for token in generation:
                detokenizer.add_token(token)
                if piece := detokenizer.last_segment:
                    yield piece
            detokenizer.finalize()
            if piece := detokenizer.last_segment:
                yield piece
        finally:
            self._held = [*ids, *generation.token_ids][: self._cache.length]
            self.messages.append({"role": "assistant", "content": detokenizer.text})
        if self._store is not None and isinstance(self._cache, DecodeSession):
            # The answer is there: that it is not stored is no reason to lose it.
            with _warning():
                self._store.save(self._cache, self._held, fingerprint=self._fingerprint)

    def _load_stored(self, ids: list[int]) -> None:
        """Load what the store has of ``ids``, if it is more than the cache holds. A store that fails is passed by."""
        cache, text = self._cache, ids[:-1]
        if self._store is None or not isinstance(cache, DecodeSession):
            return
        with _warning():
            if self._store.find(cache, text, fingerprint=self._fingerprint) > len(self._held):
                # In this order: what is held is true wherever this stops.
                self._held = []
                cache.clear()
                self._held = text[: self._store.load(cache, text, fingerprint=self._fingerprint)]

    def _rewind_to_shared(self, ids: list[int]) -> int:
        """Rewind the cache to the positions that it shares with ``ids``, and return their number.

        The last of ``ids`` always runs again: its logits choose the next token.
        """
        pairs = zip(self._held, ids, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared = min(shared, len(ids) - 1)
        if shared < self._cache.rewindable_to():
            # Layers with windows have dropped what the next query would see, and a cache in a graph cannot rewind.
            shared = 0
        self._cache.rewind(shared)
        return shared


@contextlib.contextmanager
def _warning() -> Iterator[None]:
    """Log an error of the block, and go on."""
    try:
        yield
    except EtkvError as error:
        _log.warning("the prefix store is passed by: %s", error)
