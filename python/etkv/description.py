"""Describes programs, with the library's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etkv._capi import ask_text, ffi
from etkv.errors import EtkvError, StatusError


def describe_program(program: str | Path | bytes, index: int = 0) -> dict[str, Any]:
    """Return the inputs, outputs, operations and constants of an MLX delegate of the ``.pte`` at ``program``.

    ``index`` counts the MLX delegates from 0. ``program`` may also be the payload of a delegate. ``docs/reports.md``
    lists the fields. Reads no weights.

    Raises :class:`EtkvError` if the program cannot be read or is damaged, or has no such delegate.
    """
    if isinstance(program, bytes):
        return describe_payload(program)
    from etkv.pte import PteFile

    path = Path(program)
    payload = PteFile(path).mlx_payload(index)
    try:
        return describe_payload(payload)
    except StatusError as error:
        raise EtkvError(f"{path} is damaged: {error}") from error


def describe_payload(payload: bytes) -> dict[str, Any]:
    """Return the description of a delegate's payload. Raises :class:`StatusError` if the payload is refused."""
    text = ask_text("etkv_program_describe", ffi.from_buffer("uint8_t[]", payload), len(payload))
    description: dict[str, Any] = json.loads(text)
    return description


def dtype_and_shape(tensor: dict[str, Any]) -> str:
    """Return an argument or a constant as text, such as ``float32[1, 2..64]``."""
    dtype = str(tensor["dtype"])
    if tensor["shape"] is None:
        return dtype
    return f"{dtype}[{', '.join(map(_dim, tensor['shape']))}]"


def _dim(dim: int | dict[str, int | None]) -> str:
    if isinstance(dim, int):
        return str(dim)
    return f"{dim['least']}..{'' if dim['most'] is None else dim['most']}"
