"""The native caches, run through the delegate, against the reference caches, run through the op in PyTorch.

Random programs of steps run on both. Refusals have the same status, answers are the same, and the attention of every
layer is equal up to rounding. ``ETKV_STEP_SEEDS`` is the number of programs for each kind, format and layout.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import op_program
import step_programs
from etkv import CacheConfig, LayerConfig, Status, StatusError, load
from etkv.reference import make_cache
from reference import EVERYTHING

SEEDS = int(os.environ.get("ETKV_STEP_SEEDS", "1"))
GROUP = 2

LATENT = LayerConfig(1, 96, 72, values_in_keys=True)
FULL = (LayerConfig(2, 64), LayerConfig(1, 32, 64), LATENT)
WINDOWS = (
    LayerConfig(2, 64, window=3),
    LayerConfig(1, 32, 64),
    LayerConfig(2, 32, window=4, sinks=2),
    LayerConfig(1, 64, chunk=4),
)
LAYOUTS = {"full": FULL, "windows": WINDOWS}
# With short windows and many short steps, every program slides its windows, most of them repeatedly.
SIZES = {"full": {"capacity": 40, "max_step_tokens": 8}, "windows": {"capacity": 60, "max_step_tokens": 3}}
OPERATIONS = {"full": 40, "windows": 120}
FORMATS = ["f32", "f16", "affine4g32", "affine3g32", "nvfp4", "row-int4"]
FORMATS += ["bf16", "affine8g32", "mxfp8", "mxfp4", "row-fp4"] if EVERYTHING else []

TOLERANCE = 1e-5
"""The tolerance of outputs, which are about 1, in float32. Stored rows are bitwise equal in every format."""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return a function from layout, dtype and :class:`op_program.Attention`'s ``shared`` to a program."""
    folder = tmp_path_factory.mktemp("op")
    made = {}

    def find(layout: str, out_dtype: torch.dtype = torch.float32, shared: bool = False):
        key = (layout, out_dtype, shared)
        if key not in made:
            path = folder / f"{layout}-{len(made)}.pte"
            # The program's limit is large, so that the cache refuses steps with too many tokens.
            made[key] = op_program.export(
                config(layout), path, group=GROUP, most_tokens=64, out_dtype=out_dtype, shared=shared
            )
        return made[key]

    return find


def config(layout: str, **changes) -> CacheConfig:
    return CacheConfig(**{"layers": LAYOUTS[layout], **SIZES[layout], **changes})


def compare(
    kind: str,
    layout: str,
    settings: CacheConfig,
    path: Path,
    seed: int,
    *,
    native: CacheConfig | None = None,
    shared: bool = False,
) -> int:
    """Compare a native cache of ``native``, or of ``settings`` if None, with a reference cache of ``settings``. Return
    the number of steps that ran.

    ``shared`` is that of the program: see :class:`op_program.Attention`.
    """
    operations = step_programs.generate(kind, settings, seed, OPERATIONS[layout])
    expected = op_program.run_in_torch(operations, make_cache(kind, settings), GROUP, shared)
    found = op_program.run(operations, kind, native or settings, path, GROUP)
    for index, (operation, ours, theirs) in enumerate(zip(operations, expected, found, strict=True)):
        place = f"seed {seed}, operation {index}, {operation}"
        assert theirs.refused == ours.refused, f"{place}: {theirs.message or '-'} / {ours.message or '-'}"
        assert theirs.answers == ours.answers, place
        for call, (got, wanted) in enumerate(zip(theirs.outputs, ours.outputs, strict=True)):
            worst = (got - wanted).abs().max().item()
            assert worst < TOLERANCE, f"{place}, call {call}: {worst}"
    assert (slides(operations, expected) > 0) == (layout == "windows"), f"seed {seed}"
    return sum(bool(outcome.outputs) for outcome in found)


