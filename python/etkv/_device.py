"""Answers whose tokens the device chooses: ``etkv_generation`` of ``etkv.h``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeAlias

from etkv._capi import ask, call, ffi, lib, struct
from etkv._sampling import Sampling
from etkv.cache import Cache
from etkv.errors import KindError, UnsupportedError

End: TypeAlias = Literal["stop", "length", "capacity"]

_ENDS: dict[int, End | None] = {0: None, 1: "stop", 2: "length", 3: "capacity"}


class DeviceAnswer:
    """The answer of an MLX program to one prompt."""

    def __init__(self, raw: Any) -> None:
        self._generation = ffi.gc(raw, lib().etkv_generation_free)
        self._token, self._end, self._n = ffi.new("int64_t*"), ffi.new("etkv_end*"), ffi.new("size_t*")

    @classmethod
    def make(
        cls,
        session: Cache,
        sequence: int,
        prompt: Sequence[int],
        sampling: Sampling,
        stop: Collection[int],
        max_tokens: int,
    ) -> DeviceAnswer | None:
        """Prepare the answer. Return None for a program whose tokens the host must choose."""
        tokens, stops, raw = ffi.new("int64_t[]", list(prompt)), ffi.new("int64_t[]", list(stop)), sampling.raw()
        c_prompt = struct("etkv_prompt", tokens=tokens, n_tokens=len(tokens), sequence=sequence)
        options = struct("etkv_generation_options", sampling=raw, stop=stops, n_stop=len(stops), max_tokens=max_tokens)
        try:
            return cls(ask("etkv_generation_new", "etkv_generation*", session._raw(), c_prompt, 1, options))
        except (KindError, UnsupportedError):
            # The host chooses the tokens of a CPU program, and of a program with extra inputs.
            return None

    def read_prompt(self) -> int:
        """Run the next prefill chunk. Return how many tokens of the prompt have not run."""
        return ask("etkv_generation_read_prompts", "size_t", self._generation)

    def next(self) -> tuple[int, End | None] | None:
        """Return the next token, and why the answer ends if it is the last. Return None after the last token."""
        call("etkv_generation_next", self._generation, self._token, self._end, 1, self._n)
        return (int(self._token[0]), _ENDS[self._end[0]]) if self._n[0] else None

    def close(self) -> None:
        """Roll back the step that async decode has enqueued, and release the program. Closing twice does nothing."""
        ffi.release(self._generation)
