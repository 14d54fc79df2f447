"""Answers of a language model as token ids, without a tokenizer. :mod:`etkv.answer` returns text."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from etkv._capi import int32
from etkv._device import DeviceAnswer
from etkv._sampling import CONTEXT, Sampling, choose
from etkv.cache import SeqCache
from etkv.config import DEFAULT_MAX_STEP_TOKENS
from etkv.errors import CapacityError, EtkvError, PositionError
from etkv.graph_cache import GraphCache
from etkv.runtime import Program

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from etkv.runtime import Ids

    Row: TypeAlias = npt.NDArray[np.floating[Any]]

FinishReason: TypeAlias = Literal["stop", "length", "capacity", "cancelled"]
"""The reason why an answer ended: an eos token, ``max_tokens``, a full cache, or a call of ``cancel``."""


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of :func:`generate_tokens`, which documents them."""

    max_tokens: int
    sequence: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    eos_token_ids: Collection[int] | None
    progress: bool


def generate_tokens(
    program: Program,
    prompt: Ids,
    *,
    max_tokens: int = 256,
    sequence: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    eos_token_ids: Collection[int] | None = None,
    progress: bool = False,
) -> Generation:
    """Append ``prompt`` to the cache of ``program``, then the answer of the model.

    The cache, :attr:`Program.cache`, is that of the session, or is in the program's graph. ``prompt`` continues the
    text that the cache holds. ``sequence`` is the sequence to continue, if the session has several. ``eos_token_ids``
    end the answer; ``None`` uses those of the program. ``progress`` shows bars on stderr.

    ``logit_bias`` maps token ids to values that are added to their logits; minus infinity forbids a token.
    ``repetition_penalty`` divides the positive logits of the last 64 tokens of prompt and answer, and multiplies their
    negative logits. At a ``temperature`` of 0 the argmax is chosen. Otherwise the token is sampled after three filters,
    in this order: the ``top_k`` most probable tokens (0 for all), the smallest set of most probable tokens whose
    probabilities add up to ``top_p``, and the tokens with at least ``min_p`` times the greatest probability. The same
    ``seed`` gives the same answer.

    With an MLX program the device chooses each token and decodes asynchronously: the next step starts before Python
    requests its token. A CPU program, and a program with its cache in its graph, run step by step. Both ways give the
    same answers.

    Nothing runs before the first token is requested. A ``break``, :meth:`Generation.cancel` and an interruption
    (Ctrl-C) leave the cache usable: it holds the prompt and the first :attr:`Generation.cached_tokens` of the answer.
    If the prompt was not read completely, the cache holds its first :attr:`Generation.read_tokens`: continue with the
    rest, or call :meth:`Generation.roll_back`. If a step fails, the step and the prompt are rolled back, as far as
    layers with windows still hold earlier positions. A cache in a graph keeps the steps that ran.

    The cache must not change between two tokens: if the next position of the sequence has changed, the answer ends with
    an error. Threads that share a session need a common lock, which each thread holds while it iterates, because a
    failed step cancels the declaration of the next step.
    """
    if not isinstance(program, Program):
        raise EtkvError(f"program is {type(program).__name__}, expected an etkv.Program from etkv.load")
    if program.cache is None:
        raise EtkvError(f"{program.path.name} was loaded without a session: pass one to etkv.load")
    ids = id_list(prompt)
    if not ids:
        raise EtkvError("prompt is empty, expected at least one token")
    max_tokens = int32(max_tokens, "max_tokens")
    if max_tokens < 0:
        raise EtkvError(f"max_tokens is {max_tokens}, the minimum is 0")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, logit_bias or {}, seed)
    if sequence and not isinstance(program.cache, SeqCache):
        raise EtkvError(f"sequence is {sequence}, but the cache has one sequence only: use a SeqSession")
    eos = frozenset(program.eos_token_ids if eos_token_ids is None else eos_token_ids)
    return Generation(program, ids, max_tokens, sequence, sampling, eos, progress)


