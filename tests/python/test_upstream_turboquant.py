"""A program with a TurboQuant cache, from ExecuTorch's exporter of Gemma 4 31B, the only exporter with this option.

Keys and values of full layers are rotated and stored as 4-bit codes. The exporter computes in bfloat16, so there are
two references: transformers in float32, with TurboQuant codes in its attention, and the exporter's model in torch,
which also has the errors of bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import etkv
import reference
import upstream_programs
from etkv import _mlx_serialization
from upstream_programs import CONTEXT, Export, gemma4_31b
from upstream_runs import DECODE, PROMPT, prompt

pytestmark = pytest.mark.long

CODED, PLAIN = gemma4_31b("--turboquant"), gemma4_31b()
RAN = [CODED, PLAIN]

STEP = 20
"""Number of tokens in a step of the prompt. The program returns only the logits of a step's last token."""

ROWS = [*range(STEP - 1, PROMPT - 1, STEP), *range(PROMPT - 1, PROMPT + DECODE - 1)]
"""The indices of the tokens whose logits are compared."""


@pytest.fixture(scope="module", autouse=True)
def ended() -> dict[Export, str | None]:
    _mlx_serialization.ensure_available()
    upstream_programs.find_torchtune()
    return upstream_programs.export(RAN)


@pytest.mark.parametrize("made", RAN, ids=str)
def test_logits_are_as_near_as_those_of_the_exporters_model(made, ended):
    assert ended[made] is None
    with etkv.load(made.path, None) as program:
        ids, rows = steps(lambda tokens, at: program.execute(tokens, at)[0])
    model = in_torch(coded=made == CODED)
    with torch.inference_mode():
        _, in_bfloat16 = steps(model, ids)
    expected, other = (expected_rows(ids, coded=coded) for coded in (made == CODED, made != CODED))
    error, usual = reference.rms(rows - expected), reference.rms(in_bfloat16 - expected)
    format_error = reference.rms(expected - other)
    reference.note(
        f"{made}: rms error {error:.1e}, that of torch {usual:.1e}, of the codes {format_error:.1e}, "
        f"spread {reference.spread(expected):.2f}"
    )
    assert error < 1.75 * usual
    assert reference.rms(rows - other) > 1.5 * error, "the codes have an effect"
    choices = expected[-DECODE:]
    best = np.sort(choices, axis=1)
    differ = choices.argmax(axis=1) != ids
    margins = (best[:, -1] - best[:, -2])[differ]
    reference.note(f"{made}: {differ.sum()} of {DECODE} ids differ, margins up to {max(margins, default=0):.1e}")
    assert len(set(ids)) > DECODE // 4
    assert differ.sum() <= DECODE // 8
    assert (margins < 6 * usual).all()


def steps(run: Callable[[Tensor, Tensor], Tensor], ids: list[int] | None = None) -> tuple[list[int], np.ndarray]:
    """Run the prompt and then ``ids``, or greedy ids. Return the ids, and the logits of each step."""
    text, chosen, rows = prompt(), [], []
    for first in range(0, PROMPT, STEP):
        rows.append(run(torch.tensor([text[first : first + STEP]]), torch.arange(first, first + STEP)).clone())
    while True:
        chosen.append(ids[len(chosen)] if ids else int(rows[-1].argmax()))
        if len(chosen) == DECODE:
            return chosen, torch.cat(rows).float().numpy()
        rows.append(run(torch.tensor([chosen[-1:]]), torch.tensor([PROMPT + len(chosen) - 1])).clone())


def checkpoint() -> torch.nn.Module:
    """Return the model that the exporter reads, with quantized weights."""
    from executorch.examples.models.gemma4_31b.export import load_prequantized_model

    return load_prequantized_model(str(CODED.weights / "quantized"), max_seq_len=CONTEXT, backend="mlx")[0]


def in_torch(*, coded: bool) -> torch.nn.Module:
    """Return the model that the exporter traces, in bfloat16."""
    from executorch.examples.models.gemma4_31b.mlx_source_transformations import mlx_source_transformations
    from executorch.examples.models.gemma4_31b.model import materialize_runtime_buffers

    model = checkpoint()
    mlx_source_transformations(model, dtype=torch.bfloat16, use_turboquant=coded, max_write_len=CONTEXT)
    materialize_runtime_buffers(model, dtype=torch.bfloat16)
    return model


@functools.cache
def in_transformers() -> torch.nn.Module:
    """Return transformers' model in float32, with the exporter's weights, dequantized."""
    from executorch.extension.llm.export.quant import dequantize_weight

    state = {
        name if name.startswith("lm_head") else f"model.{name}": (
            value.float() if type(value) is Tensor else dequantize_weight(value, torch.float32)
        )
        for name, value in checkpoint().state_dict().items()
    }
    model = reference.load_hf(CODED.weights)
    model.load_state_dict(state)
    model.config._attn_implementation = "eager"
    return model


def expected_rows(ids: list[int], *, coded: bool) -> np.ndarray:
    """Return transformers' logits at :data:`ROWS` from one forward, with codes if ``coded``."""
    from transformers.models.gemma4 import modeling_gemma4

    attention = modeling_gemma4.eager_attention_forward

    def with_codes(module, query, key, value, mask, **options):
        if not module.is_sliding:
            key, value = through_codes(key), through_codes(value)
        return attention(module, query, key, value, mask, **options)

    with pytest.MonkeyPatch.context() as patch:
        if coded:
            patch.setattr(modeling_gemma4, "eager_attention_forward", with_codes)
        return reference.logits(in_transformers(), prompt() + ids[:-1])[ROWS]


def through_codes(vectors: Tensor) -> Tensor:
    """Encode and decode vectors ``[..., width]`` with TurboQuant: a norm, and for each element the nearest of 16
    values.
    """
    from executorch.extension.llm.modules.turboquant.codebook import generate_rotation_matrix, solve_lloyd_max

    width = vectors.shape[-1]
    values, _ = solve_lloyd_max(width, bits=4)
    rotation = generate_rotation_matrix(width)
    norms = vectors.norm(dim=-1, keepdim=True)
    codes = (vectors / norms @ rotation.T)[..., None].sub(values).abs().argmin(dim=-1)
    return values[codes] * norms @ rotation
