"""The choice of tokens: ``etkv_sampling`` of ``etkv.h``."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etkv._capi import INT32_MAX, call, ffi, struct
from etkv.errors import EtkvError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


CONTEXT = 64
"""The repetition penalty counts this number of tokens at the end of prompt and answer."""


@dataclass(frozen=True)
class Sampling:
    """Options of sampling; :func:`etkv.generate_tokens` documents the fields."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        # A NaN fails every comparison, so each of these conditions refuses NaN.
        if not self.temperature >= 0:
            raise EtkvError(f"temperature is {self.temperature}, the minimum is 0")
        if not 0 <= self.top_k <= INT32_MAX:
            raise EtkvError(f"top_k is {self.top_k}, the minimum is 0")
        if not 0 < self.top_p <= 1:
            raise EtkvError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise EtkvError(f"min_p is {self.min_p}, expected 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise EtkvError(f"repetition_penalty is {self.repetition_penalty}, expected more than 0")
        if self.seed is not None and self.seed < 0:
            raise EtkvError(f"seed is {self.seed}, the minimum is 0")

    def raw(self) -> Any:
        """Return an ``etkv_sampling*``. Its pointers are valid as long as this object lives."""
        biases = ffi.new("etkv_logit_bias[]", len(self.logit_bias))
        for place, (token, bias) in zip(biases, self.logit_bias.items(), strict=True):
            place.token, place.bias = token, bias
        object.__setattr__(self, "_biases", biases)
        return struct(
            "etkv_sampling",
            temperature=self.temperature,
            top_k=self.top_k,
            # In the C interface, 0 stands for the default.
            top_p=max(self.top_p, 1e-30),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            repetition_context=CONTEXT,
            seed=secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            logit_bias=biases,
            n_logit_bias=len(biases),
        )


def choose(raw: Any, row: npt.NDArray[np.floating[Any]], recent: Collection[int], n: int) -> int:
    """Choose token number ``n`` of the answer from a row of logits. ``recent`` are the last CONTEXT tokens."""
    import numpy as np

    logits = np.ascontiguousarray(row, dtype=np.float32)
    token = ffi.new("int64_t*")
    ids = ffi.new("int64_t[]", list(recent))
    call(
        "etkv_sampling_choose",
        raw,
        ffi.from_buffer("float[]", logits),
        logits.size,
        ids,
        len(ids),
        0,
        n,
        token,
    )
    return int(token[0])
