"""Programs of tiny models, run in steps and compared with transformers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

import etkv
import reference
import tiny_families
import tiny_models
from etkv import CacheConfig, DecodeSession
from etkv.export import ExportRequest
from etkv.session import Session

CHUNK = 100
"""Maximum tokens of a step."""

TOLERANCE = 1e-3
"""The largest error of a logit in float32, as a fraction of the spread of the logits."""


def model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny model of ``family`` with random weights in float32, with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_families.config(family, **changes)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


@dataclass(frozen=True)
class TinyProgram:
    """The program of a tiny model of ``family`` with ``changes`` to its settings. ``name`` is the name of its
    folder.
    """

    name: str
    family: str
    changes: dict[str, Any] = field(hash=False)
    backend: str = "cpu"
    quantize: str | None = None
    chunk: int = CHUNK
    """Maximum tokens of a step."""

    made_by: ClassVar[tuple[ModuleType, ...]] = (tiny_families, tiny_models)
    """The modules with the code that creates the model."""

    @property
    def folder(self) -> Path:
        return reference.MODELS / self.name

    @property
    def request(self) -> ExportRequest:
        """Return the request that exports the program."""
        output = self.folder.parent / f"{self.name}-{self.backend}-{self.quantize or 'float'}" / "model.pte"
        return ExportRequest(
            self.folder,
            output,
            backend=self.backend,
            quantize=self.quantize,
            prefill_chunk=self.chunk,
            verify=True,
            keep_hf=output.parent / "hf" if self.quantize else None,
        )

    def export(self) -> TinyProgram:
        """Write the model and its program, unless both are current. Return this object."""
        reference.export([self.write()])
        return self

    def write(self) -> ExportRequest:
        """Write the model, unless it is current. Return the request that exports its program."""
        text = f"{self.family} {sorted(self.changes.items())}".encode()
        sources = [Path(str(module.__file__)).read_bytes() for module in self.made_by]
        made_by = hashlib.sha256(b"".join([text, Path(__file__).read_bytes(), *sources])).hexdigest()
        stamp = self.folder / "made-by.txt"
        with reference.alone(self.folder):
            if not stamp.is_file() or stamp.read_text() != made_by:
                self.transformers.save_pretrained(self.folder)
                tiny_models.tokenizer().save_pretrained(self.folder)
                stamp.write_text(made_by)
        return self.request

    @functools.cached_property
    def facts(self) -> etkv.ModelCacheParams:
        return etkv.read_kv_cache_metadata(self.request.output)

    @functools.cached_property
    def transformers(self) -> Any:
        return model(self.family, **self.changes)

    def expected(self, text: Sequence[int]) -> torch.Tensor:
        """Return transformers' logits of each token of ``text``."""
        with torch.no_grad():
            logits: torch.Tensor = self.transformers(torch.tensor([list(text)]), use_cache=False).logits[0]
        return logits

    def session(self, kind: type[Session] = DecodeSession, **changes: Any) -> Any:
        fields = {"capacity": 1024, "k_format": "f32", "v_format": "f32", **changes}
        return kind(CacheConfig(self.facts.layers, **fields), backend=self.facts.backend)

    def load(self, session: Session, passes: str = "default") -> etkv.Program:
        # Some tiny models have a context of 256 tokens. All of them rotate by any position.
        return etkv.load(self.request.output, session, passes=passes, beyond_context=True)

    def alone(self, text: Sequence[int], prompt: int) -> torch.Tensor:
        """Return the logits of ``text`` in a separate session: the prompt runs in chunks, the rest in single tokens."""
        with self.session() as session, self.load(session) as program:
            return torch.cat([run(program, text, 0, prompt), run(program, text, prompt, len(text), chunk=1)])


def ids(n: int, factor: int = 37) -> list[int]:
    """Return ``n`` ids, which depend on ``factor``."""
    return [(number * factor + 11) % 250 for number in range(n)]


def run(
    program: etkv.Program, text: Sequence[int], begin: int, end: int, sequence: int | None = None, chunk: int = CHUNK
) -> torch.Tensor:
    """Run the tokens of ``text`` from ``begin`` to ``end`` in steps of ``chunk``, and return their logits.

    ``sequence`` is the number of the sequence, if the session has several.
    """
    rows = []
    for start in range(begin, end, chunk):
        stop = min(start + chunk, end)
        if sequence is not None:
            program.session.begin_step([sequence] * (stop - start))
        rows.append(program.forward(torch.tensor(text[start:stop]), torch.arange(start, stop)))
    return torch.cat(rows)


def decode(program: etkv.Program, text: list[int], prompt: int, tokens: int) -> torch.Tensor:
    """Run a text's first ``prompt`` tokens in chunks, then one token a step. Return the logits of all tokens.

    ``text`` is only the prompt at first. Greedy ids are appended to it until ``tokens`` of them have run.
    """
    rows = [run(program, text, 0, prompt)]
    for _ in range(tokens):
        text.append(int(rows[-1][-1].argmax()))
        rows.append(run(program, text, len(text) - 1, len(text)))
    return torch.cat(rows)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of a logit, as a fraction of the spread of the logits."""
    return float((found - expected).abs().max() / expected.std())


def is_greedy(rows: torch.Tensor, chosen: Sequence[int]) -> bool:
    """Return whether each id is the greedy id after the ids before it. If two logits are nearly equal, both ids are
    accepted.
    """
    logits = rows.gather(1, torch.tensor(list(chosen), dtype=torch.int64)[:, None])[:, 0]
    return bool((rows.max(dim=1).values - logits < 1e-3).all())
