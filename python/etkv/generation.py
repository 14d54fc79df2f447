"""Answers of a language model, token by token.

:func:`generate` returns the text of an answer, :func:`stream_generate` its pieces as they are made, and
:func:`generate_tokens` its token ids. The last one needs no tokenizer.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from etkv.cache import SeqCache
from etkv.errors import CapacityError, EtkvError
from etkv.runtime import Program

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

    from etkv.runtime import Ids
    from etkv.tokenizer import StreamingDetokenizer, Tokenizer

    Row: TypeAlias = npt.NDArray[np.floating[Any]]

DEFAULT_CHUNK = 512
"""Tokens of a prompt in one step, if the program does not report a number."""

FinishReason: TypeAlias = Literal["stop", "length", "capacity"]
"""The reason why an answer ended: an eos token, ``max_tokens``, or a full cache."""


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of :func:`generate_tokens`, which documents them."""

    max_tokens: int
    sequence: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    eos_token_ids: Collection[int] | None
    progress: bool


@dataclass(frozen=True)
class GenerationResponse:
    """A piece of an answer, as :func:`stream_generate` yields them."""

    text: str
    """Whole characters; may be empty."""
    token: int | None
    """The token id that completed the text; None in the last response, which has the rest of the text."""
    prompt_tokens: int
    """Tokens of the prompt."""
    generation_tokens: int
    """Tokens of the answer so far."""
    prompt_tps: float
    """Tokens of the prompt a second."""
    generation_tps: float
    """Tokens of the answer a second; 0 before the second token."""
    finish_reason: FinishReason | None
    """The reason why the answer ended, in the last response; None in the others."""


def generate(program: Program, tokenizer: Tokenizer, prompt: str | Ids, **options: Unpack[GenerateOptions]) -> str:
    """Return the text of the answer to ``prompt``; :func:`stream_generate` documents the arguments."""
    return "".join(response.text for response in stream_generate(program, tokenizer, prompt, **options))


def stream_generate(
    program: Program, tokenizer: Tokenizer, prompt: str | Ids, **options: Unpack[GenerateOptions]
) -> Iterator[GenerationResponse]:
    """Iterate over the answer to ``prompt``: a response for each token, and a last one with the ``finish_reason``.

    ``prompt`` is a text or token ids, such as :meth:`Tokenizer.apply_chat_template` makes; a text is encoded as
    :meth:`Tokenizer.encode` does. ``options`` are those of :func:`generate_tokens`. Where the program names no eos
    token ids, the tokenizer's end the answer.

    The arguments are checked at once. Nothing runs before the first response is requested.
    """
    ids: Ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    generation = generate_tokens(program, ids, **with_eos_token_ids(options, program, tokenizer))
    return _responses(generation, tokenizer.detokenizer)


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


def generate_tokens(
    program: Program,
    prompt: Ids,
    *,
    max_tokens: int = 256,
    sequence: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos_token_ids: Collection[int] | None = None,
    progress: bool = False,
) -> Generation:
    """Append ``prompt`` to the cache of ``program``, then the answer of the model.

    ``prompt`` follows the positions that the session holds; none is removed. ``sequence`` is the sequence to continue,
    if the session has several. At a ``temperature`` of 0 the greatest logit is chosen. Otherwise tokens are sampled
    from the ``top_k`` best (0 for all), and of those from the fewest that have ``top_p`` of the probability.
    ``eos_token_ids`` end the answer; ``None`` uses those of the program. ``progress`` shows bars on stderr.

    Nothing runs before the first token is requested. A ``break`` and an interruption (Ctrl-C) leave the session usable:
    it holds the prompt and the first :attr:`Generation.cached_tokens` of the answer. A prompt that is interrupted is
    rolled back, as far as layers with windows still hold the positions before it. If threads share a session, each one
    must hold a lock of the application's while it iterates: a step that fails cancels the declaration of the next one.
    """
    if program.session is None:
        raise EtkvError(f"{program.path.name} was loaded without a session: pass one to etkv.load")
    ids = _id_list(prompt)
    if not ids:
        raise EtkvError("prompt is empty; it has at least one token")
    for name, value, least in (("max_tokens", max_tokens, 0), ("top_k", top_k, 0)):
        if value < least:
            raise EtkvError(f"{name} is {value}, the least is {least}")
    # Written so that a NaN, which is neither, is refused.
    if not temperature >= 0:
        raise EtkvError(f"temperature is {temperature}, the least is 0")
    if seed is not None and seed < 0:
        raise EtkvError(f"seed is {seed}, the least is 0")
    if not 0 < top_p <= 1:
        raise EtkvError(f"top_p is {top_p}, expected more than 0 and at most 1")
    if sequence and not isinstance(program.session, SeqCache):
        raise EtkvError(f"sequence is {sequence}, and the session has one only: use a SeqSession")
    eos = frozenset(program.eos_token_ids if eos_token_ids is None else eos_token_ids)
    return Generation(program, ids, max_tokens, sequence, _Sampler(temperature, top_k, top_p, seed), eos, progress)


