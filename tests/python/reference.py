"""Exports and runs programs for tests, and computes the expected outputs with transformers and mlx-lm.

Programs are exported to ``build/models/`` if they are missing or if their sources have changed. While the exporter
changes, ``ETKV_TEST_KEEP_PROGRAMS=1`` keeps every existing program.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import etkv
import tiny_models
from etkv import models
from etkv.constants import read_constants
from etkv.export import ExportRequest, export_program, is_current
from etkv.export.progress import third_party_noise

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
MODELS = BUILD / "models"
BIN = Path(os.environ.get("ETKV_TEST_BIN", BUILD / "bin"))
"""The folder of the runners. Python finds the libraries of another build through ETKV_LIBRARY_DIR."""
CHAT = BIN / "etkv_chat"
FORWARD = BIN / "etkv_forward"

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
UNIT_ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""dtype -> the largest relative error of rounding to it."""

TINY_CHUNK = 64
"""Maximum tokens in one execution of a tiny model's program."""

EVERYTHING = os.environ.get("ETKV_TEST_LONG") == "1"
"""Whether all cases of a test run (`make test-long`). Otherwise some cases run, which saves minutes."""

_TIMEOUT_SECONDS = 300


STORY = """\
A cache is a promise about the future made from the past. A library that keeps the books which were asked \
for yesterday near the door is betting that they will be asked for again tomorrow, and most days it wins \
the bet. A river keeps no such account: what flows past the mill at noon was rain in the hills on \
Tuesday, and the miller who wants to know how much there will be in August has to walk up and look at the \
snow.

In the autumn of 1887 the miller's daughter, Ada, began to write the height of the water on the wall \
beside the wheel, once in the morning and once in the evening, with a piece of chalk. After a month there \
were 60 numbers, and after a year there were 730, in columns that ran from the floor to the beam. Her \
father complained that the wall looked like a bank. Her mother, who could do sums, noticed that the \
numbers of one week were nearly always the numbers of the week before, moved a little up or a little \
down, and that the moves themselves had a habit: three days of rising were followed by one of rest.

"If that is so," said Ada, "then I need not write down every number. I can write the first, and then only \
what is surprising." She rubbed out the wall and began again. The new account took a tenth of the room; \
it was harder to read, and when a storm washed away the chalk of a single day, everything after that day \
was wrong until she climbed down to the river and measured afresh.
"""
"""A text of about 300 tokens."""

PROMPT = [60, 61, 62, 63, 64, 65, 66]
"""Ids of a prompt for a tiny model."""


# ---- Programs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """The arguments of one export: a model, its dtype and quantization, the program's layers and outputs, the maximum
    tokens of a step if they are not the default, and the backend.
    """

    model: str
    dtype: str = "f32"
    quantize: str | None = None
    layers: int | None = None
    logits: str = "all"
    tap_layers: tuple[int, ...] = ()
    draft: int | None = None
    prefill_chunk: int | None = None
    backend: str = "mlx"

    @property
    def name(self) -> str:
        """Return the name of the program's folder."""
        parts = ["cpu" if self.backend == "cpu" else None, self.model, self.dtype, self.quantize]
        if self.model not in tiny_models.CONFIGS and self.dtype == "f32":
            parts.remove("f32")
        parts.append(f"layers{self.layers}" if self.layers else None)
        parts.append(f"draft{self.draft}" if self.draft else None)
        parts.append(self.logits if self.logits != "all" else None)
        parts.append("-".join(["taps", *map(str, self.tap_layers)]) if self.tap_layers else None)
        parts.append(f"chunk{self.prefill_chunk}" if self.prefill_chunk else None)
        return "-".join(part for part in parts if part)

    def __str__(self) -> str:
        return self.name

    def on(self, backend: str) -> Variant:
        """Return the same variant for ``backend``."""
        return replace(self, backend=backend)


