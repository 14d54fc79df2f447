"""Exports a causal language model as an ExecuTorch program whose KV caches are outside the graph.

:func:`export_program` is the function, and ``python -m etkv.export`` the command.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etkv import _mlx_serialization
from etkv.errors import EtkvError
from etkv.export import causal, companions, faster, hf_folder, layers, limits, manifest, source, staging
from etkv.export.progress import Progress
from etkv.export.reasons import explained, reason
from etkv.export.request import ExportRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from etkv.export.draft import DraftForward, FeaturePredictor
    from etkv.export.forward import Forward

__all__ = ["EtkvError", "ExportRequest", "Progress", "export_program", "is_current"]


_ONE_EXPORT = threading.Lock()


def is_current(request: ExportRequest) -> bool:
    """Return whether ``request.output`` is up to date with ``request``. Imports no large packages.

    Raises :class:`EtkvError` if the request is invalid for every model, or if there is no model at its path.
    """
    request = request.validated()
    try:
        return manifest.is_current(request, source.find(request.model))
    except OSError as error:
        raise EtkvError(f"{request.model} cannot be read: {error.strerror}") from error


def export_program(request: ExportRequest, progress: Progress | None = None) -> Path:
    """Export ``request.model`` to ``request.output`` and return the absolute path of the program.

    The files that a runner needs and ``export.json`` are written next to the program. Files get their final names after
    all files are complete, so a failed export leaves the earlier files in place.

    A process runs one export at a time; other exports wait. An export patches functions of torch, transformers and
    ExecuTorch while it runs.

    Raises :class:`EtkvError` with a message of one line if the request or the model is invalid, or if anything else
    fails.
    """
    request = request.validated()
    companions.check_places(request.output.parent, [manifest.NAME, request.output.name], request.keep_hf)
    if request.keep_hf is not None:
        companions.check_places(request.keep_hf, ["config.json"])
    try:
        with _ONE_EXPORT, faster.collecting_rarely():
            return _export(request, source.find(request.model), progress or Progress())
    except EtkvError:
        raise
    except Exception as error:
        raise EtkvError(f"{request.model} cannot be exported: {reason(error)}") from error


def _export(request: ExportRequest, origin: source.Source, progress: Progress) -> Path:
    with progress.step("importing torch, transformers and ExecuTorch"):
        _import_tools()
    from etkv.export import attention, check, latent, lowering, position_scale, recurrent, rope, sparsity, text_part
    from etkv.export.packing import Packing, without_products
    from etkv.export.scratch import Scratch

    with progress.step(f"reading the configuration of {origin.path}"):
        whole = source.read_config(origin)
        config = text_part.config(whole)
        with explained(config.model_type, "exported"):
            dropped = layers.keep_first(config, request.layers)
            layers.check_taps(request.tap_layers, config)
            settled = limits.settle(request, layers.last(config, request.draft) if request.draft else config)
    with progress.step("reading the tokenizer"):
        tokenizer = source.read_tokenizer(origin)
    family = config.model_type
    with faster.without_needless_work(), contextlib.ExitStack() as scratches:
        for folder in dict.fromkeys(filter(None, (request.output.parent, request.keep_hf))):
            for leftover in staging.remove_leftovers(folder):
                progress.note(f"removed {leftover}, which a killed export had left")
        with _writing(request.output):
            weights = scratches.enter_context(Scratch(request.output.parent, origin.files()))
        packing = Packing(lowering.packer(request, settled.group_size, weights), weights)
        with progress.step("reading the weights") as step_of_reading:
            packing.note = step_of_reading.at
            model = source.read_model(
                origin, whole, request.activations, dropped, progress.note, packing, not request.draft
            )
            rope.settle(model, settled.max_context)
            generation = source.generation_settings(origin, model, tokenizer)
        for text in source.vocabulary_remarks(config, tokenizer, generation):
            progress.note(text)
        with explained(family, "exported", model):
            sparsity.settle(model)
            latent.take(model)
            position_scale.take(model)
            recurrent.take(model)
            predictor = None
            if request.draft is not None:
                predictor = _feature_predictor(model, tokenizer, request.draft, generation, progress)
                packing.finish(model)
            for text in packing.remarks():
                progress.note(text)
            step = _step(request, model, predictor)
            with progress.step("running the model once"), without_products(model):
                layout = attention.survey(step, step.inputs(min(3, settled.prefill_chunk)), settled.max_context)
                settled = settled.within(layout, request)
        checked = check.Check(step, request, settled, layout, progress)
        checked.run_model()
        weights.release()
        kept = None
        if request.keep_hf is not None:
            # Write the Hugging Face folder now, while the model has the weights that were traced. Its files get their
            # final names after the program is written.
            with _writing(request.keep_hf):
                kept = scratches.enter_context(hf_folder.Staged(request.keep_hf))
            with progress.step(f"writing the weights for {request.keep_hf}"), _writing(request.keep_hf):
                kept.write(model, tokenizer, generation)
            weights.release()

        methods = lowering.constant_methods(request, settled, layout, generation)
        if predictor is not None:
            methods["get_draft_tap"] = config.get_text_config().num_hidden_layers - request.draft - 1
        program, parts = lowering.lower(step, request, settled, layout, methods, weights, progress)

        folder = request.output.parent
        with progress.step(f"writing {request.output}"), _writing(request.output):
            scratch = scratches.enter_context(staging.TemporaryFolder(folder)).path
            with (scratch / request.output.name).open("wb") as file:
                program.write_to_file(file)
                file.flush()
                os.fsync(file.fileno())
            size = (scratch / request.output.name).stat().st_size
            names = companions.write(scratch, tokenizer, generation)
        compared = checked.run_program(scratch / request.output.name)
        with _writing(request.output):
            made = manifest.ExportResult(size, names, compared, parts)
            manifest.write(scratch, request, origin, settled, made)
            for text in companions.changed(scratch, folder, names, request.output.name):
                progress.note(text)
            _publish(scratch, folder, [*names, request.output.name, manifest.NAME], kept)
    progress.note(f"wrote {request.output} ({size / 1e6:.1f} MB)")
    return request.output


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Convert an :class:`OSError` of the block to :class:`EtkvError` with ``path``."""
    try:
        yield
    except OSError as error:
        remedy = "; an export needs twice the size of the program" if error.errno == errno.ENOSPC else ""
        raise EtkvError(f"{path} cannot be written: {error.strerror}{remedy}") from error


