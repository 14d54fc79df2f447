"""Compares a program with its model on a few tokens of prompt and decoding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from etkv import _capi, _library
from etkv.config import CacheConfig
from etkv.errors import EtkvError
from etkv.export import attention, by_capacity, experts, packing, recurrent
from etkv.export.forward import samples
from etkv.export.reasons import explained
from etkv.metadata import read_kv_cache_metadata
from etkv.recurrent_layer import BLOCK
from etkv.runtime import load
from etkv.session import DecodeSession

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from etkv.export.attention import CacheLayout
    from etkv.export.draft import DraftForward
    from etkv.export.forward import Forward
    from etkv.export.limits import Limits
    from etkv.export.progress import Progress
    from etkv.export.request import ExportRequest

MAX_PARAMETERS = 10**9
"""Programs of models with at least this number of parameters are checked only on request."""

_TOKENS, _DECODED = 24, 8
"""Number of compared tokens, and number of tokens at their end that run in steps of one token."""

_BEYOND = 16
"""Number of further tokens that are compared beyond a window, or beyond the first anchor of recurrent layers."""

_MAX_PRODUCTS = 30e9
"""Maximum product of parameters and tokens for a comparison of more than ``_TOKENS``: a few seconds on two cores."""

_TOLERANCES = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.15, "8da": 0.4}
"""The dtype of activations, or the beginning of a quantization's name -> the maximum error of a row of outputs.

