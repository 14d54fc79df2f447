"""Answers of a language model as text, made from the token ids of :mod:`etkv.generation`.

:func:`generate` returns the text of an answer, :func:`stream_generate` yields its pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError
from etkv.generation import FinishReason, GenerateOptions, Generation, generate_tokens, id_list
from etkv.keeper import Keeper
from etkv.runtime import Program
from etkv.tokenizer import StreamingDetokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from etkv.prefix_cache import PrefixCache
    from etkv.runtime import Ids
    from etkv.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationResponse:
    """A piece of an answer, which :func:`stream_generate` yields."""

    text: str
    """Whole characters; may be empty."""
    token: int | None
    """The token id that completed the text; None in the last response, which has the rest of the text."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    generation_tokens: int
    """Number of tokens of the answer so far."""
    prompt_tps: float
    """Tokens of the prompt per second."""
    generation_tps: float
    """Tokens of the answer per second; 0 before the second token."""
    finish_reason: FinishReason | None
    """The reason why the answer ended, in the last response; None in the others."""
    cached_tokens: int = 0
    """Number of tokens of the prompt that came from a prefix cache. The model did not read these tokens, and
    ``prompt_tps`` excludes them.
    """


def generate(
    program: Program,
    tokenizer: Tokenizer,
    prompt: str | Ids,
    *,
    prefix_cache: PrefixCache | None = None,
    fingerprint: str | None = None,
    skip_special_tokens: bool = True,
    **options: Unpack[GenerateOptions],
) -> str:
    """Return the text of the answer to ``prompt``; :func:`stream_generate` documents the arguments."""
    kept: Any = {
        "prefix_cache": prefix_cache,
        "fingerprint": fingerprint,
        "skip_special_tokens": skip_special_tokens,
    }
    return "".join(response.text for response in stream_generate(program, tokenizer, prompt, **kept, **options))


def stream_generate(
    program: Program,
    tokenizer: Tokenizer,
    prompt: str | Ids,
    *,
    prefix_cache: PrefixCache | None = None,
    fingerprint: str | None = None,
    skip_special_tokens: bool = True,
    **options: Unpack[GenerateOptions],
) -> Answer:
    """Iterate over the answer to ``prompt``: a response for each token, and a last response with the ``finish_reason``.

    ``prompt`` is a text, or token ids such as :meth:`Tokenizer.apply_chat_template` returns. :meth:`Tokenizer.encode`
    encodes a text. ``options`` are those of :func:`generate_tokens`. If the program has no eos token ids, the eos token
    ids of the tokenizer end the answer. Special tokens of the answer, such as those around a tool call, are in its text
    unless ``skip_special_tokens`` is set.

    With a ``prefix_cache``, ``prompt`` is the whole text. The cache of ``program`` is cleared, and continues from the
    longest prefix of the prompt in the prefix cache. The contents of the cache are added to the prefix cache when the
    answer ends and, if layers have windows, when the prompt ends. ``fingerprint`` identifies the model; None stands for
    :func:`etkv.fingerprint` of the program. If the prefix cache fails, the answer goes on without it, and the log has
    a warning.

    This call checks the arguments. Nothing runs before the first response is requested. :meth:`Answer.cancel` ends
    the answer from any thread.
    """
    if not hasattr(tokenizer, "encode"):
        raise EtkvError(f"tokenizer is {type(tokenizer).__name__}, expected an etkv.Tokenizer; pass the program first")
    ids: Ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    options = with_eos_token_ids(options, program, tokenizer)
    detokenizer = StreamingDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    generation = generate_tokens(program, ids, **options)
    if prefix_cache is None:
        return Answer(generation, _responses(generation, detokenizer))
    if options.get("sequence"):
        raise EtkvError(f"sequence is {options['sequence']}, expected 0 with a prefix_cache")
    keeper = Keeper(program, prefix_cache, fingerprint)
    return Answer(generation, _kept_responses(keeper, generation, id_list(ids), detokenizer))


def _kept_responses(
    keeper: Keeper, generation: Generation, ids: list[int], detokenizer: StreamingDetokenizer
) -> Iterator[GenerationResponse]:
    """Clear the cache, continue from the longest prefix that is kept, and answer the whole text."""
    keeper.cache.clear()
    cached = keeper.attach(ids[:-1])
    generation.skip(cached)
    if keeper.has_windows:
        generation.before_last = lambda: keeper.keep(ids[:-1])
    for response in _responses(generation, detokenizer):
        yield replace(response, prompt_tokens=len(ids), cached_tokens=cached)
    keeper.keep([*ids, *generation.token_ids][: keeper.cache.length])


class Answer(Iterator[GenerationResponse]):
    """An iterator over the responses of an answer, from :func:`stream_generate`.

    :func:`generate_tokens` documents the state of the cache after a ``break``, :meth:`close` or :meth:`cancel`.
    """

    def __init__(self, generation: Generation, responses: Iterator[GenerationResponse]) -> None:
        self.generation = generation
        """The token ids of the answer, and the numbers of tokens of prompt and answer in the cache."""
        self._responses = responses

    def __next__(self) -> GenerationResponse:
        return next(self._responses)

    def cancel(self) -> None:
        """End the answer as :meth:`Generation.cancel` does, from any thread. One more response follows."""
        self.generation.cancel()

    def close(self) -> None:
        """End the answer without a last response, as a ``break`` does. Call it only on the thread that iterates."""
        close = getattr(self._responses, "close", None)
        if close is not None:
            close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.generation!r}>"


def with_eos_token_ids(options: GenerateOptions, program: Program, tokenizer: Tokenizer) -> GenerateOptions:
    """Return ``options``, with the tokenizer's eos token ids if neither ``options`` nor the program has any."""
    if options.get("eos_token_ids") is not None or program.eos_token_ids:
        return options
    return {**options, "eos_token_ids": tokenizer.eos_token_ids}


def _responses(generation: Generation, detokenizer: StreamingDetokenizer) -> Iterator[GenerationResponse]:
    for token in generation:
        detokenizer.add_token(token)
        yield _response(generation, detokenizer.last_segment, token)
    detokenizer.finalize()
    yield _response(generation, detokenizer.last_segment, None)


def _response(generation: Generation, text: str, token: int | None) -> GenerationResponse:
    return GenerationResponse(
        text,
        token,
        generation.prompt_tokens,
        len(generation.token_ids),
        generation.prompt_tokens / generation.prefill_seconds if generation.prefill_seconds > 0 else 0.0,
        generation.tokens_per_second,
        None if token is not None else generation.finish_reason,
    )
