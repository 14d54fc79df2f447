"""A worker that runs exported configurations through the delegate and compares their outputs like the wheel's
tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

import etkv
from etkv.errors import EtkvError, Status, first_line

from . import wheel, worker
from .cases import Case

# ExecuTorch's numbers of dtypes, with which the wheel's tests specify the storage of a cache.
_FORMATS = {"5": "f16", "6": "f32", "15": "bf16"}


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load the delegate, and return the function that runs one case.

    The function takes ``{"case": fields of a Case, "passes": name}`` and returns the fields of an
    :class:`.outcomes.Outcome` except the case.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    etkv.register_backend()
    utils = wheel.test_utils()
    return lambda task: _outcome(utils, Case(**task["case"]), task["passes"])


def _outcome(utils: Any, case: Case, passes: Any) -> dict[str, Any]:
    if case.segments != case.expected_segments:
        return _failed(f"{case.segments} delegates, the test expects {case.expected_segments}")
    for name, count in (case.expected_nodes or {}).items():
        if case.nodes.get(name, 0) != count:
            return _failed(f"{case.nodes.get(name, 0)} nodes {name}, the test expects {count}")
    try:
        outputs = _run(utils, case, passes)
    except EtkvError as error:
        kind = "refused" if error.status == Status.UNSUPPORTED else "failed"
        return {"kind": kind, "reason": first_line(error)}
    if not case.comparable:
        return {"kind": "not comparable", "reason": "the test compares nothing: its outputs are random"}
    expected = utils.load_tensors_from_bin(case.path / "expected_output.bin")
    equal, message = utils.compare_outputs(expected, outputs, rtol=case.rtol, atol=case.atol)
    return {
        "kind": "passed" if equal else "failed",
        "reason": "" if equal else " ".join(message.split()),
        "error": _error(expected, outputs, case),
    }


def _failed(reason: str) -> dict[str, Any]:
    return {"kind": "failed", "reason": reason}


def _run(utils: Any, case: Case, passes: Any) -> list[torch.Tensor]:
    inputs = utils.load_tensors_from_bin(case.path / "input.bin")
    with ExitStack() as open_until_the_end:
        session = None
        if case.kv_cache is not None:
            session = open_until_the_end.enter_context(etkv.DecodeSession(_cache_config(case.kv_cache)))
        program = etkv.load(case.path / "model.pte", session, passes=passes, warm_up=False)
        open_until_the_end.enter_context(program)
        return [_tensor(output) for output in program.execute(*inputs)]


def _cache_config(spec: str) -> etkv.CacheConfig:
    capacity, n_layers, n_kv_heads, head_dim, *dtype = spec.split(",")
    kv_format = _FORMATS[dtype[0]] if dtype else "f32"
    layers = [etkv.LayerConfig(int(n_kv_heads), int(head_dim))] * int(n_layers)
    return etkv.CacheConfig(layers, int(capacity), k_format=kv_format, v_format=kv_format)


def _tensor(value: Any) -> torch.Tensor:
    """Return an output in the form of the wheel's runner, in which a number is a tensor of rank 0."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _error(expected: list[torch.Tensor], outputs: list[torch.Tensor], case: Case) -> float | None:
    """Return the largest error as a share of the tolerances. The comparison fails above 1.

    None if the outputs cannot be compared: shapes differ, or a value is not finite.
    """
    largest = 0.0
    for left, right in zip(expected, outputs, strict=False):
        if left.shape != right.shape or left.numel() == 0:
            continue
        left, right = left.double(), right.double()
        allowed = case.atol + case.rtol * right.abs()
        difference = (left - right).abs()
        part = torch.where(left == right, 0.0, difference / allowed.clamp_min(1e-300))
        largest = max(largest, float(part.max())) if bool(part.isfinite().all()) else float("inf")
    return round(largest, 6) if largest < 1e30 else None


if __name__ == "__main__":
    worker.serve(prepare)
