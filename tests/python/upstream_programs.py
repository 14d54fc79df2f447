"""Exports programs with the unchanged MLX exporters of ExecuTorch's wheel.

Programs stay in ``build/models/upstream/`` until the exporter's options, this module or a package changes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import reference
import tiny_models
import upstream_models

FOLDER = reference.MODELS / "upstream"
CONTEXT, CHUNK = 256, 64
"""Maximum tokens of a context and of a step."""

OPTIMUM = os.environ.get("ETKV_TEST_OPTIMUM")
"""A folder with optimum-executorch, which pins another transformers and so cannot be installed with the other packages.
"""

PACKAGES = ("executorch", "torch", "torchao", "transformers")
EXAMPLES = "executorch.backends.mlx.examples."
VOXTRAL = "voxtral.export_voxtral_hf"
IN_GRAPH, OFF_GRAPH = ("--use-custom-sdpa", "--use-custom-kv-cache"), ("--use-offgraph-cache",)


@dataclass(frozen=True)
class Export:
    """One run of an exporter.

    In ``options`` the text ``{out}`` stands for the folder of the result, and ``{tiny-...}`` for the folder of a model.
    ``hooks`` installs transformers' hooks for hidden states before the exporter traces the model, because installing
    the hooks acquires a lock, and torch.export cannot trace locks. ``older_names`` gives Voxtral's model a method of
    transformers 5.0.
    """

    name: str
    model: str
    exporter: str
    options: tuple[str, ...]
    hooks: bool = False
    older_names: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def path(self) -> Path:
        return self.folder / "model.pte"

    @property
    def needs_optimum(self) -> bool:
        plain = self.exporter == "llm.export_llm_hf" and not {*IN_GRAPH, *OFF_GRAPH} & {*self.options}
        return plain or self.exporter == VOXTRAL

    @property
    def weights(self) -> Path:
        """Return the Hugging Face folder of the model."""
        return model(self.model)


def llm(model: str, *options: str, dtype: str = "fp32", hooks: bool = False) -> Export:
    """Return the export of a model with ``export_llm_hf``."""
    words = [model, *(option.removeprefix("--") for option in options), *([dtype] if dtype != "fp32" else [])]
    words += ["hooks"] if hooks else []
    given = ("--model-id", f"{{{model}}}", "--output", "{out}/model.pte", "--dtype", dtype)
    sizes = ("--max-ctx-len", str(CONTEXT), "--prefill-chunk-size", str(CHUNK))
    return Export("-".join(words), model, "llm.export_llm_hf", (*given, *sizes, *options), hooks)


def whisper(*options: str) -> Export:
    """Return the export of Whisper's three programs."""
    words = ["tiny-whisper", *(option.removeprefix("--") for option in options)]
    given = ("--model-id", "{tiny-whisper}", "--output-dir", "{out}", "--dtype", "fp32", "--max-decoder-seq-len", "128")
    return Export("-".join(words), "tiny-whisper", "whisper.export_whisper", (*given, *options))


def voxtral(*options: str, older_names: bool = True) -> Export:
    """Return the export of Voxtral: the preprocessor, and a program with a method for each part."""
    words = ["tiny-voxtral", *(option.removeprefix("--") for option in options)]
    words += [] if older_names else ["as-it-is"]
    given = ("--model-id", "{tiny-voxtral}", "--output-dir", "{out}", "--dtype", "fp32", "--max-audio-len", "60")
    return Export("-".join(words), "tiny-voxtral", VOXTRAL, (*given, *options), older_names=older_names)


def gemma4_31b(*options: str) -> Export:
    """Return the export of Gemma 4 31B with its own exporter, which reads quantized weights."""
    words = ["tiny-gemma4-31b", *(option.removeprefix("--") for option in options)]
    given = ("--prequantized", "{tiny-gemma4-31b}/quantized", "--output-dir", "{out}", "--backend", "mlx")
    exporter = "executorch.examples.models.gemma4_31b.export"
    return Export("-".join(words), words[0], exporter, (*given, "--max-seq-len", str(CONTEXT), *options))


def dflash() -> Export:
    """Return the export of a target and its DFlash draft. The exporter always quantizes weights to 8 bits."""
    given = ("--target-model", "{tiny-dflash-target}", "--draft-model", HUB_DRAFT, "--output", "{out}/model.pte")
    sizes = ("--max-ctx-len", str(CONTEXT), "--prefill-chunk-size", str(CHUNK), "--dtype", "fp32")
    quantize = ("--qlinear", "8w", "--qembedding", "8w")
    return Export("tiny-dflash", "tiny-dflash-target", "llm.dflash.export", (*given, *sizes, *quantize), hooks=True)


HUB_DRAFT = "etkv/tiny-dflash-draft"
"""The name of the draft in a cache of the hub, from where the DFlash exporter reads it."""


def export(exports: Iterable[Export]) -> dict[Export, str | None]:
    """Export missing or stale programs, two at a time. Return the error of each export, None if it succeeded."""
    wanted = list(exports)
    with reference.alone(FOLDER):
        for each in wanted:
            model(each.model)
        model("tiny-dflash-draft")
        missing = [each for each in wanted if _known(each) is None]
        if missing:
            list(_workers().map(_export, missing))
    known = {each: _known(each) for each in wanted}
    return {each: json.loads(text)["error"] for each, text in known.items() if text is not None}