LONG = {
    *map(Variant, ("tiny-llama3", "tiny-mixtral", "tiny-phi", "tiny-phi3", "tiny-qwen2", "tiny-smollm3")),
    Variant("tiny-qwen3-untied"),
    Variant("tiny-qwen3", "bf16", "4w"),
    Variant("tiny-gemma3", "bf16"),
    *(
        Variant("tiny-llama", *precision)
        for precision in (("f32", "8w"), ("f16", "4w"), ("bf16", "4w"), ("bf16", "8w"))
    ),
    *(Variant(model, "f16", "8w") for model in ("tiny-qwen2", "tiny-qwen3")),
    Variant("tiny-qwen2", "bf16", "4w"),
    Variant("tiny-qwen2-mixed"),
    Variant("tiny-llama-untied"),
    *(Variant("tiny-qwen3-untied", "f32", quantize) for quantize in ("4w", "8w")),
    Variant("tiny-gemma3", "f32", "4w"),
    Variant("tiny-qwen3-moe"),
    Variant("tiny-qwen3-moe", "f32", "8w"),
    Variant("tiny-qwen3-moe", "bf16"),
}
"""Variants that run only in `make test-long`, because an export takes ten seconds.

The other variants have every kind of part: windows, norms of heads, experts, packed weights, half precision, tied and
untied heads.
"""


REAL_MODEL = Variant("smollm2-135m", layers=None if EVERYTHING else 4)
"""A published model with its weights and tokenizer. All of its 30 layers run in `make test-long`: their export takes
half a minute of processor time more."""


@dataclass(frozen=True)
class Program:
    """An exported program, and the Hugging Face folder with its weights. For a draft these are the model's weights."""

    variant: Variant
    path: Path
    hf: Path


def chosen(variants: Iterable[Variant]) -> list[Variant]:
    """Return the ``variants`` that run: in `make test-long` all, otherwise those that are not in :data:`LONG`."""
    return [variant for variant in variants if EVERYTHING or variant not in LONG]


def program(variant: Variant) -> Program:
    """Return the program of ``variant``. Export it if it is missing or stale."""
    return programs([variant])[variant]


def programs(variants: Iterable[Variant]) -> dict[Variant, Program]:
    """Return the programs of ``variants``. Export missing or stale ones."""
    requests = {variant: request(variant) for variant in variants}
    export(list(requests.values()))
    return {variant: Program(variant, made.output, made.keep_hf or made.model) for variant, made in requests.items()}


def export(requests: Sequence[ExportRequest]) -> None:
    """Run the ``requests`` whose programs are missing or stale."""
    missing = [request for request in requests if not _is_usable(request)]
    if len(missing) > 2 or (missing and "PYTEST_XDIST_WORKER" in os.environ):
        list(_exporters().map(_export, missing))
    else:
        # The imports of another process would take longer.
        list(map(_export, missing))


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder, because other test processes write the same files."""
    locks = MODELS / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / str(folder.absolute()).replace("/", "%")).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _exporters() -> ProcessPoolExecutor:
    """Return a pool of two processes, or of one beside other workers. It is kept for all tests, because imports take
    longer than a tiny export.
    """
    return ProcessPoolExecutor(1 if "PYTEST_XDIST_WORKER" in os.environ else 2, get_context("spawn"))


def request(variant: Variant) -> ExportRequest:
    """Return the request that exports ``variant``."""
    folder = MODELS / variant.name
    tiny = variant.model in tiny_models.CONFIGS
    return ExportRequest(
        model=tiny_source(variant.model) if tiny else _package_source(variant),
        output=folder / "model.pte",
        backend=variant.backend,
        dtype=DTYPES[variant.dtype],
        quantize=variant.quantize,
        prefill_chunk=variant.prefill_chunk or (TINY_CHUNK if tiny else None),
        keep_hf=None if variant.draft else folder / "hf",
        layers=variant.layers,
        draft=variant.draft,
        logits=variant.logits,
        tap_layers=variant.tap_layers,
    )


def _package_source(variant: Variant) -> Path:
    """Return the GGUF file for the unchanged model and for :data:`REAL_MODEL`. For all other variants return the
    exported folder of the unchanged model, which is faster to read.
    """
    plain = Variant(variant.model)
    return models.path(variant.model) if variant in (plain, REAL_MODEL) else program(plain).hf


@functools.cache
def tiny_source(name: str) -> Path:
    """Return the folder of a tiny model. Write it if it is missing or if the code that writes it has changed."""
    folder = MODELS / name
    stamp = folder / "made-by.txt"
    made_by = hashlib.sha256(Path(tiny_models.__file__).read_bytes()).hexdigest()
    with alone(folder):
        if not stamp.is_file() or stamp.read_text() != made_by:
            tiny_models.write(name, folder)
            stamp.write_text(made_by)
    return folder


def _is_usable(request: ExportRequest) -> bool:
    if os.environ.get("ETKV_TEST_KEEP_PROGRAMS") == "1" and request.output.is_file():
        return True
    return is_current(request)


def speed_up_exports() -> None:
    """Speed up the exports of this process without changing the programs."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tests.upstream_ops import fast_exports  # Imports torch, which takes seconds.

    fast_exports.prepare()


