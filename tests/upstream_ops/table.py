"""Writes the page ``docs/ops.md``: the file of each operation of ExecuTorch's schema, and the results of its tests.

The sources are the schema of the installed wheel, the table of operations in
``crates/etkv-mlx-program/src/ops/mod.rs``, and the outcomes of a run. ``python -m tests.upstream_ops
--write-expected`` writes the page. A test compares the page with the text that these sources give now.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .outcomes import Outcome

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ops.md"

ELSEWHERE = {
    "If": "../frontend/control.rs",
    "Scan": "../frontend/control.rs",
    "Split": "shape.rs",
    "IdCopy": "mod.rs",
    "Noop": "mod.rs",
}
"""Operations that are not exactly one instruction, which is why the table of instructions lacks them."""

_HEAD = """# Operations

The file that implements each operation of ExecuTorch's MLX schema, and the results of ExecuTorch's tests of it. `make
upstream-ops UPSTREAM=--write-expected` writes this page from the code and a run of [these
tests](programs.md#executorchs-own-tests).

- **file** is in [crates/etkv-mlx-program/src/ops](../crates/etkv-mlx-program/src/ops).
- **CPU**: how many of ExecuTorch's tests with this operation pass, of those that compare results. `-` means that the
  wheel has no test of it; [etkv's tests](../crates/etkv-mlx-program/src/tests) cover it.
- **CUDA**: `run` means that these tests were run on an NVIDIA GPU. All pass there, some of them without TF32
  ([figures](performance.md#executorchs-tests-of-operations)).
- **Metal**: no operation was run there. [Metal kernels](programs.md#metal-kernels) run as operations of MLX.

| operation | file | CPU | CUDA |
| --- | --- | --- | --- |
"""

_OWN = """
## Operations of etkv

Programs with [recurrent layers](programs.md#recurrent-layers), or with [sinks or a
softcap](programs.md#sinks-and-softcaps), have operations that the schema lacks. Their delegate is `EtkvForMLX`, so
ExecuTorch's MLX backend refuses these programs by name.

| operation | file |
| --- | --- |
"""


def names(schema: str) -> list[str]:
    """Return the names of the operations in the schema, in order."""
    union = re.search(r"union OpNode \{(.*?)\}", schema, re.DOTALL)
    assert union is not None
    lines = [line.partition("//")[0] for line in union[1].splitlines()]
    return [name.removesuffix("Node") for name in re.findall(r"\w+Node", "\n".join(lines))]


def _files() -> dict[str, str]:
    """Return the file of each operation."""
    table = (ROOT / "crates" / "etkv-mlx-program" / "src" / "ops" / "mod.rs").read_text()
    files = dict(ELSEWHERE)
    for name, module in re.findall(r"^    (\w+)Node: \w+ => (\w+)::\w+(?:\(\w+\))?,$", table, re.MULTILINE):
        path = ROOT / "crates" / "etkv-mlx-program" / "src" / "ops" / f"{module}.rs"
        files[name] = path.name if path.exists() else f"{module}/"
    return files


def text(ended: Sequence[Outcome]) -> str:
    """Return the page."""
    import executorch

    wheel = Path(next(iter(executorch.__path__)))
    schema = (wheel / "backends" / "mlx" / "serialization" / "schema.fbs").read_text()
    files = _files()
    rows = []
    for name in sorted(names(schema), key=str.lower):
        having = [outcome for outcome in ended if name in outcome.case.ops]
        compared = [outcome for outcome in having if outcome.kind not in ("not comparable", "not exported")]
        passed = sum(outcome.kind == "passed" for outcome in compared)
        tests = f"{passed} of {len(compared)}" if compared else "-"
        # All programs of the tests ran on an NVIDIA GPU, except those that are refused on every device.
        cuda = "run" if any(outcome.kind in ("passed", "not comparable") for outcome in having) else ""
        rows.append(f"| {name} | `{files[name]}` | {tests} | {cuda} |\n")
    own = [f"| {name} | `{files[name]}` |\n" for name in sorted(set(files) - set(names(schema)))]
    return _HEAD + "".join(rows) + _OWN + "".join(own)


def write(ended: Sequence[Outcome]) -> None:
    """Write the page from a run of all configurations."""
    PAGE.write_text(text(ended))
