"""Finds the models of a run: the models of the checkout, of a pack of binaries, or of the command line."""

from __future__ import annotations

import json
import lzma
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import Model

ROOT = Path(__file__).resolve().parents[2]
"""The root of the checkout."""

MODELS = ROOT / "build" / "models"


@dataclass(frozen=True)
class Variant:
    """A format of SmolLM2's weights: the options of the exporter, and the folder of the program."""

    name: str
    folder: str
    dtype: str
    quantize: str | None = None


VARIANTS = [
    Variant("SmolLM2-135M, float32", "smollm2-135m", "float32"),
    Variant("SmolLM2-135M, bfloat16", "smollm2-135m-bf16", "bfloat16"),
    Variant("SmolLM2-135M, 4-bit", "smollm2-135m-4w", "float32", "4w"),
]


def named(text: str) -> Model:
    """Returns the model of ``--model NAME=PROGRAM[:FOLDER]``. Raises ValueError for other texts."""
    name, _, files = text.partition("=")
    program, _, weights = files.partition(":")
    if not name or not program:
        raise ValueError(f"{text!r} is not NAME=PROGRAM.pte:FOLDER")
    if not Path(program).is_file():
        raise ValueError(f"there is no {program}")
    return Model(name, Path(program).resolve(), Path(weights).resolve() if weights else None)


def of_checkout(*, quick: bool) -> list[Model]:
    """Returns SmolLM2's programs, with their weights for mlx-lm. Exports programs that are missing or stale."""
    from etkv.models import path

    found = []
    for variant in VARIANTS[:1] if quick else VARIANTS:
        folder = MODELS / variant.folder
        command = [sys.executable, "-m", "etkv.export", "--if-changed", "--model", str(path("smollm2-135m"))]
        command += ["--output", str(folder / "model.pte"), "--dtype", variant.dtype]
        # The same options as in the tests, so that both share one export.
        command += ["--keep-hf", str(folder / "hf")]
        command += ["--quantize", variant.quantize] if variant.quantize else []
        subprocess.run(command, check=True, cwd=ROOT)
        weights = folder / "mlx"
        if not (weights / "config.json").exists():
            source = MODELS / "smollm2-135m" / "hf"
            bits = bits_of(variant.quantize)
            convert_apart(source, folder / "model.pte", weights, dtype=variant.dtype, bits=bits)
        found.append(Model(variant.name, folder / "model.pte", weights))
    return found


def bits_of(quantize: str | None) -> int | None:
    """Returns the bits of a weight for the exporter's option ``--quantize``."""
    return int(quantize[0]) if quantize else None


def convert_apart(source: Path, program: Path, target: Path, **options: Any) -> None:
    """Runs :func:`convert` in a separate process, which frees all memory at its end."""
    job = json.dumps([str(source), str(program), str(target), options])
    code = "import json, sys; from run.models import convert; a = json.loads(sys.argv[1]); convert(*a[:3], **a[3])"
    subprocess.run([sys.executable, "-c", code, job], check=True, cwd=Path(__file__).parents[1])


def convert(source: str, program: str, target: str, *, dtype: str, bits: int | None, group_size: int = 32) -> None:
    """Writes the weights in ``source`` to ``target`` in the form that mlx-lm loads.

    Quantized weights have the same bits as in the program: mlx-lm's quantization would choose other scales.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.utils import load_model, save_config, save_model

    model, config = load_model(Path(source), lazy=True)
    model.update(tree_map(lambda leaf: leaf.astype(getattr(mx, dtype)), model.parameters()))
    if bits:
        nn.quantize(model, group_size=group_size, bits=bits)
        config["quantization"] = {"group_size": group_size, "bits": bits}
        weights = quantized_weights(Path(program), bits)
        names = {name for name, _ in tree_flatten(model.parameters())}
        unknown = sorted(set(weights) - names)
        if unknown:
            raise SystemExit(f"{program}: mlx-lm's model has no {unknown[0]}")
        model.load_weights(list(weights.items()), strict=False)
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model)
    # config.json is written last: a folder with config.json is complete.
    save_config(config, folder / "config.json")


def quantized_weights(program: Path, bits: int) -> dict[str, Any]:
    """Returns the packed weights, scales and biases of ``program``, under mlx-lm's names.

    The program contains no biases. They are computed: a bias is the scale times the middle code.
    """
    import mlx.core as mx

    from etkv.constants import read_constants

    weights = {}
    for name, array in read_constants(program).items():
        name = name.removeprefix("model.")
        if name.endswith(".parametrizations.weight.original0_to_packed"):
            weights[name.replace(".parametrizations.weight.original0_to_packed", ".weight")] = mx.array(array.numpy())
        elif name.endswith(".parametrizations.weight.original1"):
            wide = array.float().numpy()
            scales = mx.array(wide).astype(getattr(mx, str(array.dtype).removeprefix("torch.")))
            base = name.removesuffix(".parametrizations.weight.original1")
            weights[f"{base}.scales"] = scales
            weights[f"{base}.biases"] = scales * -(2 ** (bits - 1))
    return weights


def of_pack(pack: Path) -> list[Model]:
    """Returns the models of a pack, in the order of their names, unpacked on the first call."""
    found = []
    for folder in sorted(folder for folder in (pack / "models").iterdir() if folder.is_dir()):
        for packed in sorted(folder.rglob("*.xz")):
            unpack(packed)
        name = folder / "name.txt"
        label = name.read_text().strip() if name.exists() else folder.name
        weights = folder / "hf"
        found.append(Model(label, folder / "model.pte", weights if weights.is_dir() else None, trained=False))
    return found


def unpack(packed: Path) -> None:
    """Decompresses ``packed`` (.xz) to a file next to it, unless that file exists."""
    target = packed.with_suffix("")
    if target.exists():
        return
    partial = target.with_name(f"{target.name}.partial")
    with lzma.open(packed) as source, partial.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 24)
    partial.rename(target)