def _export(request: ExportRequest) -> None:
    speed_up_exports()
    request.output.parent.mkdir(parents=True, exist_ok=True)
    with alone(request.output), third_party_noise(allowed=False):
        # Another process may have exported it while this process waited for the lock.
        if not _is_usable(request):
            export_program(request)


def config(program: Program, capacity: int = 64, **changes: Any) -> etkv.CacheConfig:
    """Return the config of a float32 cache for ``program``."""
    layers = etkv.read_kv_cache_metadata(program.path).layers
    return etkv.CacheConfig(layers, capacity, **{"k_format": "f32", "v_format": "f32", **changes})


# ---- Running programs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardOutput:
    """The output of ``etkv_forward`` for a prompt: greedy ids, logits or None, and bytes allocated for the cache.

    ``logits`` has a row for each token of the prompt and for each later step, or only the last row of the prompt.
    """

    ids: list[int]
    logits: np.ndarray | None
    cache_bytes: int


def forward(
    program: Program,
    prompt: Sequence[int],
    *,
    decode: int = 0,
    chunk: int = 0,
    kv_format: str | None = None,
    rows: str | None = None,
) -> ForwardOutput:
    """Run ``prompt`` in prefill chunks of ``chunk`` tokens, then ``decode`` greedy steps. Return the output.

    ``rows`` selects the rows of logits: ``all``, ``last`` or None. Fails the test if the tool fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        ids_file, logits_file = Path(scratch, "ids.txt"), Path(scratch, "logits.bin")
        ids_file.write_text(" ".join(map(str, prompt)))
        command = [FORWARD, "--json", "--model", program.path, "--ids-file", ids_file]
        command += ["--decode", decode, "--chunk", chunk]
        if kv_format:
            command += ["--kv-format", kv_format]
        if rows:
            command += ["--all-logits" if rows == "all" else "--logits", logits_file]
        done = run(command)
        assert done.returncode == 0, f"{done.args}: {done.stderr}"
        result = json.loads(done.stdout)["runs"][0]
        count = {"all": len(prompt) + decode, "last": 1, None: 0}[rows]
        logits = np.fromfile(logits_file, np.float32).reshape(count, -1) if rows else None
    return ForwardOutput(result["ids"], logits, result["cache_allocated_bytes"])


def run(command: Sequence[Any], timeout: float = _TIMEOUT_SECONDS, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a tool for at most ``timeout`` seconds. Return its output, which must be UTF-8, as text."""
    words = [str(word) for word in command]
    options = {"stdin": subprocess.DEVNULL, "check": False, **options}
    return subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=timeout, **options)


@contextlib.contextmanager
def started(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen]:
    """Run a tool in the background. End it at the end of the block, even after an error."""
    with subprocess.Popen([str(word) for word in command], **options) as process:
        try:
            yield process
        finally:
            process.kill()


# ---- transformers ---------------------------------------------------------------------------------------------------


def load_hf(folder: Path, dtype: str = "f32") -> PreTrainedModel:
    """Return the model in ``folder``, computing in ``dtype``."""
    import torch
    from transformers import AutoModelForCausalLM

    with third_party_noise(allowed=False):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPES[dtype]), local_files_only=True)
    return model.eval()


def logits(model: PreTrainedModel, ids: Sequence[int], dtype: str = "f32") -> np.ndarray:
    """Return the logits ``[ids, vocabulary]`` of one forward in ``dtype``, as float32. ``model`` is float32."""
    import torch

    if dtype != "f32":
        model = copy.deepcopy(model).to(getattr(torch, DTYPES[dtype]))
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()


