"""A conversation on one cache. A turn runs only tokens that are not in the cache yet."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etkv.answer import with_eos_token_ids
from etkv.errors import EtkvError
from etkv.generation import GenerateOptions, Generation, generate_tokens
from etkv.graph_cache import GraphCache
from etkv.keeper import Keeper
from etkv.prefix_cache import PrefixCache
from etkv.prefix_store import PrefixStore
from etkv.runtime import Program
from etkv.session import DecodeSession
from etkv.tokenizer import StreamingDetokenizer, Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Reuse:
    """The reuse of cached tokens in one turn. All fields count tokens."""

    matched: int
    """The length of the text's longest prefix that was in the cache, in the prefix cache or in the store."""
    restored: int
    """The length of the prefix from which the turn continued."""
    run: int
    """Number of the text's tokens that ran in the turn, without the answer."""

    @property
    def run_again(self) -> int:
        """Number of tokens that were in a cache and nevertheless ran again."""
        return self.matched - self.restored

    @property
    def reason(self) -> str:
        """The reason why matching tokens ran again; empty if none did."""
        if self.run_again == 0:
            return ""
        return f"{self.matched} tokens matched, but the cache could only be rewound to length {self.restored}"


class Chat:
    """Turns of a conversation under the model's chat template.

    ``messages`` are dicts ``{"role": …, "content": …}``. The caller may change them between turns: the next turn keeps
    the prefix that the cache shares with them, and runs the rest. An answer whose text is not changed keeps the ids
    that the model chose, including special tokens. ``generation`` is the :class:`Generation` of the last turn, and
    ``reuse`` is its :class:`Reuse`. Both are None before the first turn.
    """

    def __init__(
        self,
        program: Program,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        prefix_store: PrefixStore | None = None,
        prefix_cache: PrefixCache | None = None,
        fingerprint: str | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        """Begin a conversation on the cache of ``program``, a :class:`DecodeSession` or a :class:`GraphCache`. The
        cache is cleared, and only this chat may use it.

        ``system`` is the content of the system message; None for no such message. With a ``prefix_cache`` the chat
        continues from prefixes of other chats, and adds the text of each completed turn. If layers have windows, it
        also adds the prompt of each turn. If the next turn's tokens differ within the answer, the turn continues from
        the end of this prompt.
        With a ``prefix_store`` the chat loads the stored prefix of its text, and stores each completed turn.
        ``fingerprint`` identifies the model; None stands for :func:`etkv.fingerprint` of the program. If a store or a
        prefix cache fails, the chat goes on without it, and the log has a warning. Answers have special tokens in
        their text, such as those around a tool call, unless ``skip_special_tokens`` is set.

        Raises :class:`EtkvError` if ``program`` has no cache or a cache of another type, for a ``prefix_store`` or a
        ``prefix_cache`` with a :class:`GraphCache`, and for both together: pass the store to the prefix cache instead.
        """
        if not isinstance(program.cache, (DecodeSession, GraphCache)):
            raise EtkvError(f"a chat needs a program with a DecodeSession, this one has {program.cache!r}")
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.generation: Generation | None = None
        self.reuse: Reuse | None = None
        self._program, self._cache, self._tokenizer = program, program.cache, tokenizer
        if prefix_store is not None and prefix_cache is not None:
            raise EtkvError("expected a prefix_store or a prefix_cache, got both: pass the store to the prefix cache")
        kept = prefix_store or prefix_cache
        self._keeper = None if kept is None else Keeper(program, kept, fingerprint)
        self._held: list[int] = []
        self._skip_special_tokens = skip_special_tokens
        # The text of each answer, and the ids that the model chose, in order.
        self._answers: list[tuple[str, list[int]]] = []
        self._cache.clear()

    def send_message(self, text: str, **options: Unpack[GenerateOptions]) -> Iterator[str]:
        """Yield the model's answer to ``text`` in pieces. ``options`` are those of :func:`etkv.generate_tokens`.

        If the caller stops early, ``messages`` keeps the turn with the text so far. If the turn is refused or fails, or
        is interrupted before the answer begins, its messages are removed, and the next turn continues from the earlier
        messages.
        """
        before, question = len(self.messages), {"role": "user", "content": text}
        try:
            self.messages.append(question)
            yield from self._turn(options)
        except Exception:
            del self.messages[before:]
            raise
        finally:
            if self.messages[before:] == [question]:
                # The answer did not begin. Remove the question: some templates refuse a question without an answer.
                del self.messages[before:]

    def _turn(self, options: GenerateOptions) -> Iterator[str]:
        """Yield the answer to the last message. Append the answer to ``messages``, even if the turn stops early."""
        answers = self._unchanged_answers()
        ids = self._tokenizer.conversation_ids(self.messages, answers)
        matched = self._rewind_to_shared(ids)
        kept = self._attach(ids)
        shared = len(self._held)
        self.reuse = Reuse(max(matched, kept), shared, len(ids) - shared)
        self._mark_messages(ids, answers)
        options = with_eos_token_ids(options, self._program, self._tokenizer)
        self.generation = generation = generate_tokens(self._program, ids[shared:], **options)
        keeper = self._keeper
        if keeper is not None and keeper.has_windows:
            generation.before_last = lambda: keeper.keep(ids[:-1])
        detokenizer = StreamingDetokenizer(self._tokenizer, skip_special_tokens=self._skip_special_tokens)
        try:
            for token in generation:
                detokenizer.add_token(token)
                if piece := detokenizer.last_segment:
                    yield piece
            detokenizer.finalize()
            if piece := detokenizer.last_segment:
                yield piece
        finally:
            self._answers.append((detokenizer.text, list(generation.token_ids)))
            self.messages.append({"role": "assistant", "content": detokenizer.text})
            self._held = [*ids, *generation.token_ids][: self._cache.length]
        if keeper is not None:
            keeper.keep(self._held)

    def _unchanged_answers(self) -> dict[int, list[int]]:
        """Forget the answers whose messages the caller has changed or removed. Return the ids of the other answers, by
        the index of the message.
        """
        ids_of: dict[int, list[int]] = {}
        left, kept = self._answers, []
        for number, message in enumerate(self.messages):
            texts = ({"role": "assistant", "content": text} for text, _ in left)
            at = next((at for at, answer in enumerate(texts) if answer == message), None)
            if at is not None:
                kept.append(left[at])
                ids_of[number], left = left[at][1], left[at + 1 :]
        self._answers = kept
        return ids_of

    def _mark_messages(self, ids: list[int], answers: dict[int, list[int]]) -> None:
        """Mark where each message after the last answer begins. A later request may change the message, and other
        chats may share the messages before it, such as the system message. ``answers`` are the ids of unchanged
        answers.
        """
        if isinstance(self._cache, GraphCache) or self._cache.n_recurrent_layers == 0:
            return
        answered = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        for number in range(max([*answered, 0]) + 1, len(self.messages)):
            # A template may refuse the messages before this message alone. So render two conversations that differ in
            # this message only. Their common prefix ends where the message begins.
            before, message = self.messages[:number], self.messages[number]
            others = ([*before, {**message, "content": text}] for text in ("a", "1"))
            with contextlib.suppress(EtkvError):
                begin = min(_n_shared(ids, self._tokenizer.conversation_ids(other, answers)) for other in others)
                if begin > len(self._held):
                    self._cache.mark(begin)

    def _attach(self, ids: list[int]) -> int:
        """Attach the cache to the longest kept prefix of ``ids``, if it is longer than the prefix in the cache. Return
        the length of the kept prefix; 0 if it is not longer.
        """
        text = ids[:-1]
        if self._keeper is None or (self._held and self._keeper.find(text) <= len(self._held)):
            return 0
        # This order matters: after an interrupt at any line, the cache begins with `_held`.
        self._held = []
        self._cache.clear()
        self._held = text[: self._keeper.attach(text)]
        return len(self._held)

    def _rewind_to_shared(self, ids: list[int]) -> int:
        """Rewind the cache to the prefix that it shares with ``ids``. Return the length of the shared prefix.

        The last of ``ids`` always runs again, because its logits choose the next token. Layers with windows and
        recurrent layers may have dropped data that the next token needs. Then the cache is rewound further, to a
        checkpoint or to 0.
        """
        shared = min(_n_shared(self._held, ids), len(ids) - 1)
        # This order matters: after an interrupt at any line, the cache begins with `_held`.
        self._held = ids[: self._cache.reachable(shared)]
        self._held = self._held[: self._cache.rewind_to_reachable(shared)]
        return shared


def _n_shared(text: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = zip(text, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
