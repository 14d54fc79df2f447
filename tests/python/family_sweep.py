"""Exports a tiny form of every family of transformers for both backends, and compares the programs with transformers.

:mod:`family_comparison` says what is compared.
``python tests/python/family_sweep.py`` runs the families without an outcome, two at a time, and writes the outcomes to
``python/etkv/export/families.json``, which ``python -m etkv.export --list`` prints, and the page ``docs/models.md``.
Outcomes of an unfinished sweep are in ``build/families-*.json``; remove these files to run all families again.
``family_sweep.py FILE llama:cpu gemma2:mlx`` runs these cases and writes their outcomes to ``FILE``. Each export runs
in its own process with a time limit. The processes are forked from this one, and share its imports.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import family_comparison
import reference
import tiny_families
import tiny_models
from etkv.errors import EtkvError
from etkv.export import families
from etkv.export.progress import third_party_noise

BACKENDS = ("mlx", "cpu")
PAGE = reference.ROOT / "docs/models.md"
KEPT = [reference.BUILD / f"families-{number}.json" for number in range(2)]

_SECONDS = 600
"""Maximum seconds of one export and its comparison."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a family on a backend.

    ``kind`` is ``equal``, ``refused`` or ``no tiny form``. Other kinds are faults: ``wrong``, ``traceback``, ``does not
    run``, ``ended``. ``reason`` has details. ``parts`` are the parts of the program, see :mod:`etkv.export.parts`.
    """

    kind: str
    reason: str = ""
    parts: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_fault(self) -> bool:
        """Return whether the outcome is a fault."""
        return self.kind not in ("equal", "refused", "no tiny form")


def prepare() -> None:
    """Import the packages that exports need, so that their processes share them."""
    from etkv.export import _import_tools

    os.environ["HF_HUB_OFFLINE"] = "1"
    reference.speed_up_exports()
    _import_tools()
    import executorch.backends.xnnpack.partition.xnnpack_partitioner  # noqa: F401


def outcome(family: str, backend: str) -> Outcome:
    """Export the tiny form of ``family`` for ``backend`` in its own process, and return the outcome."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(_SECONDS)
        try:
            with third_party_noise(allowed=False), tempfile.TemporaryDirectory() as scratch:
                found = _outcome(family, backend, Path(scratch))
        except BaseException as error:
            found = Outcome("traceback", f"{type(error).__name__}: {_line(error)}")
        os.write(write, json.dumps(dataclasses.asdict(found)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return Outcome(**json.loads(said)) if said else Outcome("ended", f"by signal {os.WTERMSIG(status)}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _outcome(family: str, backend: str, scratch: Path) -> Outcome:
    import torch

    from etkv.export import ExportRequest, export_program

    torch.set_num_threads(1)
    try:
        config = tiny_families.config(family)
        _write(config, scratch / "model")
    except Exception as error:
        return Outcome("no tiny form", f"{type(error).__name__}: {_line(error)}")
    # Run the model before the export, because some models cannot run at all.
    try:
        expected = family_comparison.TransformersLogits(_eager(scratch / "model"))
    except Exception:
        expected = None
    (scratch / "out").mkdir()
    step = family_comparison.MAX_STEP_TOKENS
    request = ExportRequest(scratch / "model", scratch / "out/model.pte", backend=backend, prefill_chunk=step)
    try:
        program = export_program(request)
    except EtkvError as error:
        return Outcome("refused", str(error).replace(str(scratch), "DIR"))
    if expected is None:
        return Outcome("wrong", "the model cannot run, and its program was made")
    try:
        found = family_comparison.runs(program)
    except EtkvError as error:
        return Outcome("does not run", str(error))
    expected.check()
    wrong = family_comparison.difference(found, expected)
    if wrong:
        return Outcome("wrong", wrong)
    return Outcome("equal", parts=json.loads((scratch / "out/export.json").read_text())["parts"])


def _write(config, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("dt_bias"):
                # Let states decay slowly. Otherwise many models forget a token within ten tokens.
                parameter.sub_(4)
    model.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)


def _eager(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


_NOT_RUN = "not run"

_HOW = (
    "The table lists every family of causal language models of transformers {}. `python tests/python/family_sweep.py` "
    "exports a tiny model of each family with random weights, compares the programs with transformers, and writes "
    "this page and the file that `python -m etkv.export --list` prints. *equal* means that the program computes "
    "what transformers computes in float32: every logit differs by less than a thousandth of the spread of logits from "
    "that of one forward over the same text, in a prompt in chunks and the tokens after it, after a rewind, in three "
    "sequences of different lengths that run in the same steps, and in two forks whose branches continue with other "
    "tokens, and with others again after a rewind; and 32 greedy ids after a prompt are the same, with the program "
    "loaded for the last row. Other cells have the error of the export, or the reason why transformers cannot create a "
    "tiny model. A name is the `model_type` in the config.json of a model: GLM-4.7-Flash is `glm4_moe_lite`, Granite 4 "
    "`granitemoehybrid`, Phi-4 `phi3`. A name with a comma is a variant of a family that published models use."
)
_BEYOND = (
    "If a published model has features that its tiny model lacks, the exporter supports them by the same rules, or "
    "[refuses](programs.md#what-is-refused) them. From models for text and images it exports the [text model]"
    "(programs.md#models-for-text-and-images). Tests of quantized programs compare fewer families. With another "
    "version of transformers, as on Python 3.10, the table may differ."
)


def page(contents: dict[str, Any]) -> str:
    """Return ``docs/models.md`` for the contents of ``families.json``."""
    outcomes = contents["outcomes"]
    running = families.runs(outcomes)
    forms = [name for name in outcomes if name in tiny_families.FORMS]
    n_running = {
        name: sum(name in on and family not in forms for family, (_, on) in running.items()) for name in BACKENDS
    }
    lines = [
        "# Models",
        "",
        *textwrap.wrap(_HOW.format(contents["transformers"]), 118, break_on_hyphens=False),
        "",
        *textwrap.wrap(_BEYOND, 118, break_on_hyphens=False),
        "",
        f"Of {len(outcomes) - len(forms)} families {n_running['mlx']} run on MLX and {n_running['cpu']} on the CPU.",
        "",
        "| family | parts | MLX | CPU |",
        "| --- | --- | --- | --- |",
    ]
    for family, had in sorted(outcomes.items()):
        said = [_cell(had[name]) if name in had else _NOT_RUN for name in BACKENDS]
        # If both cells have the same sentence, write it once.
        once = said[0] if said[0] not in (families.EQUAL, _NOT_RUN) else None
        parts = ", ".join(running.get(family, ((), ()))[0])
        lines.append(f"| {family} | {parts} | {said[0]} | {'as MLX' if said[1] == once else said[1]} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any]) -> str:
    kind, reason = found["kind"], re.sub(r"^model family '[^']*' (of DIR/model )?", "", found["reason"])
    reason = reason.replace("|", "\\|").replace("<", "&lt;")
    return kind if kind == families.EQUAL else reason if kind == "refused" else f"{kind}: {reason}"


def write(outcomes: dict[str, dict[str, Outcome]]) -> None:
    """Write ``families.json``, with a line for each family, and the page."""
    import transformers

    made = {
        name: {backend: dataclasses.asdict(had[backend]) for backend in BACKENDS if backend in had}
        for name, had in sorted(outcomes.items())
    }
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(had)}" for name, had in made.items())
    version = json.dumps(transformers.__version__)
    families.FILE.write_text(f'{{"transformers": {version}, "outcomes": {{\n{rows}\n}}}}\n', encoding="utf-8")
    PAGE.write_text(page(families.read()), encoding="utf-8")


def read(file: Path) -> dict[str, dict[str, Outcome]]:
    """Return the outcomes in ``file``, by family and backend."""
    if not file.is_file():
        return {}
    kept = json.loads(file.read_text())
    return {family: {name: Outcome(**found) for name, found in had.items()} for family, had in kept.items()}


def sweep(cases: Sequence[tuple[str, str]], file: Path) -> dict[str, dict[str, Outcome]]:
    """Run the cases without an outcome, print the outcomes, and add them to ``file``. Return all outcomes in
    ``file``.
    """
    outcomes = read(file)
    for family, backend in cases:
        if backend in outcomes.get(family, {}):
            continue
        found = outcome(family, backend)
        outcomes.setdefault(family, {})[backend] = found
        print(f"{family} on {backend}: {found.kind} {found.reason}", flush=True)
        kept = {name: {b: dataclasses.asdict(o) for b, o in had.items()} for name, had in outcomes.items()}
        file.write_text(json.dumps(kept))
    return outcomes


def main(arguments: list[str]) -> int:
    """Run the sweep. Return 1 if an outcome is a fault."""
    with third_party_noise(allowed=False):
        prepare()
    if arguments:
        file, *named = arguments
        outcomes = sweep([tuple(case.split(":")) for case in named], Path(file))
    else:
        KEPT[0].parent.mkdir(exist_ok=True)
        cases = [(family, name) for name in BACKENDS for family in tiny_families.names()]
        other = os.fork()
        outcomes = sweep(cases[other == 0 :: 2], KEPT[other == 0])
        if other == 0:
            os._exit(0)
        os.waitpid(other, 0)
        for family, had in read(KEPT[1]).items():
            outcomes.setdefault(family, {}).update(had)
        write(outcomes)
    return int(any(found.is_fault for had in outcomes.values() for found in had.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