def model(name: str) -> Path:
    """Return the folder of a tiny model. Write it if it is missing or if the code that writes it has changed."""
    folder = FOLDER / "hf" / name
    stamp = folder / "made-by.txt"
    made_by = _sources()
    if not stamp.is_file() or stamp.read_text() != made_by:
        shutil.rmtree(folder, ignore_errors=True)
        _ready()
        upstream_models.write(name, folder)
        stamp.write_text(made_by)
    return folder


def _known(each: Export) -> str | None:
    """Return the recorded outcome of an export, or None if it is missing or stale."""
    file = each.folder / "ended.json"
    if not file.is_file():
        return None
    text = file.read_text()
    return text if json.loads(text)["made_by"] == _made_by(each) else None


def _made_by(each: Export) -> str:
    return f"{_sources()} {each!r} {OPTIMUM if each.needs_optimum else None}"


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256(" ".join(map(version, PACKAGES)).encode())
    for module in (tiny_models, upstream_models, sys.modules[__name__]):
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()


@functools.cache
def _workers() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, get_context("spawn"))


def _ready() -> None:
    from etkv import _mlx_serialization

    _mlx_serialization.ensure_available()


def find_torchtune() -> None:
    """Make torchtune importable: the package with ExecuTorch's TurboQuant imports it in modules that are not used."""
    if str(reference.ROOT) not in sys.path:
        sys.path.append(str(reference.ROOT))
    from tests.upstream_ops import wheel

    wheel.find_torchtune()


def _export(each: Export) -> None:
    """Run the exporter, and record its outcome next to the program."""
    from etkv.export.progress import third_party_noise

    reference.speed_up_exports()
    shutil.rmtree(each.folder, ignore_errors=True)
    each.folder.mkdir(parents=True)
    error = None
    with third_party_noise(allowed=False):
        try:
            _run(each)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            (each.folder / "error.txt").write_text(traceback.format_exc())
    (each.folder / "ended.json").write_text(json.dumps({"made_by": _made_by(each), "error": error}))


def _run(each: Export) -> None:
    import runpy

    import huggingface_hub.constants
    import torch

    _ready()
    if OPTIMUM and OPTIMUM not in sys.path:
        sys.path.append(OPTIMUM)
    torch._dynamo.reset()
    # The exporter looks up the draft in the cache of the hub.
    huggingface_hub.constants.HF_HUB_CACHE = str(_hub())
    find_torchtune()
    if "--turboquant" in each.options:
        from tests.upstream_ops import fast_exports

        fast_exports.solve_codebooks_faster()
    module = each.exporter if each.exporter.startswith("executorch.") else EXAMPLES + each.exporter
    folders = {name: FOLDER / "hf" / name for name in upstream_models.NAMES}
    options = [option.format(out=each.folder, **folders) for option in each.options]
    before, sys.argv = sys.argv, [module, *options]
    try:
        with contextlib.ExitStack() as stack:
            if each.hooks:
                stack.enter_context(_hooks_installed_early())
            if each.exporter == VOXTRAL:
                stack.enter_context(_sound_at_hand(older_names=each.older_names))
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before


def _hub() -> Path:
    """Return a cache of the hub with the DFlash draft."""
    hub = FOLDER / "hub"
    repository, revision = hub / f"models--{HUB_DRAFT.replace('/', '--')}", "0" * 40
    snapshot = repository / "snapshots" / revision
    shutil.copytree(FOLDER / "hf" / "tiny-dflash-draft", snapshot, dirs_exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    return hub


@contextlib.contextmanager
def _hooks_installed_early() -> Iterator[None]:
    """Install transformers' hooks for hidden states in each model that is loaded within the block."""
    import transformers
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    auto = transformers.AutoModelForCausalLM
    before = auto.__dict__.get("from_pretrained")
    load = auto.from_pretrained.__func__

    def from_pretrained(cls, *args, **options):
        loaded = load(cls, *args, **options)
        for part in loaded.modules():
            if isinstance(part, transformers.PreTrainedModel):
                maybe_install_capturing_hooks(part)
        return loaded

    auto.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        if before is None:
            del auto.from_pretrained
        else:
            auto.from_pretrained = before


@contextlib.contextmanager
def _sound_at_hand(*, older_names: bool) -> Iterator[None]:
    """Provide optimum-executorch with the features of a recording. It would compute them with Voxtral's processor
    from a hub.

    The processor needs mistral-common for its tokenizer. Only the shape of the features affects the program.
    """
    from unittest import mock

    from optimum.exporters.executorch import integrations
    from transformers import VoxtralForConditionalGeneration, WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=128)
    features = extractor(upstream_models.sound(), return_tensors="pt", sampling_rate=16_000)
    model = VoxtralForConditionalGeneration
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(integrations, "AutoProcessor"))
        given = mock.patch.object(integrations, "apply_chat_template_with_fallback", lambda *_, **__: features)
        stack.enter_context(given)
        if older_names:
            older = lambda self, features: self.get_audio_features(features).pooler_output  # noqa: E731
            stack.enter_context(mock.patch.object(model, "get_audio_embeds", older, create=True))
        yield
