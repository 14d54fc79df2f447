"""A conversation on one session: what the cache holds already is not run again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from etkv.errors import EtkvError
from etkv.generation import GenerateOptions, Generation, generate_tokens, with_eos_token_ids
from etkv.runtime import Program
from etkv.session import DecodeSession
from etkv.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Chat:
    """Turns of a conversation under the model's chat template.

    ``messages`` are ``{"role": …, "content": …}`` and may be changed between turns: the next one runs what differs from
    what the cache holds, and no more. ``generation`` is the last turn's :class:`Generation`.
    """

    def __init__(self, program: Program, tokenizer: Tokenizer, *, system: str | None = None) -> None:
        """``program`` is bound to a :class:`DecodeSession` of the conversation's own; what that holds is forgotten."""
        if not isinstance(program.session, DecodeSession):
            raise EtkvError(f"a chat needs a program with a DecodeSession, this one has {program.session!r}")
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.generation: Generation | None = None
        self._program, self._session, self._tokenizer = program, program.session, tokenizer
        self._held: list[int] = []
        self._session.clear()

    def send_message(self, text: str, **options: Unpack[GenerateOptions]) -> Iterator[str]:
        """The model's answer to ``text``, piece by piece; ``options`` are those of :func:`etkv.generate_tokens`.

        A turn that is broken off stays in ``messages`` as far as it came. One that is refused, or fails on the way,
        leaves no message there: the next turn goes on as if it had not been asked for.
        """
        before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._turn(options)
        except Exception:
            del self.messages[before:]
            raise

    def _turn(self, options: GenerateOptions) -> Iterator[str]:
        """Answer the last of the messages; what was said stays, but for that of a turn that fails."""
        ids = self._tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)
        shared = self._rewind_to_shared(ids)
        self._held = ids[:shared]
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
            self._held = [*ids, *generation.token_ids][: self._session.length]
            self.messages.append({"role": "assistant", "content": detokenizer.text})

    def _rewind_to_shared(self, ids: list[int]) -> int:
        """Go back to what the cache and ``ids`` have in common, less one: the last token's logits are wanted."""
        pairs = zip(self._held, ids, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared = min(shared, len(ids) - 1)
        if shared < self._session.rewindable_to():
            # Layers with windows have dropped what the next query would see.
            shared = 0
        self._session.rewind(shared)
        return shared
