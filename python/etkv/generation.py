"""Answers of a language model, token by token: :func:`generate`."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from etkv.cache import SeqCache
from etkv.errors import CapacityError, EtkvError
from etkv.runtime import Program

if TYPE_CHECKING:
    import numpy as np

    from etkv.runtime import Ids

DEFAULT_CHUNK = 512
"""Tokens of a prompt in one step, where the program does not tell."""


def generate(
    program: Program,
    prompt: Ids,
    *,
    max_new_tokens: int = 256,
    sequence: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
    progress: bool = False,
) -> Generation:
    """Continue what the cache of ``program`` holds with ``prompt``, then with what the model answers.

    ``prompt`` goes behind the positions that the session holds: nothing is forgotten here. ``sequence`` is the one to
    continue, where the session has several. Choices are greedy at a ``temperature`` of 0; otherwise they are drawn,
    from the ``top_k`` best (0: all) and of those from the fewest that have ``top_p`` of the probability.
    ``eos_token_ids`` end the answer; ``None`` takes those of the program. ``progress`` shows bars on stderr.

    Nothing runs until the first token is asked for. A ``break`` and an interruption (Ctrl-C) leave the session usable:
    it holds the prompt and all of the answer but what :attr:`Generation.held` excludes. A prompt that is interrupted is
    rolled back, as far as layers with windows still hold what was before it. Where threads share a session, each holds
    a lock of theirs for as long as it iterates: a step that fails cancels what the cache was told of the next one.
    """
    if program.session is None:
        raise EtkvError(f"{program.path.name} was loaded without a session: pass one to etkv.load")
    ids = _id_list(prompt)
    if not ids:
        raise EtkvError("prompt is empty; it has at least one token")
    for name, value, least in (("max_new_tokens", max_new_tokens, 0), ("top_k", top_k, 0)):
        if value < least:
            raise EtkvError(f"{name} is {value}, the least is {least}")
    # Written so that a NaN, which is neither, is refused.
    if not temperature >= 0:
        raise EtkvError(f"temperature is {temperature}, the least is 0")
    if seed is not None and seed < 0:
        raise EtkvError(f"seed is {seed}, the least is 0")
    if not 0 < top_p <= 1:
        raise EtkvError(f"top_p is {top_p}, it is above 0 and at most 1")
    if sequence and not isinstance(program.session, SeqCache):
        raise EtkvError(f"sequence is {sequence}, and the session has one only: use a SeqSession")
    ends = frozenset(program.eos_token_ids if eos_token_ids is None else eos_token_ids)
    return Generation(program, ids, max_new_tokens, sequence, _Sampler(temperature, top_k, top_p, seed), ends, progress)


class Generation(Iterator[int]):
    """An answer in the making: iterate over its ids.

    ``ids`` are those so far. ``stop`` tells why it ended: ``end`` (the model ended it; the id that does is not among
    ``ids``), ``limit`` (as many tokens as were asked for), ``capacity`` (the cache is full), or ``None`` until then.
    """

    def __init__(
        self,
        program: Program,
        prompt: list[int],
        max_new_tokens: int,
        sequence: int,
        sampler: _Sampler,
        ends: frozenset[int],
        progress: bool,
    ) -> None:
        assert program.session is not None
        self.ids: list[int] = []
        self.stop: str | None = None
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.n_prompt = len(prompt)
        self._program, self._session, self._sequence = program, program.session, sequence
        self._sampler, self._ends = sampler, ends
        self._max_new_tokens = max_new_tokens
        self._bars = _Bars(len(prompt), max_new_tokens) if progress else None
        self._start: int | None = None
        # Not held by its own steps, so that an answer that is dropped lets go of the session at once.
        self._steps = Generation._run(weakref.proxy(self), prompt, self._bars)

    def __next__(self) -> int:
        return next(self._steps)

    @property
    def held(self) -> int:
        """Tokens of the answer that the cache holds; the last one is not run until the next is asked for.

        What continues this answer begins with ``ids[held:]``: its last token, and nothing where the model ended it.
        """
        if self._start is None:
            return 0
        return max(0, self._next() - self._start - self.n_prompt)

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, once two tokens are there; 0 before."""
        return (len(self.ids) - 1) / self.decode_seconds if self.decode_seconds > 0 and len(self.ids) > 1 else 0.0

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
            while len(self.ids) < self._max_new_tokens:
                if token in self._ends:
                    self.stop = "end"
                    return
                self.ids.append(token)
                if bars:
                    bars.answered(1)
                yield token
                if len(self.ids) == self._max_new_tokens:
                    break
                if not session.can_extend(1):
                    self.stop = "capacity"
                    return
                token = self._chosen(self._start + self.n_prompt + len(self.ids) - 1, self._decode, [token])
            self.stop = "limit"
        finally:
            if bars:
                bars.close()

    def _chosen(self, position: int, run: Callable[[list[int]], np.ndarray], ids: list[int]) -> int:
        """The token behind ``ids``, which are run from ``position`` on."""
        try:
            return self._sampler.choose(run(ids))
        except BaseException:
            # They may have been run, and what follows them be lost: they are to be run again.
            self._forget(position)
            raise

    def _decode(self, ids: list[int]) -> np.ndarray:
        began = time.perf_counter()
        row = self._step(ids)
        self.decode_seconds += time.perf_counter() - began
        return row

    def _prefill(self, prompt: list[int]) -> np.ndarray:
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
        """Tokens of a step, at most: what the program takes, and what the cache takes where that has a limit."""
        most = self._program.constant("get_prefill_chunk_size") or DEFAULT_CHUNK
        config = self._session.config
        if config.quantized_kv_start or any(layer.window for layer in config.layers):
            most = min(most, config.max_step_tokens or DEFAULT_CHUNK)
        return most

    def _forget(self, position: int) -> None:
        """Roll back the positions from ``position`` on, as far as layers with windows let it."""
        with contextlib.suppress(EtkvError):
            if isinstance(self._session, SeqCache):
                # What was declared of a step that did not come would stand in the way of others.
                self._session.cancel_step()
                self._session.seq_rm(self._sequence, position)
            elif self._session.length > position:
                self._session.rewind(position)

    def _step(self, ids: list[int]) -> np.ndarray:
        """Run ``ids`` behind what is there; the logits [vocabulary] of the last, until the next step."""
        position = self._next()
        if isinstance(self._session, SeqCache):
            self._session.begin_step([self._sequence] * len(ids))
        rows: Any = self._program.forward(ids, list(range(position, position + len(ids))), copy=False)
        return rows[-1]