def _import_tools() -> None:
    """Import the packages whose import takes seconds. Raises :class:`EtkvError` if one is not installed."""
    try:
        import transformers  # noqa: F401

        _mlx_serialization.ensure_available()
        import executorch.backends.mlx
        import executorch.exir  # noqa: F401

        causal.register()
    except ImportError as error:
        raise EtkvError(f"{error}; run pip install -r requirements.txt") from error


def _feature_predictor(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    generation: dict[str, Any],
    progress: Progress,
) -> FeaturePredictor:
    """Fit a predictor of the input of the last ``count`` layers of ``model``, and keep only these layers."""
    from etkv.export import draft

    starts = draft.starts(tokenizer, [generation.get("bos_token_id"), *generation["eos_token_id"]])
    with progress.step("fitting the draft on texts of the model"):
        predictor = draft.fit(model, len(layers.modules(model)) - count - 1, starts, progress)
        draft.cut(model, count)
    return predictor


def _step(request: ExportRequest, model: PreTrainedModel, predictor: FeaturePredictor | None) -> Forward | DraftForward:
    """Return the module to trace: a draft if there is a predictor, else the whole model."""
    from etkv.export.draft import DraftForward
    from etkv.export.forward import Forward

    last = request.logits == "last"
    return Forward(model, request.tap_layers, last) if predictor is None else DraftForward(model, predictor, last)


def _publish(scratch: Path, folder: Path, names: list[str], kept: hf_folder.Staged | None) -> None:
    """Move the finished files to ``folder``. The manifest moves last, because it describes the other files."""
    with staging.alone_in(folder), staging.deferred_interrupts():
        (folder / manifest.NAME).unlink(missing_ok=True)
        if kept is not None:
            kept.publish()
        companions.publish(scratch, folder, names)