The error is a fraction of the outputs' spread. A wrong mask, position or weight causes an error of about 1. The model
is computed in the same dtype with the same weights. With 8-bit activations, a difference in the last bit changes the
rounding in each layer: the error of SmolLM2-135M is up to 0.28.
"""


class Check:
    """The comparison of one export. Its methods do nothing if the program is not checked."""

    def __init__(
        self,
        step: Forward | DraftForward,
        request: ExportRequest,
        limits: Limits,
        layout: CacheLayout,
        progress: Progress,
    ) -> None:
        self._step, self._request, self._limits, self._progress = step, request, limits, progress
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: list[torch.Tensor] = []
        n = n_weights(step.model)
        self._wanted = request.verify
        if self._wanted is None:
            self._wanted = n < MAX_PARAMETERS
        lengths = [_TOKENS, *(window + _BEYOND for window in layout.windows if window)]
        if layout.recurrent:
            lengths.append(BLOCK + _BEYOND)
        longest = max(length for length in lengths if length == _TOKENS or length * n <= _MAX_PRODUCTS)
        self._length = min(longest, limits.max_context)

    def run_model(self) -> None:
        """Run the model with transformers' own attention, and store the outputs that its program must return.

        Raises :class:`EtkvError` if the model fails.
        """
        if not self._wanted:
            return
        model = self._step.model
        self._inputs = samples(self._step, self._length)
        doing = "run by transformers to compare with; --no-verify skips the comparison"
        with (
            self._progress.step("running the model to compare with"),
            explained(model.config.model_type, doing, model),
        ):
            model.set_attn_implementation("eager")
            # Compute every row of logits, because each step of the program returns its last row.
            rows, self._step.rows = self._step.rows, {}
            try:
                with torch.no_grad(), by_capacity.capacity(self._length), recurrent.as_transformers():
                    made = self._step(**self._inputs)
            finally:
                self._step.rows = rows
                model.set_attn_implementation(attention.NAME)
        self._outputs = [_rows(output) for output in (made if isinstance(made, tuple) else (made,))]

    def run_program(self, program: Path) -> bool:
        """Run ``program`` and compare it. Return whether it was compared.

        Without etkv's library, or with a library of another version, nothing is compared, unless a check was requested.
        Raises :class:`EtkvError` if the program does not run, or if its outputs differ from those of the model.
        """
        if not self._wanted:
            return False
        try:
            _library.backends()
            _capi.lib()
        except EtkvError as error:
            if self._request.verify:
                raise EtkvError(f"the program cannot be checked: {error}") from error
            self._progress.note(f"the program is not checked: {error}")
            return False
        with self._progress.step(f"comparing {self._length} tokens with the model"):
            try:
                steps = list(self._run(program))
            except EtkvError as error:
                raise EtkvError(f"the program does not run: {error}; --no-verify writes it without a check") from error
            for number, expected in enumerate(self._outputs):
                self._compare(("logits", "hidden states")[number], steps, number, expected)
        return True

    def _run(self, program: Path) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Run ``program`` on the inputs. Yield the end of each step, in tokens, and its outputs."""
        facts = read_kv_cache_metadata(program)
        prompt = self._length - min(_DECODED, self._length // 2)
        # The steps have different lengths, and no step begins at the edge of a window.
        chunk = self._limits.prefill_chunk
        ends = [*range(min(7, chunk, prompt), prompt, chunk), *range(prompt, self._length + 1)]
        config = CacheConfig(facts.layers, capacity=self._length)
        with DecodeSession(config, backend=facts.backend) as session, load(program, session) as loaded:
            for begin, end in zip([0, *ends], ends, strict=False):
                inputs = (
                    given.narrow(min(1, given.dim() - 1), begin, end - begin).contiguous()
                    for given in self._inputs.values()
                )
                yield end, [_rows(output) for output in loaded.execute(*inputs)]

    def _compare(
        self, name: str, steps: list[tuple[int, list[torch.Tensor]]], number: int, expected: torch.Tensor
    ) -> None:
        """Compare output ``number`` of all steps. An output may be only the last row of a step."""
        finite = torch.isfinite(expected).all(dim=1)
        if not finite.any():
            raise EtkvError(
                f"the model's {name} are not finite in {self._request.dtype}: export the model in another --dtype; "
                "--no-verify writes the program without a check"
            )
        spread = max(float(expected[finite].std()), 1e-6)
        errors = []
        for end, outputs in steps:
            rows = outputs[number]
            for at, row in enumerate(rows, start=end - len(rows)):
                # Skip rows in which the model itself overflows in its dtype.
                if finite[at]:
                    error = float((row - expected[at]).square().mean().sqrt()) / spread
                    errors.append((error if math.isfinite(error) else math.inf, at))
        request = self._request
        rounds_activations = (request.quantize or "").startswith("8da")
        tolerance = _TOLERANCES["8da" if rounds_activations else request.activations]
        is_exact = request.activations == "float32" and not rounds_activations
        if not is_exact and experts.is_mixture(self._step.model) and max(errors)[0] < math.inf:
            # If two experts have nearly equal scores, a difference in the last bit decides which one is chosen.
            errors = sorted(errors)[: len(errors) // 2 + 1]
        wrong = [(at, error) for error, at in errors if not error <= tolerance]
        if wrong:
            at, error = min(wrong)
            raise EtkvError(
                f"the program differs from the model: its {name} at position {at} of {self._length} are off by "
                f"{error:.2g} of their spread, and rounding explains {tolerance:g}; it was not written; "
                "--no-verify writes it without a check"
            )
        self._progress.note(f"{name}: off by at most {max(errors, default=(0.0, 0))[0]:.1e} of their spread")


def n_weights(model: PreTrainedModel) -> int:
    """Return the number of weights of ``model``, packed or not. Shared weights count once."""
    sizes = {id(weight): weight.numel() for weight in model.parameters()}
    for _, layer in packing.layers(model):
        sizes[id(layer.packed)] = math.prod(layer.etkv_shape())
    for _, module in experts.mixtures(model):
        parts = (getattr(module, name) for name in experts.names(module))
        sizes |= {id(part): math.prod(part.shape) for part in parts}
    return sum(sizes.values())


def _rows(output: torch.Tensor) -> torch.Tensor:
    return output.detach().float().reshape(-1, output.shape[-1]).clone()
