"""The reference caches against attention without a cache, over random programs of steps.

The model in this file keeps only texts. A sequence is the list of all tokens written to it, and a copy copies the list.
A candidate is the text that ends with it. Every query attends to its whole text from scratch.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

import op_program
import step_programs
from etkv.config import CacheConfig, LayerConfig
from etkv.reference import KINDS, ReferenceCache, make_cache
from etkv.reference.formats import format_of
from reference import EVERYTHING
from step_programs import Call, Operation, Step

GROUP = 2


@dataclass
class Token:
    """A written token: its position, and its keys and values by layer, ``[n_kv_heads, head_dim]``."""

    position: int
    rows: list[tuple[np.ndarray, np.ndarray]]
    name: tuple[int, int]
    """The step's seed and the token's index in the step. Copies share them."""


@dataclass
class Texts:
    """Sequences as texts, and their candidates as nodes with a parent and a token."""

    sequences: dict[int, list[Token]] = field(default_factory=dict)
    trees: dict[int, list[tuple[int, Token | None]]] = field(default_factory=dict)
    declared: tuple[tuple[int, ...], ...] | None = None

    def next(self, sequence: int) -> int:
        text = self.sequences.get(sequence)
        return text[-1].position + 1 if text else 0

    def names(self) -> set[tuple[int, int]]:
        tokens = [token for text in self.sequences.values() for token in text]
        return {token.name for token in tokens + [token for tree in self.trees.values() for _, token in tree if token]}

    def call(self, action: Call) -> None:
        getattr(self, action.name)(*action.arguments)
        self.sequences = {sequence: text for sequence, text in self.sequences.items() if text}

    def clear(self) -> None:
        self.__init__()

    def rewind(self, length: int) -> None:
        for sequence in {*self.sequences, *self.trees}:
            self.seq_rm(sequence, length, None)

    def seq_cp(self, source: int, target: int, begin: int, end: int | None) -> None:
        beyond = math.inf if end is None else end
        known = {token.position: token for token in self.sequences.get(target, [])}
        for token in self.sequences.get(source, []):
            if begin <= token.position < beyond:
                known[token.position] = copy.deepcopy(token)
        self.sequences[target] = [known[position] for position in sorted(known)]

    def seq_rm(self, sequence: int, begin: int, end: int | None) -> None:
        before = self.sequences.get(sequence, [])
        beyond = math.inf if end is None else end
        left = [token for token in before if not begin <= token.position < beyond]
        if not left and (before or begin <= 0 < beyond):
            self.trees.pop(sequence, None)
        self.sequences[sequence] = left

    def seq_keep(self, sequence: int) -> None:
        self.sequences = {sequence: self.sequences.get(sequence, [])}
        self.trees = {number: tree for number, tree in self.trees.items() if number == sequence}

    def propose(self, parents: list[int], sequence: int) -> None:
        self.trees.setdefault(sequence, []).extend((parent, None) for parent in parents)

    def commit(self, accepted: list[int], sequence: int) -> None:
        tree = self.trees.pop(sequence)
        self.sequences.setdefault(sequence, []).extend(tree[node][1] for node in accepted)

    def step(self, kind: str, tokens: list[Token], owners: tuple[tuple[int, ...], ...] | None) -> list[list[Token]]:
        """Write tokens, and return the text of each: the tokens that its query would see without windows."""
        if kind == "contiguous":
            owners = ((0,),) * len(tokens)
            self.rewind(tokens[0].position)
        owners = owners or self.declared or self._undeclared(len(tokens))
        texts = []
        for token, members in zip(tokens, owners, strict=True):
            seen = {}
            for sequence in members:
                seen.update({other.name: other for other in self._written(sequence, token)})
            texts.append(list(seen.values()))
        self.declared = None
        return texts

    def _undeclared(self, n_tokens: int) -> tuple[tuple[int, ...], ...]:
        waiting = [(number,) for number, tree in sorted(self.trees.items()) for _, token in tree if token is None]
        return tuple(waiting) or (tuple(self.sequences) or (0,),) * n_tokens

    def _written(self, sequence: int, token: Token) -> list[Token]:
        """Write a token, and return the text that ends with it."""
        text = self.sequences.setdefault(sequence, [])
        if sequence not in self.trees:
            text.append(token)
            return text
        tree = self.trees[sequence]
        node = next(index for index, (_, written) in enumerate(tree) if written is None)
        tree[node] = (tree[node][0], token)
        path = []
        while node >= 0:
            node, written = tree[node]
            path.insert(0, written)
        return text + path


def _is_seen(facts, query, position):
    """Return whether a query of the layer sees ``position``, which is not after the query."""
    if facts.chunk:
        return position >= query - query % facts.chunk
    return facts.window == 0 or position + facts.window > query or position < facts.sinks


def attention(q: np.ndarray, text: list[Token], layer: int, facts: LayerConfig, position: int) -> np.ndarray:
    """Return the attention of a query, ``[n_heads, head_dim]``, over the part of its text in the layer's window."""
    rows = [token.rows[layer] for token in text if _is_seen(facts, position, token.position)]
    out = []
    for head, query in enumerate(q):
        keys, values = (np.array([pair[which][head // GROUP] for pair in rows], dtype=np.float64) for which in (0, 1))
        if facts.values_in_keys:
            values = keys[:, : facts.value_dim]
        scores = facts.k_head_dim**-0.5 * keys @ query.astype(np.float64)
        weights = np.exp(scores - scores.max())
        out.append(weights @ values / weights.sum())
    return np.array(out)


def written(config: CacheConfig, step: Step, formats: tuple[str, str]) -> list[Token]:
    tokens = [Token(position, [], (step.seed, at)) for at, position in enumerate(step.positions)]
    for layer in range(len(config.layers)):
        _, *fresh = step_programs.step_rows(config, step, layer, GROUP)
        if config.layers[layer].values_in_keys:
            fresh = fresh[:1] * 2
        keys, values = (format_of(name).stored(rows)[0].numpy() for name, rows in zip(formats, fresh, strict=True))
        for at, token in enumerate(tokens):
            token.rows.append((keys[:, at], values[:, at]))
    return tokens


def check(kind: str, config: CacheConfig, program: list[Operation], cache: ReferenceCache) -> int:
    """Apply a program to a cache with the op, and compare all outputs and answers. Return the number of committed
    steps.
    """
    texts, n_steps = Texts(), 0
    formats = cache.formats
    before = step_programs.answers(cache)
    outcomes = op_program.run_in_torch(program, cache, GROUP)
    for operation, outcome in zip(program, outcomes, strict=True):
        action = operation.action
        assert outcome.refused == operation.refused, (operation, outcome.message)
        if outcome.refused is not None:
            assert outcome.answers == before, f"the refused {action} changed the cache's answers"
            if isinstance(action, Step) and action.owners is not None and _can_be(action.owners):
                texts.declared = action.owners
            continue
        if isinstance(action, Call):
            texts.call(action)
        else:
            n_steps += 1
            tokens = written(config, action, formats)
            seen = texts.step(kind, tokens, action.owners)
            for layer, facts in enumerate(config.layers):
                q, _, _ = step_programs.step_rows(config, action, layer, GROUP)
                expected = [
                    attention(q[0, :, at].numpy(), text, layer, facts, token.position)
                    for at, (token, text) in enumerate(zip(tokens, seen, strict=True))
                ]
                found = outcome.outputs[layer][0].transpose(0, 1).numpy()
                np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6, err_msg=str(action))
        before = outcome.answers
        formats = convert(texts, formats, before["formats"])
        compare_answers(texts, before)
    return n_steps


def _can_be(owners: tuple[tuple[int, ...], ...]) -> bool:
    return all(members and len(set(members)) == len(members) and max(members) < 256 for members in owners)


def convert(texts: Texts, old: tuple[str, str], new: tuple[str, str]) -> tuple[str, str]:
    """Convert the rows of texts as the cache has converted its rows. test_native_steps.py checks when that happens."""
    if old != new:
        tokens = [token for text in texts.sequences.values() for token in text]
        for token in tokens + [token for tree in texts.trees.values() for _, token in tree if token]:
            token.rows = [
                tuple(
                    format_of(name).stored(torch.from_numpy(row)).numpy() for name, row in zip(new, rows, strict=True)
                )
                for rows in token.rows
            ]
    return new


def compare_answers(texts: Texts, answers: dict) -> None:
    assert answers["length"] == len(texts.names())
    for sequence in step_programs.SEQUENCES if "sequences" in answers else ():
        length, following, _, ranges, nodes = answers[f"sequence {sequence}"]
        positions = [token.position for token in texts.sequences.get(sequence, [])]
        assert [at for held in ranges for at in held] == positions
        assert (length, following) == (len(positions), texts.next(sequence))
        assert nodes == len(texts.trees.get(sequence, []))


FULL = LayerConfig(2, 8)
CONFIGS = {
    "full history": CacheConfig([FULL, FULL], 48, k_format="f32", v_format="f32"),
    "a window": CacheConfig([LayerConfig(2, 8, window=5)], 80, k_format="f32", v_format="f32", max_step_tokens=4),
    "mixed windows and heads": CacheConfig(
        [FULL, LayerConfig(1, 4, 12, window=3, sinks=2), LayerConfig(4, 16, 8, window=7), FULL],
        64,
        k_format="f32",
        v_format="f32",
        max_step_tokens=5,
    ),
    "a window of one": CacheConfig(
        [LayerConfig(1, 8, window=1, sinks=1)], 30, k_format="f32", v_format="f32", max_step_tokens=3
    ),
    "chunks": CacheConfig(
        [LayerConfig(1, 8, chunk=5), FULL, LayerConfig(2, 4, chunk=1)],
        70,
        k_format="f32",
        v_format="f32",
        max_step_tokens=4,
    ),
    "halves": CacheConfig([FULL], 24, k_format="f16", v_format="bf16"),
    "quantized": CacheConfig(
        [LayerConfig(2, 32, 64), LayerConfig(1, 64, window=6)], 40, k_format="mxfp4", v_format="affine4g32"
    ),
    "values in keys": CacheConfig([LayerConfig(2, 32, 20, values_in_keys=True)], 40, k_format="nvfp4"),
    "some values in keys": CacheConfig(
        [LayerConfig(1, 32, 9, window=6, values_in_keys=True), LayerConfig(2, 32)],
        40,
        k_format="mxfp4",
        v_format="row-int4",
        quantized_kv_start=12,
    ),
    "quantized later": CacheConfig(
        [LayerConfig(1, 16, window=9)], 40, k_format="nvfp4", v_format="row-int4", quantized_kv_start=12
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_programs(kind, name):
    config = CONFIGS[name]
    n_steps, n_seeds = 0, 20 if EVERYTHING else 2
    for seed in range(n_seeds):
        program = step_programs.generate(kind, config, seed, 60)
        n_steps += check(kind, config, program, make_cache(kind, config))
    assert n_steps > 10 * n_seeds


@pytest.mark.parametrize("kind", KINDS)
def test_long_steps(kind):
    """Steps have many tokens of few sequences, like prompts."""
    config = replace(CONFIGS["mixed windows and heads"], capacity=256, max_step_tokens=64)
    program = step_programs.generate(kind, config, 3, 25, most_tokens=64)
    assert check(kind, config, program, make_cache(kind, config)) > 4


def test_programs_are_the_same_for_the_same_seed():
    config = CONFIGS["a window"]
    first, second, other = (step_programs.generate("tree", config, seed, 80) for seed in (5, 5, 6))
    assert first == second != other


def test_programs_have_every_operation_and_refusal():
    config = CONFIGS["mixed windows and heads"]
    made = [operation for seed in range(30) for operation in step_programs.generate("tree", config, seed, 80)]
    names = {operation.action.name if isinstance(operation.action, Call) else "step" for operation in made}
    assert names == {"step", "clear", "rewind", "seq_cp", "seq_rm", "seq_keep", "propose", "commit"}
    assert {operation.refused for operation in made} == {None, 1, 2, 3, 11}