class Generation(Iterator[int]):
    """An iterator over the token ids of an answer. :func:`generate_tokens` makes it.

    ``token_ids`` are the ids so far. ``finish_reason`` is ``None`` until the answer ends, and then ``stop`` (at an eos
    token, which is not among ``token_ids``), ``length`` (at ``max_tokens``) or ``capacity`` (the cache is full).
    """

    def __init__(
        self,
        program: Program,
        prompt: list[int],
        max_tokens: int,
        sequence: int,
        sampler: _Sampler,
        eos_token_ids: frozenset[int],
        progress: bool,
    ) -> None:
        assert program.session is not None
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.prompt_tokens = len(prompt)
        self._program, self._session, self._sequence = program, program.session, sequence
        self._sampler, self._eos_token_ids = sampler, eos_token_ids
        self._max_tokens = max_tokens
        self._bars = _Bars(len(prompt), max_tokens) if progress else None
        self._start: int | None = None
        # Its steps hold a weak reference, so that an answer that is dropped releases the session at once.
        self._steps = Generation._run(weakref.proxy(self), prompt, self._bars)

    def __repr__(self) -> str:
        state = self.finish_reason or "unfinished"
        return f"<{type(self).__name__}: {len(self.token_ids)} of {self._max_tokens} tokens, {state}>"

    def __next__(self) -> int:
        return next(self._steps)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the answer that the cache holds. The last token runs when the next one is requested.

        A prompt that continues this answer begins with ``token_ids[cached_tokens:]``: its last token, or nothing if
        the model ended the answer.
        """
        if self._start is None:
            return 0
        return max(0, self._next() - self._start - self.prompt_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answer a second; 0 before the second token."""
        return (
            (len(self.token_ids) - 1) / self.decode_seconds
            if self.decode_seconds > 0 and len(self.token_ids) > 1
            else 0.0
        )

    def _next(self) -> int:
        session = self._session
        return session.seq_next(self._sequence) if isinstance(session, SeqCache) else session.length

    def _run(self, prompt: list[int], bars: _Bars | None) -> Iterator[int]:
        session = self._session
        if not session.can_extend(len(prompt)):
            free = session.capacity - session.length
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens, the cache has room for {free} of {session.capacity}"
            )
        self._start = self._next()
        try:
            token = self._chosen(self._start, self._prefill, prompt)
            while len(self.token_ids) < self._max_tokens:
                if token in self._eos_token_ids:
                    self.finish_reason = "stop"
                    return
                self.token_ids.append(token)
                if bars:
                    bars.answered(1)
                yield token
                if len(self.token_ids) == self._max_tokens:
                    break
                if not session.can_extend(1):
                    self.finish_reason = "capacity"
                    return
                token = self._chosen(self._start + self.prompt_tokens + len(self.token_ids) - 1, self._decode, [token])
            self.finish_reason = "length"
        finally:
            if bars:
                bars.close()

    def _chosen(self, position: int, run: Callable[[list[int]], Row], ids: list[int]) -> int:
        """Run ``ids`` from ``position`` on, and choose the next token."""
        try:
            return self._sampler.choose(run(ids))
        except BaseException:
            # The ids may have run without a next token: roll them back, so that they can run again.
            self._forget(position)
            raise

    def _decode(self, ids: list[int]) -> Row:
        began = time.perf_counter()
        row = self._step(ids)
        self.decode_seconds += time.perf_counter() - began
        return row

    def _prefill(self, prompt: list[int]) -> Row:
        chunk = self._most_tokens()
        began = time.perf_counter()
        for start in range(0, len(prompt), chunk):
            prefill_chunk = prompt[start : start + chunk]
            row = self._step(prefill_chunk)
            if self._bars:
                self._bars.prefilled(len(prefill_chunk))
        self.prefill_seconds = time.perf_counter() - began
        return row

    def _most_tokens(self) -> int:
        """The most tokens of a step: the limit of the program, and that of the cache if it has one."""
        most = self._program.constant("get_prefill_chunk_size") or DEFAULT_CHUNK
        config = self._session.config
        if config.quantized_kv_start or any(layer.window for layer in config.layers):
            most = min(most, config.max_step_tokens or DEFAULT_CHUNK)
        return most

    def _forget(self, position: int) -> None:
        """Roll back the positions from ``position`` on, as far as layers with windows allow."""
        with contextlib.suppress(EtkvError):
            if isinstance(self._session, SeqCache):
                # The declaration of a step that did not run would apply to the next one.
                self._session.cancel_step()
                self._session.seq_rm(self._sequence, position)
            elif self._session.length > position:
                self._session.rewind(position)

    def _step(self, ids: list[int]) -> Row:
        """Run ``ids`` after the positions held; return the last row of logits [vocabulary], valid until the next."""
        position = self._next()
        if isinstance(self._session, SeqCache):
            self._session.begin_step([self._sequence] * len(ids))
        rows = self._program.forward(ids, range(position, position + len(ids)), copy=False)
        row: Row = rows[-1]
        return row


