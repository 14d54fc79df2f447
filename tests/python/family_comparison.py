"""Compares the program of a tiny model with transformers: prompts, greedy tokens, rewinds, batches and forks.

Every row of logits that the program computes is compared with the row of the same token in one eager forward of
transformers over the whole text, in float32. The texts are fixed, except for the greedy tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import etkv
import reference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-3
"""The largest difference of a logit in float32, as a fraction of the spread of logits.

The difference is about 1e-5 in most families, and 6e-4 in a family with 54 layers.
"""

MAX_STEP_TOKENS = 16
"""Maximum tokens of a step."""

_PROMPT, _CHUNK = 63, 7
"""Number of tokens of the prompt and of a step. Windows and chunks have 24 tokens. Recurrent layers have anchors at
64.
"""

_GREEDY = 32
"""Number of greedy tokens after the prompt."""

_REWOUND = 12
"""Number of tokens by which a single sequence is rewound, to a position before the anchor."""

_BATCH = (66, 1, 57)
"""Number of tokens of each of the prompts that run in the same steps."""

_TOGETHER, _BRANCH = 4, 6
"""Number of tokens that each sequence runs after the prompts, and after a fork or a rewind."""

_REWOUND_BRANCH = 5
"""Number of tokens by which branches are rewound: past the beginning of a chunk at 72, and past the anchor at 64."""


class TransformersLogits:
    """Logits of texts in transformers, each from one eager forward without a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Run ``model`` over the text of the first comparison. Raises what the model raises."""
        self._model = model
        first = reference.logits(model, _text())
        self._known = {_text(): first}
        self.spread = reference.spread(first)

    def of(self, text: tuple[int, ...]) -> np.ndarray:
        """Return the logits ``[len(text), vocabulary]`` in float32."""
        if text not in self._known:
            self._known[text] = reference.logits(self._model, text)
        return self._known[text]

    def effect(self, distance: int) -> float:
        """Return the largest change of a row of logits if a token at least ``distance`` positions before it is
        replaced.

        The result is a fraction of the spread of logits.
        """
        text, at = list(_text()), _PROMPT - 12
        text[at] += 1
        return float(np.abs(self.of(tuple(text)) - self.of(_text()))[at + distance :].max() / self.spread)

    def check(self) -> None:
        """Raise an ``AssertionError`` if the model has changed, or if its logits hardly depend on earlier tokens.

        In the latter case, equal logits would not prove that a program is right.
        """
        again = reference.logits(self._model, _text())
        assert np.array_equal(self._known[_text()], again), "the export changed the model"
        effect = self.effect(1)
        assert effect > 100 * TOLERANCE, f"an earlier token changes logits by {effect:.2g} of their spread"


@dataclass(frozen=True)
class Rows:
    """The logits ``[T, vocabulary]`` that a program computed for the tokens of ``text``, beginning at index
    ``begin``.

    ``greedy`` is the argmax of the last row, if it is the next token of the text.
    """

    what: str
    text: tuple[int, ...]
    begin: int
    logits: np.ndarray
    greedy: int | None = None


def runs(program: Path) -> list[Rows]:
    """Run ``program`` in three sessions, and return the logits of all steps. Raises an ``EtkvError`` if it cannot run.

    A step has at most :data:`MAX_STEP_TOKENS` tokens.
    """
    return [*_of_one_sequence(program), *_of_the_last_row(program), *_of_several_sequences(program)]


def difference(found: Sequence[Rows], expected: TransformersLogits) -> str:
    """Return a description of the differences from transformers; empty if there are none."""
    off: dict[str, float] = {}
    wrong_ids = []
    for rows in found:
        want = expected.of(rows.text)[rows.begin : rows.begin + len(rows.logits)]
        # The maximum is NaN if a difference is NaN.
        off[rows.what] = float(np.maximum(off.get(rows.what, 0.0), np.abs(rows.logits - want).max() / expected.spread))
        best = int(want[-1].argmax())
        if rows.greedy not in (None, best):
            lead = want[-1, best] - want[-1, rows.greedy]
            wrong_ids.append(f"a greedy id is {rows.greedy}, not {best}, whose logit is {lead:.2g} larger")
    wrong = [f"{most:.2g} in {what}" for what, most in off.items() if not most < TOLERANCE]
    said = [f"logits differ, as a fraction of their spread: {', '.join(wrong)}"] if wrong else []
    return "; ".join(said + wrong_ids[:1])


def _ids(n: int, factor: int = 37) -> list[int]:
    return [(number * factor + 11) % 250 for number in range(n)]


def _text() -> tuple[int, ...]:
    return tuple(_ids(_PROMPT + 10))


# ---- One sequence ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _loaded(program: Path, kind: type[etkv.Session], logits: str) -> Iterator[etkv.Program]:
    facts = etkv.read_kv_cache_metadata(program)
    config = etkv.CacheConfig(facts.layers, 256, k_format="f32", v_format="f32")
    with kind(config, backend=facts.backend) as session, etkv.load(program, session, logits=logits) as loaded:
        yield loaded


def _forward(program: etkv.Program, tokens: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    import torch

    return program.forward(torch.tensor(tokens), torch.tensor(positions)).float().clone().numpy()


def _run(program: etkv.Program, text: Sequence[int], begin: int, end: int, n: int) -> Iterator[tuple[int, np.ndarray]]:
    """Run the tokens from ``begin`` to ``end`` in steps of ``n``. Yield the end of each step, and its logits."""
    for at in range(begin, end, n):
        stop = min(at + n, end)
        yield stop, _forward(program, text[at:stop], range(at, stop))


def _of_one_sequence(program: Path) -> Iterator[Rows]:
    """Run a prompt in chunks and in single tokens, then another text after a rewind."""
    text = _text()
    other = (*text[:-_REWOUND], *_ids(_REWOUND, 41))
    kept = len(text) - _REWOUND
    with _loaded(program, etkv.DecodeSession, "all") as loaded:
        for what, begin, end, n in (("a prompt", 0, _PROMPT, _CHUNK), ("tokens", _PROMPT, len(text), 1)):
            for stop, rows in _run(loaded, text, begin, end, n):
                yield Rows(what, text, stop - len(rows), rows)
        loaded.session.rewind(kept)
        for stop, rows in _run(loaded, other, kept, len(other), _CHUNK):
            yield Rows("another text after a rewind", other, stop - len(rows), rows)


def _of_the_last_row(program: Path) -> Iterator[Rows]:
    """Run a prompt in chunks and greedy tokens, with the program loaded for the last row of a step."""
    text, last = list(_text()[:_PROMPT]), []
    with _loaded(program, etkv.DecodeSession, "last") as loaded:
        last += _run(loaded, text, 0, _PROMPT, _CHUNK)
        for end in range(_PROMPT + 1, _PROMPT + _GREEDY + 1):
            text.append(int(last[-1][1].argmax()))
            last.append((end, _forward(loaded, text[-1:], [end - 1])))
    for end, row in last:
        what = "the last token of a chunk" if end < _PROMPT else "greedy tokens"
        greedy = text[end] if _PROMPT <= end < len(text) else None
        yield Rows(what, tuple(text), end - 1, row, greedy)


# ---- Several sequences ----------------------------------------------------------------------------------------------


@dataclass
class _Sequence:
    """A sequence of a session: its text, and the number of tokens that have run."""

    what: str
    text: tuple[int, ...]
    ran: int = 0

    def branch(self, what: str, ran: int, factor: int) -> _Sequence:
        """Return a sequence that shares the first ``ran`` tokens, and continues with other tokens."""
        return _Sequence(what, (*self.text[:ran], *_ids(_BRANCH, factor)), ran)


@dataclass
class _Batch:
    """Sequences of one session, by their numbers, and the rows that their steps computed."""

    program: etkv.Program
    sequences: dict[int, _Sequence]
    rows: list[Rows] = field(default_factory=list)

    def step(self, n: int, *, until: dict[int, int]) -> None:
        """Run in one step up to ``n`` next tokens of each sequence, up to its length in ``until``."""
        runs = {number: range(each.ran, min(each.ran + n, until[number])) for number, each in self.sequences.items()}
        self.program.session.begin_step([number for number, at in runs.items() for _ in at])
        tokens = [self.sequences[number].text[position] for number, at in runs.items() for position in at]
        logits = _forward(self.program, tokens, [position for at in runs.values() for position in at])
        for number, at in runs.items():
            each = self.sequences[number]
            if at:
                self.rows.append(Rows(each.what, each.text, at.start, logits[: len(at)]))
                logits, each.ran = logits[len(at) :], at.stop

    def run(self, n: int, *, until: dict[int, int]) -> None:
        """Run steps until each sequence has the length in ``until``."""
        while any(each.ran < until[number] for number, each in self.sequences.items()):
            self.step(n, until=until)

    def run_more(self, tokens: int, n: int) -> None:
        """Run ``tokens`` more tokens of each sequence, ``n`` tokens of each sequence in a step."""
        self.run(n, until={number: each.ran + tokens for number, each in self.sequences.items()})


def _of_several_sequences(program: Path) -> list[Rows]:
    """Run three prompts and tokens after them in the same steps, then two forks, whose branches are rewound and
    continue with other tokens.
    """
    longest = max(_BATCH) + _TOGETHER + 2 * _BRANCH
    batch = {number: _Sequence("a batch", tuple(_ids(longest, 43 + 4 * number))) for number in range(len(_BATCH))}
    with _loaded(program, etkv.SeqSession, "all") as loaded:
        session = loaded.session
        ran = _Batch(loaded, batch)
        ran.run(_CHUNK, until=dict(enumerate(_BATCH)))
        ran.run_more(_TOGETHER, 1)
        forks = {source: len(_BATCH) + source for source in (0, 2)}
        for source, target in forks.items():
            session.seq_cp(source, target)
            # In a step, tokens are not in the order of the sequences' numbers.
            ran.sequences = {target: batch[source].branch("a fork", batch[source].ran, 59), **ran.sequences}
            batch[source].what = "the source of a fork"
        ran.run_more(_BRANCH, 1)
        for target in forks.values():
            fork = ran.sequences[target]
            kept = fork.ran - _REWOUND_BRANCH
            session.seq_rm(target, kept)
            ran.sequences[target] = fork.branch("a fork after a rewind", kept, 61)
        ran.run_more(_BRANCH, 3)
    return ran.rows
