"""Programs of models whose attention has learned sinks or a softcap: ids and logits equal those of transformers.

The tests cover every kind of cache: one sequence, a batch, forks, rewinds, trees and files. In storage formats, logits
equal those on the reference caches.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

import etkv
import family_comparison
import sinks_models
import tiny_programs
from etkv import CacheConfig, DecodeSession, SeqSession, TreeSession, op
from etkv.description import describe_program
from etkv.export import ExportRequest, attention, export_program
from etkv.export.forward import Forward
from etkv.pte import PteFile
from etkv.reference import ContiguousCache
from family_comparison import TransformersLogits
from reference import EVERYTHING
from tiny_programs import TOLERANCE, TinyProgram, error, ids

CHUNK = sinks_models.WINDOW
"""Maximum tokens of a step."""

PROMPT, DECODED = 300, 32

CASES = [(name, backend) for backend in ("cpu", "mlx") for name in sinks_models.FAMILIES]
CASES = CASES if EVERYTHING else [("gpt-oss", "mlx")]
"""Models and backends."""


@dataclass(frozen=True)
class Model(TinyProgram):
    """A program with sinks or a softcap, and its model."""

    made_by: ClassVar[tuple[ModuleType, ...]] = (*TinyProgram.made_by, sinks_models)

    @property
    def of(self) -> str:
        """Return the name in ``sinks_models.FAMILIES``."""
        return self.name.removeprefix("sinks-")

    @functools.cached_property
    def transformers(self) -> Any:
        return sinks_models.model(self.of)

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert error(found, expected) < TOLERANCE


@functools.cache
def _model(name: str, backend: str) -> Model:
    """Return a model with a current program."""
    family, changes = sinks_models.FAMILIES[name]
    model = Model(f"sinks-{name}", family, changes, backend, chunk=CHUNK)
    model.export()
    return model


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def model(request) -> Model:
    return _model(*request.param)


run = functools.partial(tiny_programs.run, chunk=CHUNK)
"""A function that runs tokens in steps of :data:`CHUNK`."""


@pytest.mark.parametrize("name", sinks_models.FAMILIES)
def test_sinks_and_softcaps_count(name):
    """Without sinks or softcap, the logits of the tiny models differ by far more than the tolerance."""
    text = torch.tensor([ids(PROMPT)])
    with torch.no_grad():
        logits, plain = (sinks_models.model(name, plain=plain)(text).logits for plain in (False, True))
    differences = (logits - plain).abs().amax(dim=-1)[0] / logits.std()
    # The first token sees only itself, so a softcap has no effect on it.
    assert differences[-PROMPT // 2 :].min() > 20 * TOLERANCE


@pytest.mark.parametrize("kind", [DecodeSession, SeqSession, TreeSession])
def test_ids_are_those_of_transformers(model, kind):
    """A prompt runs in chunks of different sizes, and greedy ids follow."""
    text = ids(PROMPT)
    with model.session(kind) as session, model.load(session) as program:
        rows = [run(program, text, 0, 100), run(program, text, 100, 123, chunk=5), run(program, text, 123, PROMPT)]
        for _ in range(DECODED):
            text.append(int(rows[-1][-1].argmax()))
            rows.append(run(program, text, len(text) - 1, len(text)))
    expected = model.expected(text)
    model.close(torch.cat(rows), expected)
    assert text[PROMPT:] == expected[PROMPT - 1 : -1].argmax(dim=1).tolist()


def test_generated_ids(model):
    """``generate_tokens`` returns transformers' greedy ids up to the first eos id."""
    prompt = ids(PROMPT)
    with model.session() as session, model.load(session) as program:
        answer = list(etkv.generate_tokens(program, prompt, max_tokens=DECODED))
        eos = program.eos_token_ids
    expected = model.expected(prompt + answer)[PROMPT - 1 :].argmax(dim=1).tolist()
    assert answer == expected[:-1]
    assert len(answer) == DECODED or expected[-1] in eos


def test_rows_are_those_of_transformers(model):
    """A prompt in chunks and tokens after it, a rewind, a batch, and forks that are rewound."""
    expected = TransformersLogits(model.transformers)
    assert family_comparison.difference(family_comparison.runs(model.request.output), expected) == ""
    expected.check()


def test_a_rewound_and_a_saved_text_go_on(model, tmp_path):
    text, file = ids(PROMPT), tmp_path / "text.etkv"
    expected = model.expected(text)
    fingerprint = etkv.fingerprint(model.request.output)
    with model.session() as session, model.load(session) as program:
        run(program, text, 0, 200)
        session.rewind(190)
        model.close(run(program, text, 190, 210), expected[190:210])
        session.save(file, tokens=text[:210], fingerprint=fingerprint)
    with model.session() as session, model.load(session) as program:
        session.load(file, fingerprint=fingerprint)
        model.close(run(program, text, 210, PROMPT), expected[210:])