def slides(operations: list[step_programs.Operation], outcomes: list[step_programs.Outcome]) -> int:
    """Return how often a window slid: how often new positions raised the smallest length that a sequence can be
    rewound to.
    """
    times, before = 0, {}
    for operation, outcome in zip(operations, outcomes, strict=True):
        action = operation.action
        longer = isinstance(action, step_programs.Step) or action.name == "commit"
        answers = outcome.answers
        # A sequence's answer is its length, its next position, and the smallest length that it can be rewound to.
        now = {name: told[2] for name, told in answers.items() if name.startswith("sequence ")}
        now = now or {"the only one": answers["rewindable_to"]}
        times += longer and sum(least > before.get(name, 0) for name, least in now.items())
        before = now
    return times


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", op_program.SESSIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_same_format_for_keys_and_values(program, kind, layout, name):
    """Each format runs other random programs."""
    for seed in range(SEEDS):
        settings = config(layout, k_format=name, v_format=name)
        compare(kind, layout, settings, program(layout), 1000 * FORMATS.index(name) + seed)


@pytest.mark.parametrize("kind", op_program.SESSIONS)
def test_a_config_that_is_wrong_about_values_in_keys_is_refused(program, kind):
    wrong = config("full", layers=(replace(FULL[0], values_in_keys=True), *FULL[1:]))
    rows = [torch.randn(1, heads, 2, dim) for facts in FULL for heads, dim in _shapes(facts)]
    # The last layer's values are in its keys.
    rows[-1] = rows[-2][..., : LATENT.value_dim].clone()
    with op_program.SESSIONS[kind](wrong) as session, load(program("full"), session) as loaded:
        if kind != "contiguous":
            session.begin_step([0, 0])
        with pytest.raises(StatusError, match="values of layer 0 are not the first 64 elements of its keys") as caught:
            loaded.execute(torch.tensor([0, 1]), *rows)
        assert caught.value.status == Status.SHAPE
        assert session.memory().used == 0


def _shapes(facts: LayerConfig) -> list[tuple[int, int]]:
    """Return the heads and sizes of queries, keys and values."""
    heads = facts.n_kv_heads
    return [(GROUP * heads, facts.k_head_dim), (heads, facts.k_head_dim), (heads, facts.value_dim)]


@pytest.mark.parametrize("kind", op_program.SESSIONS)
def test_keys_and_values_apart(program, kind):
    for seed in range(SEEDS):
        settings = config("windows", k_format="affine8g32", v_format="row-int4")
        compare(kind, "windows", settings, program("windows"), 100_000 + seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", op_program.SESSIONS)
def test_formats_that_change_on_the_way(program, kind, layout):
    changes = {"k_format": "affine4g32", "v_format": "mxfp8", "float_format": "f32", "quantized_kv_start": 12}
    for seed in range(SEEDS):
        compare(kind, layout, config(layout, **changes), program(layout), 200_000 + seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", op_program.SESSIONS)
def test_layers_that_share_keys_and_values(program, kind, layout):
    """Two calls with one layer id: the second attends to the rows of the first, as in PyTorch."""
    settings = config(layout, k_format="f16", v_format="affine8g32")
    for seed in range(SEEDS):
        n_steps = compare(kind, layout, settings, program(layout, shared=True), 300_000 + seed, shared=True)
        assert n_steps > OPERATIONS[layout] // 4


def test_outputs_have_the_dtype_of_the_op(program):
    """The output is float16 for float32 rows and every storage format."""
    path = program("full", torch.float16)
    settings = config("full", k_format="f32", v_format="f32")
    operations = step_programs.generate("contiguous", settings, 7, 10)
    found = op_program.run(operations, "contiguous", settings, path, GROUP)
    outputs = [output for outcome in found for output in outcome.outputs]
    assert outputs
    assert {output.dtype for output in outputs} == {torch.float16}


@pytest.mark.parametrize("kind", op_program.SESSIONS)
def test_the_comparison_sees_a_difference(program, kind):
    """A window that is one position shorter, and keys in another format, fail the comparison."""
    settings = config("windows", k_format="f32", v_format="f32")
    first = settings.layers[0]
    shorter = replace(settings, layers=(replace(first, window=first.window - 1), *settings.layers[1:]))
    coarser = replace(settings, k_format="affine8g32")
    for other in (shorter, coarser):
        with pytest.raises(AssertionError, match="seed 0, operation"):
            compare(kind, "windows", settings, program("windows"), 0, native=other)
