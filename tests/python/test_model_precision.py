"""Logits of programs on etkv against transformers in float32 with the weights of the .pte.

The tolerance depends on the dtype of the arithmetic. Float32 errors come only from the order of sums. In float16 and
bfloat16, errors are as small as those of transformers in the same dtype. With quantized weights they are a little
larger, because MLX unpacks weights in that dtype. Rounding or quantizing the weights itself adds no error, because both
sides have the same weights.
"""

from __future__ import annotations

import numpy as np
import pytest

import reference
from reference import DTYPES, EVERYTHING, STORY, TINY_CHUNK, Program, Variant

PRECISIONS = [(dtype, quantize) for dtype in DTYPES for quantize in (None, "4w", "8w")]
EACH_ONCE = [("f32", None), ("f16", "8w"), ("bf16", "4w")]
"""Every dtype and every width of weights once, for families whose arithmetic equals that of another family."""
PRECISIONS_OF = {
    "tiny-llama": PRECISIONS,
    "tiny-qwen2": PRECISIONS if EVERYTHING else EACH_ONCE,
    "tiny-qwen3": PRECISIONS if EVERYTHING else EACH_ONCE,
}
VARIANTS = reference.chosen(
    [
        *(Variant(family, *precision) for family, precisions in PRECISIONS_OF.items() for precision in precisions),
        # The parts in which these models differ from their family do not depend on the dtype.
        Variant("tiny-llama-untied"),
        Variant("tiny-llama-untied", "f32", "4w"),
        Variant("tiny-llama3"),
        Variant("tiny-qwen3-untied"),
        Variant("tiny-qwen3-untied", "f32", "8w"),
    ]
)
DECODE = 8
PROMPT = [256, 258, *b"user\nhow far is it to the mill, and back?", 257, 10, 258]


@pytest.fixture(scope="module")
def programs() -> dict[Variant, Program]:
    return reference.programs(VARIANTS)


@pytest.fixture(scope="module")
def exact(programs):
    """Return a function from variant and ids to transformers' rows of logits, in float32 with the program's weights."""
    models = {}

    def rows(variant: Variant, ids: list[int], dtype: str = "f32") -> np.ndarray:
        if variant not in models:
            models.clear()
            models[variant] = reference.from_weights(programs[variant])
        return reference.logits(models[variant], ids, dtype)

    return rows


def greedy_of(rows: np.ndarray) -> list[int]:
    return rows.argmax(axis=-1).tolist()