class _Sampler:
    """Chooses an id from a row of logits."""

    def __init__(self, temperature: float, top_k: int, top_p: float, seed: int | None) -> None:
        import numpy as np

        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._random = np.random.default_rng(seed)

    def choose(self, row: Row) -> int:
        import numpy as np

        if self._temperature == 0:
            return int(row.argmax())
        # At a temperature near 0 all logits but the best become minus infinity.
        with np.errstate(over="ignore"):
            scaled = (row.astype(np.float64) - row.max()) / self._temperature
        order = np.argsort(-scaled, kind="stable")
        if self._top_k:
            order = order[: self._top_k]
        shares = np.exp(scaled[order] - scaled[order[0]])
        shares /= shares.sum()
        # The id that reaches top_p is included.
        kept = int(np.searchsorted(np.cumsum(shares), self._top_p)) + 1
        shares = shares[:kept] / shares[:kept].sum()
        return int(self._random.choice(order[:kept], p=shares))


class _Bars:
    """Progress on stderr: of the prompt, then of the answer."""

    def __init__(self, n_prompt: int, n_answer: int) -> None:
        from tqdm import tqdm

        self._tqdm: Any = tqdm
        self._n_answer = n_answer
        self._bar: Any = self._make(n_prompt, "prompt")
        self._answering = False

    def _make(self, total: int, name: str) -> Any:
        return self._tqdm(total=total, desc=name, unit="token", leave=False)

    def prefilled(self, n: int) -> None:
        self._bar.update(n)

    def answered(self, n: int) -> None:
        if not self._answering:
            self._bar.close()
            self._bar = self._make(self._n_answer, "answer")
            self._answering = True
        self._bar.update(n)

    def close(self) -> None:
        self._bar.close()


def _id_list(prompt: Ids) -> list[int]:
    values: list[Any] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise EtkvError(f"prompt has {value!r}; it has token ids, and a tokenizer makes them of text")
    return [int(value) for value in values]