def tokenize(program: Program, text: str) -> list[int]:
    """Return the ids of ``text``, without a chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(program.hf, local_files_only=True)(text).input_ids


@dataclass(frozen=True)
class Greedy:
    """Greedy ids, and the margin of each: the difference between its logit and the second best."""

    ids: list[int]
    margins: list[float]


def greedy(folder: Path, prompts: dict[str, list[int]], count: int) -> dict[str, Greedy]:
    """Return the ``count`` ids that transformers generates for each prompt, by the prompt's name.

    Decoding is greedy, in float32, with transformers' cache, and does not stop at eos tokens. Results are cached in
    ``build/reference/`` by the weights, the prompt and the versions.
    """
    model: PreTrainedModel | None = None
    answers = {}
    for name, prompt in prompts.items():
        file = BUILD / "reference" / f"{_greedy_key(folder, prompt, count)}.json"
        if not file.is_file():
            model = model or load_hf(folder)
            answer = _generate(model, prompt, count)
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch = file.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps({"prompt": prompt, "ids": answer.ids, "margins": answer.margins}))
            scratch.replace(file)
        stored = json.loads(file.read_text())
        answers[name] = Greedy(stored["ids"], stored["margins"])
    return answers


def _generate(model: PreTrainedModel, prompt: list[int], count: int) -> Greedy:
    import torch
    from transformers import GenerationConfig

    # `generate` reads its other settings from here. Without eos tokens it does not stop early.
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(made.logits).float().topk(2, dim=-1).values
    ids = made.sequences[0, len(prompt) :].tolist()
    assert len(ids) == count
    return Greedy(ids, (best[:, 0] - best[:, 1]).tolist())


def _greedy_key(folder: Path, prompt: list[int], count: int) -> str:
    import torch
    import transformers

    parts = [_weights_digest(folder), prompt, count, torch.__version__, transformers.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


@functools.cache
def _weights_digest(folder: Path) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


# ---- mlx-lm ---------------------------------------------------------------------------------------------------------


def mlx_lm_logits(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """Return logits ``[ids, vocabulary]`` in float32, by mlx-lm with its cache and the weights in ``folder``.

    mlx-lm computes in the dtype of the weights.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    rows = model(mx.array([list(ids)]), cache=make_prompt_cache(model))[0]
    return np.array(rows.astype(mx.float32))


# ---- The weights of a program ---------------------------------------------------------------------------------------


def weights(program: Program) -> dict[str, torch.Tensor]:
    """Return the weights in the .pte of ``program`` by their Hugging Face names, dequantized, as float32.

    The program stores a quantized weight as unsigned integers of 4 or 8 bits, packed into words beginning at the
    lowest bits, with a scale for each group of a row. Zero is the middle of the range, unless groups have biases.
    """
    constants = read_constants(program.path)
    state = {}
    for name, tensor in constants.items():
        if name.endswith(_PACKED):
            base = name.removesuffix(_PACKED)
            scales, biases = (constants.get(f"{base}.{part}") for part in ("scales", "biases"))
            bits = int(program.variant.quantize.removesuffix("w"))
            state[_hf_name(base if ".experts." in base else f"{base}.weight")] = _dequantize(
                tensor, scales, biases, bits
            )
        elif ".experts." in name and name.endswith(".weight"):
            state[_hf_name(name.removesuffix(".weight"))] = tensor.float().transpose(-1, -2)
        elif ".experts." not in name and name.endswith((".weight", ".bias")):
            state[_hf_name(name)] = tensor.float()
    return state


def from_weights(program: Program) -> PreTrainedModel:
    """Return the model in transformers, with the configuration of ``program`` and the weights of its .pte in
    float32.
    """
    model = load_hf(program.hf)
    missing, unexpected = model.load_state_dict(weights(program), strict=False)
    assert not unexpected, unexpected
    tied = model.all_tied_weights_keys
    assert set(missing) <= {*tied, *tied.values()}, missing
    return model


_PACKED = ".packed"


def _dequantize(packed: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor | None, bits: int) -> torch.Tensor:
    import torch

    values = packed.view(torch.uint8)
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
    groups = values.float().unflatten(-1, (scales.shape[-1], -1))
    lowest = -(2 ** (bits - 1)) * scales.float() if biases is None else biases.float()
    return (groups * scales.float()[..., None] + lowest[..., None]).flatten(-2)


def _hf_name(name: str) -> str:
    return name.removeprefix("model.")


# ---- Comparing ------------------------------------------------------------------------------------------------------


def rms(values: np.ndarray) -> float:
    """Return the root of the mean square of ``values``."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def spread(rows: np.ndarray) -> float:
    """Return the standard deviation of logits within their rows. Errors of logits are fractions of it."""
    return rms(rows - rows.mean(axis=-1, keepdims=True))


def note(text: str) -> None:
    """Print a measured figure, which ``pytest -s`` and ``-rP`` show."""
    print(text, file=sys.stderr)