def worst(rows: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest error of a logit as a fraction of the range of logits."""
    return float(np.abs(rows - expected).max() / np.ptp(expected))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.dtype == "f32"], ids=str)
def test_float32_equals_transformers(programs, exact, variant):
    """All rows of a prompt, in one chunk and in several, and of later steps are equal, quantized or not."""
    for chunk in (0, 1, 7):
        ran = reference.forward(programs[variant], PROMPT, decode=DECODE, rows="all", chunk=chunk)
        expected = exact(variant, PROMPT + ran.ids[:-1])
        np.testing.assert_allclose(ran.logits, expected, rtol=1e-4, atol=1e-4)
        assert ran.ids == greedy_of(expected)[-DECODE - 1 :]
        reference.note(f"{variant}, chunk {chunk}: max error {np.abs(ran.logits - expected).max():.1e}")


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.dtype != "f32"], ids=str)
def test_half_precision_is_as_good_as_that_of_transformers(programs, exact, variant):
    """The rms error against float32 is at most 1.5 times that of transformers in the same dtype, because the same
    roundings in another order differ at random. With quantized weights the limit is 2.5 times: MLX rounds the
    product of integer and scale and then the weight, and transformers rounds only the weight.
    """
    ran = reference.forward(programs[variant], PROMPT, decode=DECODE, rows="all")
    ids = PROMPT + ran.ids[:-1]
    expected = exact(variant, ids)
    error = reference.rms(ran.logits - expected)
    usual = reference.rms(exact(variant, ids, variant.dtype) - expected)
    reference.note(f"{variant}: rms error {error:.2e}, transformers' own {usual:.2e}, ratio {error / usual:.2f}")
    assert error < (2.5 if variant.quantize else 1.5) * usual
    # Chunks and single tokens agree within the same error.
    single = reference.forward(programs[variant], ids, rows="all", chunk=1).logits
    assert reference.rms(single - ran.logits) < 2 * error


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_format_is_that_of_the_program_by_default(programs, dtype):
    variant = Variant("tiny-llama", dtype)
    default = reference.forward(programs[variant], PROMPT, decode=DECODE, rows="all")
    chosen = reference.forward(programs[variant], PROMPT, decode=DECODE, rows="all", kv_format=dtype)
    assert (chosen.ids, chosen.cache_bytes) == (default.ids, default.cache_bytes)
    np.testing.assert_array_equal(chosen.logits, default.logits)
    for other in DTYPES:
        ran = reference.forward(programs[variant], PROMPT, decode=DECODE, kv_format=other)
        assert ran.cache_bytes == default.cache_bytes * (4 if other == "f32" else 2) // (4 if dtype == "f32" else 2)


@pytest.mark.parametrize("variant", [Variant("tiny-llama", "f32"), Variant("tiny-llama", "bf16")], ids=str)
def test_a_long_prompt_outgrows_the_first_allocation(programs, exact, variant):
    """200 tokens take several chunks of the program and several growths of the cache."""
    ids = np.random.default_rng(7).integers(0, 256, 200).tolist()
    assert len(ids) > 3 * TINY_CHUNK
    rows = reference.forward(programs[variant], ids, rows="all").logits
    # A program that computes only the last row sums in another order.
    last = reference.forward(programs[variant], ids, rows="last").logits
    expected = exact(variant, ids)
    if variant.dtype == "f32":
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(last, expected[-1:], rtol=1e-4, atol=1e-4)
    else:
        usual = reference.rms(exact(variant, ids, variant.dtype) - expected)
        assert reference.rms(rows - expected) < 2.5 * usual
        assert reference.rms(last - rows[-1:]) < 2.5 * usual


# ---- SmolLM2 --------------------------------------------------------------------------------------------------------


def smollm2_in(dtype: str, quantize: str | None = None) -> Variant:
    return Variant("smollm2-135m", dtype, quantize)


WIDTHS = ["4w", "8w"]
SMOLLM2 = [smollm2_in("bf16"), *(smollm2_in("f32", width) for width in WIDTHS)]


@pytest.fixture(scope="module")
def smollm2() -> dict[Variant, Program]:
    return reference.programs(SMOLLM2)


@pytest.mark.real_model
@pytest.mark.long
def test_smollm2_bfloat16_is_as_good_as_mlx_lm(smollm2):
    """Each row is also the last row of a shorter prompt, so 200 tokens measure 200 prompts.

    A single row does not suffice: if a rotary cosine is midway between two bfloat16 values, two equally exact programs
    may round it differently, and later rows then differ by half their error.
    """
    program = smollm2[smollm2_in("bf16")]
    ids = reference.tokenize(program, STORY)[:200]
    assert len(ids) == 200
    expected = reference.logits(reference.load_hf(program.hf), ids)
    ours = reference.forward(program, ids, rows="all").logits
    theirs = reference.mlx_lm_logits(program.hf, ids)

    error, usual = reference.rms(ours - expected), reference.rms(theirs - expected)
    last, usual_last = reference.rms(ours[-1] - expected[-1]), reference.rms(theirs[-1] - expected[-1])
    same = float(np.mean((ours == theirs).all(axis=-1)))
    reference.note(
        f"rms error over all rows {error:.4f}, mlx-lm {usual:.4f}; of the last row {last:.4f}, "
        f"mlx-lm {usual_last:.4f}; {same:.0%} of the rows are equal bit by bit; "
        f"the spread of logits is {reference.spread(expected):.2f}"
    )
    assert error <= 1.05 * usual
    assert last <= 2 * usual_last


@pytest.mark.real_model
@pytest.mark.long
@pytest.mark.parametrize("quantize", WIDTHS)
def test_smollm2_quantized_equals_transformers_on_the_dequantized_weights(smollm2, quantize):
    """The weights are those of the .pte, and the arithmetic is float32 on both sides.

    A float32 sum of n products has a relative error of about 2^-24 times the root of n: 2e-6 for the widest sum here,
    of 1536. Four such sums in each of 30 layers multiply the error by the root of 120, to 3e-5 of the range of logits,
    if no error is damped. With the norms between the layers, at most 1e-5 remains. That is a hundredth of the effect of
    changing one 4-bit weight in every row by one unit.
    """
    program = smollm2[smollm2_in("f32", quantize)]
    ids = reference.tokenize(program, STORY)[:48]
    ran = reference.forward(program, ids, decode=DECODE, rows="all")
    expected = reference.logits(reference.from_weights(program), ids + ran.ids[:-1])
    error = worst(ran.logits, expected)
    reference.note(
        f"{quantize}: max error {np.abs(ran.logits - expected).max():.1e}, {error:.1e} of the range of logits"
    )
    assert error < 1e-5
    assert greedy_of(ran.logits) == greedy_of(expected)