def test_trees_are_lossless(model):
    """Each node of a random tree has the logits of its path, and an accepted chain continues."""
    prompt, numbers = 120, random.Random(5)
    text = ids(prompt)
    with model.session(TreeSession) as session, model.load(session) as program:
        run(program, text, 0, prompt)
        for _ in range(3):
            position = len(text)
            paths: list[list[int]] = []
            tokens, parents = [], []
            for node in range(12):
                parent = numbers.randrange(-1, node) if node else -1
                tokens.append(numbers.randrange(250))
                parents.append(parent)
                paths.append([*(paths[parent] if parent >= 0 else []), node])
            session.propose(parents)
            at = [position + len(path) - 1 for path in paths]
            rows = program.forward(torch.tensor(tokens), torch.tensor(at))
            for row, path in zip(rows, paths, strict=True):
                model.close(row, model.expected(text + [tokens[node] for node in path])[-1])
            chain = max(paths, key=len)
            session.commit(chain)
            text += [tokens[node] for node in chain]
        end = ids(20, 41)
        model.close(run(program, text + end, len(text), len(text) + 20), model.expected(text + end)[-20:])


def test_the_file(model):
    """Builds of etkv before sinks and softcaps, and ExecuTorch's own backend, refuse the program."""
    file, config = PteFile(model.request.output), model.transformers.config
    softcap = getattr(config, "attn_logit_softcapping", None)
    if model.backend == "mlx":
        described = describe_program(file.path)
        assert file.delegates["forward"] == ["EtkvForMLX"]
        counts = {found["operation"]: found["count"] for found in described["operations"]}
        assert counts["UpdateAndAttendSinks"] == config.num_hidden_layers
        assert "UpdateAndAttend" not in counts
        assert described["steps_on_cuda"].startswith("instruction ")
        return
    calls = [call for call in map(json.loads, file.cpu_payloads()) if "layer" in call]
    assert [call["op"] for call in calls] == ["update_and_attend_sinks"] * config.num_hidden_layers
    for call in calls:
        assert call["softcap"] == softcap
        assert (call["inputs"][4] is None) == (softcap is not None)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "granite-swa"])
def test_half_precision(name, tmp_path):
    """Sinks are in bfloat16, and scores are bounded in float32."""
    folder = sinks_models.write(name, tmp_path / "model")
    request = ExportRequest(folder, tmp_path / "model.pte", dtype="bfloat16", prefill_chunk=CHUNK, verify=False)
    text = ids(150)
    config = CacheConfig(etkv.read_kv_cache_metadata(export_program(request)).layers, 256)
    with DecodeSession(config) as session, etkv.load(request.output, session) as program:
        found = torch.cat([run(program, text, 0, 120).float(), run(program, text, 120, 150, chunk=1).float()])
    transformers = sinks_models.model(name)
    with torch.no_grad():
        expected = transformers(torch.tensor([text])).logits[0]
        rounded = transformers.bfloat16()(torch.tensor([text])).logits[0].float()
    error, usual = ((logits - expected).square().mean().sqrt() for logits in (found, rounded))
    assert error < 1.5 * usual, (error, usual)


_FORMATS = [("f16", "f16"), ("affine8", "affine4"), ("nvfp4", "row-int4")]


@pytest.mark.parametrize("formats", _FORMATS, ids="-".join)
def test_formats_are_those_of_the_reference(model, formats):
    """Steps of many tokens, of few tokens and of one token read stored rows as the reference does."""
    k_format, v_format = formats
    text, ends = ids(160), [100, 105, 130, *range(131, 150), 160]
    step = Forward(_with_ops(model.of))
    layout = attention.survey(step, step.inputs(3), 256)
    assert len(layout.kv_heads) == len(model.facts.layers)
    config = CacheConfig(model.facts.layers, 256, k_format=k_format, v_format=v_format)
    cache = ContiguousCache(config)
    expected = []
    with (
        torch.no_grad(),
        op.active(cache),
        DecodeSession(config, backend=model.facts.backend) as session,
        model.load(session) as program,
    ):
        found = []
        for begin, end in zip([0, *ends], ends, strict=False):
            expected.append(step(torch.tensor([text[begin:end]]), torch.arange(begin, end))[0])
            found.append(run(program, text, begin, end))
    difference = (torch.cat(found) - torch.cat(expected)).abs() / torch.cat(expected).std()
    # An element midway between two codes may get either code, depending on its last bit.
    assert difference.square().mean().sqrt() < 5e-3
    assert max(rows.median() for rows in difference.split(20)) < 1e-4


def _with_ops(name: str):
    made = sinks_models.model(name)
    made.set_attn_implementation(attention.NAME)
    return made
