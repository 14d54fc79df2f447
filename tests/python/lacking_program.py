"""A program with an operation that this build lacks, as if from a newer schema."""

from __future__ import annotations

from pathlib import Path

import etkv

TANH, TO_COME = 29, 250
"""The number of an operation in the schema, and a number that no operation has yet."""

NAME = f"operation {TO_COME}"


def write(path: Path) -> Path:
    """Write a program that has the operation twice."""
    import torch

    import mlx_programs

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.tanh(torch.tanh(x))

    program = mlx_programs.write(Model(), (torch.ones(3),), path).read_bytes()
    places = [place for place, byte in enumerate(program) if byte == TANH and _is_operation(program, place, path)]
    assert len(places) == 2
    path.write_bytes(_changed(program, places))
    return path


def _changed(program: bytes, places: list[int]) -> bytes:
    changed = bytearray(program)
    for place in places:
        changed[place] = TO_COME
    return bytes(changed)


def _is_operation(program: bytes, place: int, path: Path) -> bool:
    """Return whether the byte at offset ``place`` is the number of an operation."""
    path.write_bytes(_changed(program, [place]))
    try:
        return etkv.describe_program(path)["missing"] == [{"operation": NAME, "count": 1}]
    except etkv.EtkvError:
        return False
