"""Programs of models with recurrent layers on their caches: ids, batches, forks, rewinds, checkpoints, files and trees.

Without attention, the logits of a text are bitwise equal for any division into steps. Attention on the CPU sums in an
order that depends on the steps and on the slots of rows. So logits of models with attention are compared within a
tolerance, unless the steps are the same.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import etkv
import recurrent_models
from etkv import DecodeSession, PositionError, SeqSession, TreeSession
from etkv.recurrent_layer import BLOCK
from etkv.session import Session
from reference import EVERYTHING
from tiny_programs import CHUNK, TOLERANCE, TinyProgram, decode, error, ids, is_greedy, run

PROMPT, DECODED = 300, 64

_FAMILIES = {"cpu": ["qwen3.5"], "mlx": ["qwen3.5"]}
_LONG = [
    *("qwen3-next", "olmo-hybrid", "olmo-hybrid-positive", "granite-4", "nemotron-h", "falcon-h1-norm", "bamba"),
    *("lfm2", "lfm3", "mamba-2", "falcon-h1", "lfm3-window", "minimax"),
]
CASES = [
    (name, backend)
    for backend, names in _FAMILIES.items()
    for name in dict.fromkeys(names + _LONG if EVERYTHING else names)
]
"""Families and backends."""

WITHOUT_ATTENTION = [
    pytest.param(name, marks=pytest.mark.long)
    for name in (
        "mamba-2",
        *(f"{name}-recurrent" for name in ("lfm2", "qwen3.5", "nemotron-h", "kimi", "minimax")),
    )
]


@dataclass(frozen=True)
class Model(TinyProgram):
    """A program with recurrent layers, and its model."""

    def session(self, kind: type[Session] = DecodeSession, **changes: Any) -> Any:
        # With longer steps, windows would hold whole texts.
        return super().session(kind, **{"max_step_tokens": CHUNK, **changes})

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare rows of logits of the same tokens in different steps.

        Over 300 tokens of tiny Qwen3.5 models, transformers differs from float64 by up to 5e-4, and programs by 4e-4.
        """
        assert error(found, expected) < TOLERANCE

    def same(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare rows of logits of the same tokens in the same steps."""
        if self.backend == "cpu":
            assert torch.equal(found, expected)
        else:
            self.close(found, expected)


def recurrent_model(name: str, backend: str) -> Model:
    """Return a model, whose program may be missing or stale."""
    family, changes = recurrent_models.FAMILIES[name]
    return Model(f"recurrent-{name}", family, changes, backend)


@functools.cache
def recurrent_program(name: str, backend: str) -> Model:
    """Return a model with a current program."""
    model = recurrent_model(name, backend)
    model.export()
    return model


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def model(request) -> Model:
    return recurrent_program(*request.param)


@pytest.fixture(scope="module", params=WITHOUT_ATTENTION)
def without_attention(request) -> Model:
    return recurrent_program(request.param, "cpu")


# ---- Against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DecodeSession, SeqSession])
def test_ids_are_those_of_transformers(model, kind):
    """A prompt runs in chunks, and greedy ids follow."""
    text = ids(PROMPT)
    with model.session(kind) as session, model.load(session) as program:
        found = decode(program, text, PROMPT, DECODED)
    expected = model.expected(text)
    model.close(found, expected)
    assert is_greedy(expected[PROMPT - 1 : -1], text[PROMPT:])


def test_generated_ids(model):
    """``generate_tokens`` returns transformers' greedy ids up to the first eos id."""
    prompt = ids(PROMPT)
    with model.session() as session, model.load(session) as program:
        answer = list(etkv.generate_tokens(program, prompt, max_tokens=DECODED))
        eos = program.eos_token_ids
    expected = model.expected(prompt + answer)[PROMPT - 1 :]
    assert is_greedy(expected[:-1], answer)
    assert len(answer) == DECODED or int(expected[-1].argmax()) in eos


@pytest.mark.parametrize("name", [name for name, backend in CASES if backend == "mlx"])
def test_passes_of_a_gpu(name):
    """The passes of a GPU, here on a CPU, fuse recurrences with the operations before them."""
    model, text = recurrent_program(name, "mlx"), ids(PROMPT)
    with model.session() as session, model.load(session, passes="gpu") as program:
        found = decode(program, text, PROMPT, DECODED)
    model.close(found, model.expected(text))


# ---- Several sequences ----------------------------------------------------------------------------------------------


def test_a_batch_of_sequences(model):
    """Four prompts of different lengths are read one after the other, and decoded in the same steps."""
    lengths, steps = (150, 64, 129, 7), 70
    texts = [ids(length + steps, factor) for length, factor in zip(lengths, (37, 41, 43, 47), strict=True)]
    with model.session(SeqSession) as session, model.load(session) as program:
        rows = [
            [run(program, text, 0, n, sequence)] for sequence, (text, n) in enumerate(zip(texts, lengths, strict=True))
        ]
        for step in range(steps):
            session.begin_step([0, 1, 2, 3])
            at = [n + step for n in lengths]
            together = program.forward(
                torch.tensor([text[position] for text, position in zip(texts, at, strict=True)]), torch.tensor(at)
            )
            for row, of_sequence in zip(together, rows, strict=True):
                of_sequence.append(row[None])
        assert [session.seq_len(sequence) for sequence in range(4)] == [n + steps for n in lengths]
    for text, n, of_sequence in zip(texts, lengths, rows, strict=True):
        found = torch.cat(of_sequence)
        model.close(found, model.expected(text))
        model.close(found, model.alone(text, n))


def test_branches_of_a_fork(model):
    """Three sequences share a prompt and continue with different tokens. The first ends before the others."""
    prompt = 150
    texts = [ids(prompt) + ids(80, factor) for factor in (37, 41, 43)]
    with model.session(SeqSession) as session, model.load(session) as program:
        first = run(program, texts[0], 0, prompt)
        used = session.memory().used
        for branch in (1, 2):
            session.seq_cp(0, branch)
        # The branches share rows and anchors.
        assert session.memory().used == used
        rows = [[first] for _ in texts]
        for at in range(prompt, prompt + 40):
            session.begin_step([2, 0, 1])
            together = program.forward(
                torch.tensor([texts[branch][at] for branch in (2, 0, 1)]), torch.tensor([at] * 3)
            )
            for row, branch in zip(together, (2, 0, 1), strict=True):
                rows[branch].append(row[None])
        session.seq_rm(0)
        for branch in (1, 2):
            rows[branch].append(run(program, texts[branch], prompt + 40, prompt + 80, branch))
    for text, of_branch in zip(texts, rows, strict=True):
        found = torch.cat(of_branch)
        model.close(found, model.expected(text)[: len(found)])
        model.close(found, model.alone(text, prompt)[: len(found)])


def test_a_branch_that_begins_at_a_checkpoint(model):
    """A branch shares a text up to a checkpoint, and keeps it after the other text is removed."""
    text = ids(PROMPT)
    other = text[:BLOCK] + ids(200, 41)
    with model.session(SeqSession) as session, model.load(session) as program:
        assert session.seq_mark(0, 100) == BLOCK
        run(program, text, 0, PROMPT, 0)
        with pytest.raises(PositionError, match="sequence 1 would continue at 100"):
            session.seq_cp(0, 1, 0, 100)
        assert session.sequences() == [0]
        session.seq_cp(0, 1, 0, BLOCK)
        model.close(run(program, other, BLOCK, len(other), 1), model.expected(other)[BLOCK:])
        session.seq_rm(0)
        assert session.seq_reachable(1, 100) == BLOCK
        session.seq_rm(1, BLOCK)
        model.close(run(program, text, BLOCK, PROMPT, 1), model.expected(text)[BLOCK:])


# ---- Back in a text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DecodeSession, SeqSession])
def test_rewinds_within_a_block(model, kind):
    """A rewind of up to 64 tokens is possible at any length, any number of times."""
    text, numbers = ids(PROMPT), random.Random(3)
    expected = model.expected(text)
    with model.session(kind) as session, model.load(session) as program:
        length = 170
        run(program, text, 0, length)
        for number in range(40):
            back = length - (BLOCK if number % 8 == 0 else numbers.randint(0, BLOCK))
            assert session.rewindable_to() <= back
            session.rewind(back)
            assert session.length == back
            if number % 2:
                # Tokens that are rewound leave no trace.
                run(program, [0] * back + ids(numbers.randint(1, 30), 41), back, back + 1)
                session.rewind(back)
            goal = min(PROMPT, length + numbers.randint(-20, 30))
            goal = max(goal, back + 1)
            model.close(run(program, text, back, goal), expected[back:goal])
            length = goal


@pytest.mark.parametrize("kind", [DecodeSession, SeqSession, TreeSession])
def test_a_checkpoint_far_before_the_end(model, kind):
    """If the rest of a text runs again from a checkpoint, its logits are bitwise equal."""
    text = ids(PROMPT)
    with model.session(kind) as session, model.load(session) as program:
        assert session.mark(100) == BLOCK
        run(program, text, 0, BLOCK)
        first = run(program, text, BLOCK, PROMPT)
        model.close(first, model.expected(text)[BLOCK:])
        assert session.rewindable_to() > 100
        assert session.reachable(100) == BLOCK
        for _ in range(3):
            session.rewind(BLOCK)
            assert session.length == BLOCK
            model.same(run(program, text, BLOCK, PROMPT), first)
        # Continue with another text from the checkpoint.
        session.rewind(BLOCK)
        other = text[:BLOCK] + ids(100, 41)
        model.close(run(program, other, BLOCK, len(other)), model.expected(other)[BLOCK:])


@pytest.mark.parametrize("kind", [DecodeSession, SeqSession, TreeSession])
def test_positions_that_are_not_reachable(model, kind):
    """The error names the next lower reachable position. The refused call changes nothing."""
    text = ids(PROMPT)
    with model.session(kind) as session, model.load(session) as program:
        expected = run(program, text, 0, PROMPT)[260:]
        tail = run_again(session, program, text)
    model.close(tail, expected)
    with model.session(kind) as session, model.load(session) as program:
        session.mark(BLOCK)
        run(program, text, 0, 260)
        before = session.report(), session.memory()
        at = session.rewindable_to()
        assert at == 3 * BLOCK
        for position, words in (
            (100, f"it can continue at {at} or later, or at 64"),
            (at - 1, f"it can continue at {at} or later, or at 64"),
            (BLOCK - 1, f"it can continue at {at} or later"),
        ):
            with pytest.raises(PositionError, match=f"would continue at {position}, but the .*recurrent .*; {words}$"):
                session.rewind(position)
            assert session.reachable(position) == (BLOCK if position >= BLOCK else 0)
        with pytest.raises(PositionError, match="261"):
            session.rewind(261)
        assert (session.report(), session.memory()) == before
        model.same(run(program, text, 260, PROMPT), tail)


def run_again(session: Session, program: etkv.Program, text: list[int]) -> torch.Tensor:
    session.clear()
    run(program, text, 0, 260)
    return run(program, text, 260, PROMPT)


# ---- Files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DecodeSession, SeqSession, TreeSession])
def test_a_saved_cache_goes_on_alike(model, kind, tmp_path):
    text, file = ids(PROMPT), tmp_path / "text.etkv"
    fingerprint = etkv.fingerprint(model.request.output)
    with model.session(kind) as session, model.load(session) as program:
        session.mark(BLOCK)
        run(program, text, 0, 210)
        session.save(file, tokens=text[:210], fingerprint=fingerprint)
        expected = run(program, text, 210, PROMPT)
        reachable = session.rewindable_to()
    with model.session(kind) as session, model.load(session) as program:
        assert session.load(file, fingerprint=fingerprint) == text[:210]
        assert session.length == 210
        model.same(run(program, text, 210, PROMPT), expected)
        assert session.rewindable_to() == reachable
        session.rewind(PROMPT - 50)
        model.close(run(program, text, PROMPT - 50, PROMPT), expected[-50:])
        # The checkpoint is in the file too.
        assert session.reachable(100) == BLOCK
        session.rewind(BLOCK)
        model.close(run(program, text, BLOCK, PROMPT), model.expected(text)[BLOCK:])


def test_a_prefix_goes_on_alike(model):
    text = ids(PROMPT)
    with model.session() as session, model.load(session) as program:
        run(program, text, 0, 210)
        prefix = session.freeze()
        expected = run(program, text, 210, PROMPT)
    for kind in (DecodeSession, SeqSession):
        for length in (210, 192, prefix.rewindable_to):
            with model.session(kind) as session, model.load(session) as program:
                session.attach(prefix, length)
                model.close(run(program, text, length, PROMPT)[-90:], expected)


# ---- Trees ----------------------------------------------------------------------------------------------------------


def bytes_of_states(session: Session) -> int:
    return sum(layer.anchors_used for layer in session.memory().recurrent_layers)


def test_trees_are_lossless(model):
    """Greedy ids with trees of candidates, most of them wrong, equal those of steps of one token. Candidates need no
    states, unless they reach the next multiple of 64.
    """
    prompt, count = 120, 80
    text = ids(prompt)
    with model.session() as session, model.load(session) as program:
        row = run(program, text, 0, prompt)[-1]
        for _ in range(count):
            text.append(int(row.argmax()))
            (row,) = run(program, text, len(text) - 1, len(text))
        states = bytes_of_states(session)
    numbers, given = random.Random(5), ids(prompt)
    with model.session(TreeSession) as session, model.load(session) as program:
        given.append(int(run(program, given, 0, prompt)[-1].argmax()))
        while len(given) < prompt + count:
            # The root is the next id. The chain below it equals the answer up to some length, and each node has
            # siblings with other ids.
            position = len(given) - 1
            depth, right = numbers.randint(1, 6), numbers.randint(0, 6)
            tokens, parents, chain = [given[-1]], [-1], 0
            for level in range(1, depth + 1):
                true = text[min(position + level, len(text) - 1)]
                siblings = [(true + 1 + at) % 250 for at in range(numbers.randint(0, 2))]
                siblings.insert(numbers.randint(0, len(siblings)), true if level <= right else (true + 7) % 250)
                on = len(tokens) + numbers.randrange(len(siblings))
                if level <= right:
                    on = len(tokens) + siblings.index(true)
                tokens += siblings
                parents += [chain] * len(siblings)
                chain = on
            at, depths = [], []
            for parent in parents:
                depths.append(0 if parent < 0 else depths[parent] + 1)
                at.append(position + depths[-1])
            session.propose(parents)
            rows = program.forward(torch.tensor(tokens), torch.tensor(at))
            if max(at) // BLOCK == (position - 1) // BLOCK:
                assert bytes_of_states(session) <= states
            accepted = [0]
            while True:
                best = int(rows[accepted[-1]].argmax())
                given.append(best)
                below = (node for node in range(len(tokens)) if parents[node] == accepted[-1] and tokens[node] == best)
                node = next(below, None)
                if node is None:
                    break
                accepted.append(node)
            session.commit(accepted)
            assert session.length == position + len(accepted)
    assert given[prompt : prompt + count] == text[prompt:]


# ---- Random ways ----------------------------------------------------------------------------------------------------


WAYS = 200 if EVERYTHING else 20

LENGTH = 260


class Way:
    """Reads a text with a random series of steps, detours, rewinds, forks, trees and files."""

    def __init__(self, model: Model, seed: int, expected: torch.Tensor, tolerance: float, folder: Path) -> None:
        self.random = random.Random(seed)
        self.kind = self.random.choice([DecodeSession, SeqSession, TreeSession])
        self.text, self.expected, self.tolerance, self.folder = ids(LENGTH), expected, tolerance, folder
        self.sequence: int = 0
        self.done: list[str] = []
        self.model = model

    def run(self) -> None:
        with self.model.session(self.kind) as self.session, self.model.load(self.session) as self.program:
            for _ in range(400):
                if self.next == LENGTH:
                    return
                ways = [self.step, self.step, self.detour, self.back, self.mark, self.saved, self.refused]
                if self.kind is not DecodeSession:
                    ways += [self.fork, self.saved_sequence]
                if self.kind is TreeSession:
                    ways += [self.tree, self.tree]
                if self.sequence == 0:
                    ways.append(self.frozen)
                way = self.random.choice(ways)
                self.done.append(f"{way.__name__} at {self.next}")
                way()

    @property
    def next(self) -> int:
        return self.session.length if self.kind is DecodeSession else self.session.seq_next(self.sequence)

    def declare(self, n: int) -> None:
        if self.kind is not DecodeSession:
            self.session.begin_step([self.sequence] * n)

    def forward(self, tokens: list[int], begin: int) -> torch.Tensor:
        self.declare(len(tokens))
        return self.program.forward(torch.tensor(tokens), torch.arange(begin, begin + len(tokens)))

    def compare(self, rows: torch.Tensor, begin: int) -> None:
        error = (rows - self.expected[begin : begin + len(rows)]).abs().max() / self.expected.std()
        assert error <= self.tolerance, (error, self.done)

    def rewind(self, length: int) -> None:
        if self.kind is DecodeSession:
            self.session.rewind(length)
        else:
            self.session.seq_rm(self.sequence, length)

    def wrong(self, most: int) -> list[int]:
        return [self.random.randrange(250) for _ in range(self.random.randint(1, most))]

    def step(self) -> None:
        begin = self.next
        n = min(self.random.choice([1, 2, 3, 5, 17, 40, 64, 90]), LENGTH - begin)
        self.compare(self.forward(self.text[begin : begin + n], begin), begin)

    def detour(self) -> None:
        begin = self.next
        self.forward(self.wrong(BLOCK), begin)
        self.rewind(begin)

    def back(self) -> None:
        goal = self.random.randint(max(0, self.next - 90), self.next)
        if self.kind is DecodeSession:
            goal = self.session.reachable(goal)
        else:
            goal = self.session.seq_reachable(self.sequence, goal)
        self.rewind(goal)
        assert self.next == goal

    def mark(self) -> None:
        position = self.next + self.random.randint(0, 80)
        if self.kind is DecodeSession:
            self.session.mark(position)
        else:
            self.session.seq_mark(self.sequence, position)

    def saved(self) -> None:
        file = self.folder / "cache"
        self.session.save(file)
        self.session.clear(release=self.random.random() < 0.5)
        if self.random.random() < 0.5:
            self.session.load(file)
            return
        # Run another text in sequence 0 in between.
        self.sequence, sequence = 0, self.sequence
        self.forward(self.wrong(90), 0)
        self.session.load(file)
        self.sequence = sequence

    def refused(self) -> None:
        """Run a step at a wrong position, which fails and leaves no trace."""
        length = self.next
        self.declare(2)
        with pytest.raises(etkv.EtkvError):
            self.program.forward(torch.tensor([5, 6]), torch.tensor([length + 3, length + 4]))
        if self.kind is not DecodeSession:
            self.session.cancel_step()
        assert self.next == length

    def fork(self) -> None:
        """Fork a branch that continues with other tokens. Remove one of the two sequences."""
        begin, old = self.next, self.sequence
        if begin == 0:
            return
        branch = self.random.choice([number for number in range(4) if number != old])
        self.session.seq_cp(old, branch)
        self.sequence = self.random.choice([old, branch])
        other = old + branch - self.sequence
        n = min(self.random.randint(1, 12), LENGTH - begin)
        if self.random.random() < 0.5:
            # Run both sequences in one step.
            tokens = [self.random.randrange(250) for _ in range(n)]
            self.session.begin_step([self.sequence, other] * n)
            both = [token for pair in zip(self.text[begin : begin + n], tokens, strict=True) for token in pair]
            at = [begin + number // 2 for number in range(2 * n)]
            self.compare(self.program.forward(torch.tensor(both), torch.tensor(at))[::2], begin)
        else:
            kept, self.sequence = self.sequence, other
            self.forward(self.wrong(90), begin)
            self.sequence = kept
            self.compare(self.forward(self.text[begin : begin + n], begin), begin)
        self.session.seq_rm(other)

    def saved_sequence(self) -> None:
        if self.next == 0:
            return
        file = self.folder / "sequence"
        self.session.seq_save(self.sequence, file)
        other = self.random.choice([number for number in range(4) if number != self.sequence])
        self.session.seq_load(other, file)
        if self.random.random() < 0.5:
            self.session.seq_rm(self.sequence)
            self.sequence = other
        else:
            self.session.seq_rm(other)

    def tree(self) -> None:
        """Propose frontiers of right and wrong candidates. Accept a part of the right chain."""
        begin = self.next
        chain: list[int] = []
        n_nodes = 0
        for _ in range(self.random.randint(1, 3)):
            tokens, parents, at, right = [], [], [], []
            for _ in range(self.random.randint(1, 6)):
                position = begin + len(chain)
                if position >= LENGTH:
                    break
                for is_right in self.random.choice([(True,), (True, False), (False, True), (False, True, False)]):
                    tokens.append(self.text[position] if is_right else self.random.randrange(250))
                    parents.append(chain[-1] if chain else -1)
                    at.append(position)
                    right.append(is_right)
                chain.append(n_nodes + len(right) - 1 - right[::-1].index(True))
            if not tokens:
                break
            self.session.propose(parents, self.sequence)
            self.session.begin_step([self.sequence] * len(tokens))
            rows = self.program.forward(torch.tensor(tokens), torch.tensor(at))
            self.compare(rows[torch.tensor(right)], min(at))
            n_nodes += len(tokens)
        self.session.commit(chain[: self.random.randint(0, len(chain))], self.sequence)

    def frozen(self) -> None:
        if self.next == 0 or (self.kind is not DecodeSession and self.session.sequences() != [0]):
            return
        prefix = self.session.freeze()
        if self.random.random() < 0.5:
            return
        self.session.clear()
        self.session.attach(prefix, self.random.randint(prefix.rewindable_to, prefix.length))


def test_every_way_has_the_same_bits(without_attention, tmp_path):
    text = ids(LENGTH)
    with without_attention.session() as session, without_attention.load(session) as program:
        expected = run(program, text, 0, LENGTH)
    without_attention.close(expected, without_attention.expected(text))
    for seed in range(WAYS):
        Way(without_attention, seed, expected, 0.0, tmp_path).run()


def test_every_way_has_the_logits_of_transformers(model, tmp_path):
    expected = model.expected(ids(LENGTH))
    for seed in range(WAYS // 4):
        Way(model, seed, expected, TOLERANCE, tmp_path).run()
