"""Models with random weights for comparisons on the CPU, as programs of etkv and as files of llama.cpp.

The first run of such a benchmark takes minutes: it writes the model, exports it, and converts it with llama.cpp's
converter. It needs ``make build``; llama-cpp-python in the Python of ``--llama-python`` (``benches/cpu_peers.py
--help`` describes its build); and llama.cpp's source in ``--llama-source``. The source is in vendor/llama.cpp of
llama-cpp-python's sdist::

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_peers
from cpu_peers import Contestant


@dataclass(frozen=True)
class RandomModel:
    """A model of transformers with random weights.

    ``config`` returns its configuration. ``converter`` is the module and the class of llama.cpp's converter.
    """

    folder: str
    script: str
    config: Callable[[], Any]
    converter: tuple[str, str]
    vocabulary: int
    positions: int
    options: tuple[str, ...] = ()
    """Options of the converter."""
    bf16: bool = False
    """Whether bfloat16 weights are compared too."""

    @property
    def hf(self) -> Path:
        return cpu_peers.MODELS / self.folder / "hf"

    @property
    def gguf(self) -> Path:
        return cpu_peers.MODELS / self.folder / "bf16.gguf"

    @property
    def contestants(self) -> list[Contestant]:
        """Return the contestants: etkv in 8da4w, llama.cpp in q4_0 with its quantizer's choice of bits, and llama.cpp
        with q4_0 for every matrix.

        With ``bf16``, also etkv and llama.cpp in bfloat16.
        """

        def contestant(name: str, engine: str, model: str, kv: str, quantize: str | None) -> Contestant:
            rival, file = "etkv-8da4w" if quantize else "etkv-bf16", f"{self.folder}/{model}"
            dtype = "f32" if quantize else "bf16"
            return Contestant(name, engine, file, rival, kv, quantize, self.positions, self.script, dtype)

        in_bf16 = [
            contestant("etkv-bf16", "etkv", "bf16/model.pte", "f32", None),
            contestant("llama.cpp-bf16", "llama", self.gguf.name, "f16", None),
        ]
        return [
            contestant("etkv-8da4w", "etkv", "8da4w/model.pte", "f32", "8da4w"),
            contestant("llama.cpp-q4_0", "llama", "q4_0.gguf", "f16", "q4_0"),
            contestant("llama.cpp-q4_0-pure", "llama", "q4_0-pure.gguf", "f16", "q4_0-pure"),
            *(in_bf16 if self.bf16 else []),
        ]

    def write(self) -> None:
        """Writes the model as a Hugging Face folder in bfloat16."""
        import repeating_model
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.bfloat16)
        model.save_pretrained(self.hf)
        # The exporter requires a tokenizer, although prompts here are ids. The tokenizer is written last: a folder
        # with a tokenizer is complete.
        (self.hf / "tokenizer.json").write_text(json.dumps(repeating_model.tokenizer()))

    def convert(self, source: Path) -> None:
        """Converts the model to GGUF with the converter in ``source``, without a vocabulary."""
        sys.path[:0] = [str(source), str(source / "gguf-py")]
        module, name = self.converter
        vocabulary = self.vocabulary

        def set_vocab(self: Any) -> None:
            self._set_vocab_none()
            self.gguf_writer.add_vocab_size(vocabulary)

        getattr(importlib.import_module(f"conversion.{module}"), name).set_vocab = set_vocab
        script, partial = str(source / "convert_hf_to_gguf.py"), self.gguf.with_suffix(".partial")
        sys.argv = [script, str(self.hf), "--outfile", str(partial), "--outtype", "bf16", *self.options]
        runpy.run_path(script, run_name="__main__")
        partial.rename(self.gguf)

    def prepare(self, wanted: Contestant, arguments: argparse.Namespace) -> str | None:
        """Creates the contestant's file if it is missing. Returns the reason if this is impossible, otherwise None."""
        itself = [sys.executable, self.script]
        llama = [arguments.llama_python, self.script]
        steps: list[tuple[Path, list[str]]] = [(self.hf / "tokenizer.json", [*itself, "--write-model"])]
        if wanted.engine == "etkv":
            if not cpu_peers.FORWARD.exists():
                return "there is no build/bin/etkv_forward: make build makes it"
            export = [sys.executable, "-m", "etkv.export", "--backend", "cpu"]
            export += ["--dtype", wanted.dtype, *(["--quantize", wanted.quantize] if wanted.quantize else [])]
            steps.append((wanted.file, [*export, "--model", str(self.hf), "--output", str(wanted.file)]))
        else:
            if subprocess.run([llama[0], "-c", "import llama_cpp"], capture_output=True).returncode != 0:
                return f"{llama[0]} cannot import llama_cpp: benches/cpu_peers.py --help describes how to install it"
            if not self.gguf.exists() and arguments.llama_source is None:
                return "no --llama-source: --help describes how to get it"
            steps.append((self.gguf, [*itself, "--convert", str(arguments.llama_source)]))
            if wanted.quantize:
                steps.append((wanted.file, [*llama, "--requantize", str(self.gguf), "--work", wanted.name]))
        for file, command in steps:
            if file.exists():
                continue
            print(f"preparing {file.relative_to(cpu_peers.ROOT)}", file=sys.stderr, flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.returncode != 0:
                return cpu_peers.failure(ended)
        return None

    def prompt_ids(self, n: int) -> list[int]:
        """Returns ``n`` arbitrary ids: the model is random."""
        return random.Random(1).choices(range(self.vocabulary), k=n)

    def run_as_a_part(self, arguments: argparse.Namespace) -> bool:
        """Does the work of a process that the benchmark has started. Returns False in a process that a user started."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        by_name = {contestant.name: contestant for contestant in self.contestants}
        if arguments.write_model:
            self.write()
        elif arguments.convert:
            self.convert(arguments.convert.resolve())
        elif arguments.requantize:
            cpu_peers.requantize(by_name[arguments.work], arguments.requantize)
        elif arguments.work:
            ids = [int(text) for text in arguments.ids_file.read_text().split()]
            print(json.dumps(cpu_peers.work(by_name[arguments.work], ids, arguments.decode, arguments.threads)))
        else:
            return False
        return True

    def main(self, description: str | None, contexts: list[int]) -> None:
        """Runs the command line of a benchmark that compares speed alone."""
        commands = parser(description, contexts)
        arguments = commands.parse_args()
        if self.run_as_a_part(arguments):
            return
        if max(arguments.contexts) + arguments.decode > self.positions:
            commands.error(f"--contexts plus --decode must not exceed {self.positions} positions")
        for name, reason in self.speed(arguments).items():
            print(f"left out: {name}: {reason}")

    def speed(self, arguments: argparse.Namespace) -> dict[str, str]:
        """Compares the contestants. Returns the contestants that were left out, with the reasons."""
        reasons = {contestant.name: self.prepare(contestant, arguments) for contestant in self.contestants}
        left_out = {name: reason for name, reason in reasons.items() if reason}
        for n_prompt in arguments.contexts:
            running = [contestant for contestant in self.contestants if contestant.name not in left_out]
            cpu_peers.compare(running, self.prompt_ids(n_prompt), left_out, arguments)
        return left_out


def parser(description: str | None, contexts: list[int]) -> argparse.ArgumentParser:
    """Returns a parser of the options that these benchmarks share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    cpu_peers.add_arguments(made, contexts)
    made.add_argument("--llama-source", type=Path, metavar="FOLDER", help="llama.cpp's source, for its converter")
    made.add_argument("--write-model", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    return made