class _Sampler:
    """Chooses an id from a row of logits."""

    def __init__(self, temperature: float, top_k: int, top_p: float, seed: int | None) -> None:
        import numpy as np

        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._random = np.random.default_rng(seed)

    def choose(self, row: np.ndarray) -> int:
        import numpy as np

        if self._temperature == 0:
            return int(row.argmax())
        # At a temperature next to 0 all but the best are at minus infinity.
        with np.errstate(over="ignore"):
            scaled = (row.astype(np.float64) - row.max()) / self._temperature
        order = np.argsort(-scaled, kind="stable")
        if self._top_k:
            order = order[: self._top_k]
        shares = np.exp(scaled[order] - scaled[order[0]])
        shares /= shares.sum()
        # The one that reaches top_p belongs to them.
        kept = int(np.searchsorted(np.cumsum(shares), self._top_p)) + 1
        shares = shares[:kept] / shares[:kept].sum()
        return int(self._random.choice(order[:kept], p=shares))


class _Bars:
    """Progress on stderr: of the prompt, then of the answer."""

    def __init__(self, n_prompt: int, n_answer: int) -> None:
        from tqdm import tqdm

        self._make = lambda total, name: tqdm(total=total, desc=name, unit="token", leave=False)
        self._n_answer = n_answer
        self._bar: Any = self._make(n_prompt, "prompt")
        self._answering = False

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
    values = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise EtkvError(f"prompt has {value!r}; it has token ids, and a tokenizer makes them of text")
    return [int(value) for value in values]
