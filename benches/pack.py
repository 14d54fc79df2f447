"""Packs the benchmark for a machine without a checkout, such as one with an NVIDIA GPU.

The folder build/bench-pack contains etkv's executables in ``bin``, the libraries that they need except MLX's in
``lib``, the package ``run``, and ``models``: programs with repeating weights, and the same weights for mlx-lm,
compressed. build/bench-pack.tar.xz is an archive of the folder. On a machine whose Python has MLX and mlx-lm, run::

    tar xf bench-pack.tar.xz && cd bench-pack && python3 -m run

Models that are missing in build/repeating are created. This takes minutes, and for llama-3.2-1b 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import repeating_model

ROOT = Path(__file__).resolve().parent.parent
REPEATING = ROOT / "build" / "repeating"

TOOLS = ["etkv_captured", "etkv_forward", "etkv_speculative", "etkv_lengths", "etkv_sequences", "etkv_op"]
OWN, OTHERS = ("lib{}.0.dylib", "lib{}.dylib") if sys.platform == "darwin" else ("lib{}.so.0", "lib{}.so")
"""The file names of libraries: etkv's, and ExecuTorch's."""

LIBRARIES = [
    OWN.format(name) for name in ("etkv", "etkv_blas", "etkv_mlx_backend", "etkv_cpu_backend", "etkv_tokenizer")
]
EXECUTORCH = [
    OTHERS.format(f"executorch{part}") for part in ("", "_threadpool", "_kernels_optimized", "_backend_xnnpack")
]


@dataclass(frozen=True)
class Packed:
    """A model of a pack: its shapes, its dtype, and the quantization of its weights."""

    label: str
    shape: str
    quantize: str | None = None

    @property
    def folder(self) -> Path:
        return REPEATING / f"{self.shape}-{self.quantize or 'bf16'}"

    @property
    def weights(self) -> Path:
        """The folder that mlx-lm loads."""
        return self.folder / ("mlx" if self.quantize else "hf")


MODELS = {
    # The models, in the order of the report. Most topics use only the first one.
    "llama-3.2-1b": Packed("Llama-3.2-1B's shapes, bfloat16", "llama-3.2-1b"),
    "llama-3.2-1b-4w": Packed("Llama-3.2-1B's shapes, 4-bit", "llama-3.2-1b", "4w"),
    "smollm2-135m": Packed("SmolLM2-135M's shapes, bfloat16", "smollm2-135m"),
    "smollm2-135m-4w": Packed("SmolLM2-135M's shapes, 4-bit", "smollm2-135m", "4w"),
    "qwen3.5-0.8b": Packed("Qwen3.5-0.8B's shapes, bfloat16", "qwen3.5-0.8b"),
    "tiny": Packed("a trial's shapes, bfloat16", "tiny"),
}

MLX_LM_TYPES = {"qwen3_5_text": "qwen3_5"}
"""model_type -> mlx-lm's model_type, if they differ."""


def make(model: Packed) -> None:
    """Creates the program and the weights of a model if they are missing."""
    source = REPEATING / f"{model.shape}-bf16" / "hf"
    if not (source / "config.json").exists():
        repeating_model.write(model.shape, source)
    program = model.folder / "model.pte"
    command = [sys.executable, "-m", "etkv.export", "--if-changed", "--model", str(source), "--dtype", "bfloat16"]
    # With such weights, rounding to bfloat16 alone changes logits by more than the check allows.
    command += ["--max-context", str(repeating_model.POSITIONS), "--no-verify"]
    command += ["--output", str(program), *(["--quantize", model.quantize] if model.quantize else [])]
    subprocess.run(command, check=True)
    if model.quantize and not (model.weights / "config.json").exists():
        from run.models import bits_of, convert

        convert(str(source), str(program), str(model.weights), dtype="bfloat16", bits=bits_of(model.quantize))


def compress(source: Path, target: Path) -> None:
    """Writes ``source`` compressed (.xz)."""
    with source.open("rb") as file, lzma.open(target, "wb", preset=1) as packed:
        shutil.copyfileobj(file, packed, 1 << 24)


def pack_model(number: int, model: Packed, folder: Path) -> None:
    """Writes a model into the pack. Its name there starts with its number, so that sorted names keep the order."""
    target = folder / "models" / f"{number}-{model.folder.name}"
    (target / "hf").mkdir(parents=True)
    (target / "name.txt").write_text(model.label + "\n")
    pairs = [(model.folder / "model.pte", target / "model.pte.xz")]
    pairs += [(file, target / "hf" / f"{file.name}.xz") for file in sorted(model.weights.glob("*.safetensors"))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda pair: compress(*pair), pairs))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model.folder / name, target)
    for file in model.weights.glob("*.json"):
        shutil.copy(file, target / "hf")
    config = json.loads((model.weights / "config.json").read_text())
    config["model_type"] = MLX_LM_TYPES.get(config["model_type"], config["model_type"])
    (target / "hf" / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def find(name: str, folders: list[Path]) -> Path:
    """Returns the path of a file in the first of some folders that has it."""
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise SystemExit(f"there is no {name} in {' or '.join(map(str, folders))}: `make bench-pack` builds it")


def strip(file: Path) -> None:
    """Removes debug information from a file. If `strip` is not installed, the file is unchanged."""
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", str(file)], check=True)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in MODELS if name not in ("qwen3.5-0.8b", "tiny")]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=usual, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build", metavar="FOLDER", help="the folder of `make build` (build)"
    )
    parser.add_argument("--tools", type=Path, metavar="FOLDER", help="look for executables here first")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-pack", metavar="FOLDER")
    options = parser.parse_args()
    import executorch

    places = [options.build / "bin", options.build / "cmake" / "benches"]
    places = [options.tools, *places] if options.tools else places
    tools = [find(name, places) for name in TOOLS]
    libraries = [find(name, [options.build / "lib"]) for name in LIBRARIES]
    libraries += [find(name, [Path(place) / "lib" for place in executorch.__path__]) for name in EXECUTORCH]
    for name in options.models:
        make(MODELS[name])

    shutil.rmtree(options.output, ignore_errors=True)
    for folder, files in (("bin", tools), ("lib", libraries)):
        (options.output / folder).mkdir(parents=True)
        for file in files:
            copy = options.output / folder / file.name
            shutil.copyfile(file, copy)
            copy.chmod(0o755)
            strip(copy)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(__file__).parent / "run", options.output / "run", ignore=ignored)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (options.output / "version.txt").write_text(version)
    for number, name in enumerate(options.models, 1):
        pack_model(number, MODELS[name], options.output)
    archive = options.output.with_name(f"{options.output.name}.tar.xz")
    with tarfile.open(archive, "w:xz", preset=4) as tar:
        tar.add(options.output, "bench-pack")
    size = sum(file.stat().st_size for file in options.output.rglob("*") if file.is_file())
    print(f"{options.output}: {size / 1e6:.1f} MB; {archive}: {archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