class Generation(Iterator[int]):
    """An iterator over the token ids of an answer, from :func:`generate_tokens`.

    ``token_ids`` are the ids so far. ``finish_reason`` is ``None`` until the answer ends, and then ``stop`` (at an eos
    token, which is not among ``token_ids``), ``length`` (at ``max_tokens``), ``capacity`` (the cache is full, or the
    program's context ends) or ``cancelled`` (by :meth:`cancel`).
    """

    def __init__(
        self,
        program: Program,
        prompt: list[int],
        max_tokens: int,
        sequence: int,
        sampling: Sampling,
        eos_token_ids: frozenset[int],
        progress: bool,
    ) -> None:
        assert program.cache is not None
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.prompt_tokens = len(prompt)
        self._program, self._cache, self._sequence = program, program.cache, sequence
        self._sampling, self._eos_token_ids = sampling, eos_token_ids
        self._max_tokens = max_tokens
        self._bars = _Bars(len(prompt), max_tokens) if progress else None
        self.before_last: Callable[[], None] | None = None
        """A function that is called when all tokens of the prompt except the last have run. Set it before the first
        token is requested."""
        self._start: int | None = None
        self._ran = 0
        """Number of tokens of prompt and answer that ran."""
        self._cancelled = False
        self._prompt = prompt
        # The steps hold a weak reference, so a dropped answer releases the session at once.
        self._steps = Generation._run(weakref.proxy(self), self._bars)

    def __repr__(self) -> str:
        state = self.finish_reason or "unfinished"
        return f"<{type(self).__name__}: {len(self.token_ids)} of {self._max_tokens} tokens, {state}>"

    def __next__(self) -> int:
        return next(self._steps)

    def cancel(self) -> None:
        """End the answer after the current step, with the ``finish_reason`` ``cancelled``. Any thread may call it."""
        self._cancelled = True

    def skip(self, count: int) -> None:
        """Skip the first ``count`` tokens of the prompt, because they are in the cache already. Call it before the
        first token is requested.
        """
        self._prompt = self._prompt[count:]
        self.prompt_tokens = len(self._prompt)
        if self._bars:
            self._bars.prefilled(count)

    @property
    def read_tokens(self) -> int:
        """Number of tokens of the prompt in the cache. After the answer has begun, these are all tokens. Before
        that, they are at most all tokens except the last.
        """
        return 0 if self._start is None else max(0, min(self._next() - self._start, self.prompt_tokens))

    def roll_back(self) -> None:
        """Remove the positions that the prompt and the answer have added to the cache.

        Raises :class:`EtkvError` if layers with windows have dropped positions that the next query would see, and for a
        cache in a graph, which cannot rewind.
        """
        if self._start is None:
            return
        self._steps.close()
        if self._next() == self._start:
            return
        if isinstance(self._cache, SeqCache):
            self._cache.cancel_step()
            self._cache.seq_rm(self._sequence, self._start)
        else:
            self._cache.rewind(self._start)
        self._ran = 0

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of the answer in the cache. The last token runs when the next token is requested.

        A prompt that continues this answer must begin with ``token_ids[cached_tokens:]``. This is the last token, even
        after a cancel, or no token if the model ended the answer. A cache in a program's graph cannot rewind: clear it
        after an interrupted answer.
        """
        if self._start is None:
            return 0
        return max(0, self._next() - self._start - self.prompt_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answer per second; 0 before the second token."""
        return (
            (len(self.token_ids) - 1) / self.decode_seconds
            if self.decode_seconds > 0 and len(self.token_ids) > 1
            else 0.0
        )

    def _next(self) -> int:
        cache = self._cache
        return cache.seq_next(self._sequence) if isinstance(cache, SeqCache) else cache.length

    def _run(self, bars: _Bars | None) -> Generator[int, None, None]:
        cache, prompt = self._cache, self._prompt
        if not cache.can_extend(len(prompt)):
            free = cache.capacity - cache.length
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens, the cache has room for {free} of {cache.capacity}"
            )
        self._start = self._next()
        self._program.check_context(self._start + len(prompt) - 1)
        self._mark_turn(self._start + len(prompt))
        recent = deque(prompt, CONTEXT)
        try:
            if self.before_last is not None:
                self._read_all_but_last(prompt)
                if self._ended_by_cancel():
                    return
                self.before_last()
                prompt = prompt[-1:]
            # The device knows only the tokens that it runs in this answer. A repetition penalty also counts tokens that
            # ran before the answer.
            on_device = len(recent) <= len(prompt) or self._sampling.repetition_penalty == 1.0
            answer = self._on_device(prompt) if on_device else None
            # These are functions of the class, because a bound method would keep the object alive.
            own = Generation
            yield from (
                own._stepped(self, prompt, recent) if answer is None else own._received(self, answer, len(prompt))
            )
        finally:
            if bars:
                bars.close()

    def _mark_turn(self, end: int) -> None:
        """Keep the state at the end of the prompt, so that another text can continue there without the answer."""
        if isinstance(self._cache, SeqCache):
            self._cache.seq_mark_turn(self._sequence, end)
        elif not isinstance(self._cache, GraphCache):
            self._cache.mark_turn(end)

    def _read_all_but_last(self, prompt: list[int]) -> None:
        try:
            self._prefill(prompt[:-1])
        except BaseException as error:
            self._undo(error)
            raise

    def _ended_by_cancel(self) -> bool:
        if self._cancelled:
            self.finish_reason = "cancelled"
            if not self.token_ids:
                self._keep_read()
        return self._cancelled

    def _undo(self, error: BaseException) -> None:
        """Roll back the tokens that ran, but whose next token was not yielded. If the prompt was interrupted, roll back
        only its last token.
        """
        if isinstance(error, PositionError):
            # The cache was changed by another caller, whose positions stay.
            if isinstance(self._cache, SeqCache):
                with contextlib.suppress(EtkvError):
                    self._cache.cancel_step()
        elif self.token_ids or isinstance(error, Exception):
            self._forget(self._last())
        else:
            self._keep_read()

    def _keep_read(self) -> None:
        """Keep the tokens of the prompt that ran, except the last token, whose logits are still needed."""
        assert self._start is not None
        self._forget(min(self._next(), self._start + self.prompt_tokens - 1))

    def _on_device(self, prompt: list[int]) -> DeviceAnswer | None:
        if isinstance(self._cache, GraphCache):
            return None
        stop, most = self._eos_token_ids, self._max_tokens
        if self._program.context is not None:
            # The last token of an answer does not run.
            most = min(most, self._program.context - self._next() - len(prompt) + 1)
        answer = DeviceAnswer.make(self._cache, self._sequence, prompt, self._sampling, stop, most)
        if answer is not None:
            self._program.ends_with(answer)
        return answer

    def _received(self, answer: DeviceAnswer, waiting: int) -> Iterator[int]:
        """Yield the tokens that the device chooses."""
        try:
            self._read(answer, waiting)
            while not self._ended_by_cancel():
                self._program.check_open()
                began = time.perf_counter()
                chosen = answer.next()
                self.decode_seconds += time.perf_counter() - began if self.token_ids else 0.0
                if chosen is None:
                    self.finish_reason = "length"
                    return
                token, end = chosen
                if end == "stop":
                    self.finish_reason = end
                    return
                self._add(token)
                self._ran = self.prompt_tokens + len(self.token_ids) - 1
                yield token
                if end is not None:
                    beyond = end == "length" and len(self.token_ids) < self._max_tokens
                    self.finish_reason = "capacity" if beyond else end
                    return
        except GeneratorExit:
            raise
        except BaseException as error:
            # The device may have chosen a token that was not yielded. The step that computed it will run again.
            answer.close()
            self._undo(error)
            if isinstance(error, EtkvError):
                # Another thread may have closed the program since the check before the step.
                self._program.check_open()
            raise
        finally:
            answer.close()

    def _read(self, answer: DeviceAnswer, waiting: int) -> None:
        began = time.perf_counter()
        while waiting and not self._cancelled:
            self._program.check_open()
            left = answer.read_prompt()
            self._ran += waiting - left
            if self._bars:
                self._bars.prefilled(waiting - left)
            waiting = left
        self.prefill_seconds += time.perf_counter() - began

    def _add(self, token: int) -> None:
        self.token_ids.append(token)
        if self._bars:
            self._bars.answered(1)

    def _last(self) -> int:
        """The position of the answer's last token, or of the prompt's first token before the answer has one."""
        assert self._start is not None
        n = len(self.token_ids)
        return self._start + self.prompt_tokens + n - 1 if n else self._start

    def _stepped(self, prompt: list[int], recent: deque[int]) -> Iterator[int]:
        """Yield the tokens that this process chooses from the logits of each step."""
        cache, sampling = self._cache, self._sampling.raw()
        ids = prompt
        while not self._ended_by_cancel():
            try:
                row = self._decode(ids) if self.token_ids else self._prefill(ids)
                if self._ended_by_cancel():
                    if self.token_ids:
                        # The last token ran, but the token after it is not delivered, so the last token will run again.
                        self._forget(self._last())
                    return
                assert row is not None
                token = choose(sampling, row, recent, len(self.token_ids))
                if not self._max_tokens:
                    self.finish_reason = "length"
                    return
                if token in self._eos_token_ids:
                    self.finish_reason = "stop"
                    return
                self._add(token)
            except BaseException as error:
                self._undo(error)
                raise
            recent.append(token)
            yield token
            if len(self.token_ids) == self._max_tokens:
                self.finish_reason = "length"
                return
            if not cache.can_extend(1) or self._next() == self._program.context:
                self.finish_reason = "capacity"
                return
            ids = [token]

    def _decode(self, ids: list[int]) -> Row:
        began = time.perf_counter()
        row = self._step(ids)
        self.decode_seconds += time.perf_counter() - began
        return row

    def _prefill(self, prompt: list[int]) -> Row | None:
        chunk, row = self._most_tokens(), None
        began = time.perf_counter()
        for start in range(0, len(prompt), chunk):
            if self._cancelled:
                break
            prefill_chunk = prompt[start : start + chunk]
            row = self._step(prefill_chunk)
            if self._bars:
                self._bars.prefilled(len(prefill_chunk))
        self.prefill_seconds += time.perf_counter() - began
        return row

    def _most_tokens(self) -> int:
        """The maximum tokens of a step: the smaller of the program's limit and the cache's."""
        program = self._program
        most: int = program.constant("get_prefill_chunk_size") or program.max_step_tokens or DEFAULT_MAX_STEP_TOKENS
        return most if isinstance(self._cache, GraphCache) else min(most, self._cache.max_step_tokens)

    def _forget(self, position: int) -> None:
        """Roll back the positions at or after ``position``, as far as layers with windows allow."""
        assert self._start is not None
        with contextlib.suppress(EtkvError):
            if self._next() < self._start + self._ran:
                # The cache was changed by another caller.
                return
            self._ran = min(self._ran, position - self._start)
            if isinstance(self._cache, SeqCache):
                # Otherwise the declaration of a step that did not run would apply to the next step.
                self._cache.cancel_step()
                self._cache.seq_rm(self._sequence, position)
            elif self._cache.length > position:
                self._cache.rewind(position)

    def _step(self, ids: list[int]) -> Row:
        """Run ``ids`` after the positions of the answer. Return the last row of logits, [vocabulary]."""
        assert self._start is not None
        position = self._start + self._ran
        if self._next() != position:
            raise PositionError(
                f"the answer continues at position {position}, but the next position of the cache is {self._next()}: "
                "something else has changed the cache"
            )
        if isinstance(self._cache, SeqCache):
            self._cache.begin_step([self._sequence] * len(ids))
        row = self._program.last_row(ids, range(position, position + len(ids)))
        self._ran += len(ids)
        return row


class _Bars:
    """Progress bars on stderr, first for the prompt, then for the answer."""

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


def id_list(prompt: Ids) -> list[int]:
    """Return the ids of a prompt. Raises :class:`EtkvError` for other values."""
    values: list[Any] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise EtkvError(f"prompt has {value!r}; expected token ids; a Tokenizer encodes text")
    return [int(value) for value in values]
