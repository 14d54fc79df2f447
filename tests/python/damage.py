"""Damaged copies of a program: which bytes of a ``.pte`` belong to what, and what becomes of some of them.

A copy is made from a number and nothing else: the same on every machine, so that one that ends a process can be made
again.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

HEAD = struct.Struct("<8x4sIQQ")
"""The flatbuffer's own head, then the extended header: its mark, its length, bytes of tables, where segments begin."""

REGIONS = ("header", "tables", "payload", "segments")
_SHARES = (15, 45, 30, 10)
_VALUES = (0, 1, 127, 128, 255)


@dataclass(frozen=True)
class Copy:
    """One damaged copy. ``changes`` has the new value of each byte that changed, ``length`` the bytes that are left."""

    number: int
    region: str
    changes: tuple[tuple[int, int], ...]
    length: int

    def of(self, image: bytes) -> bytes:
        damaged = bytearray(image)
        for place, value in self.changes:
            damaged[place] = value
        return bytes(damaged[: self.length])

    def __str__(self) -> str:
        what = ", ".join(f"byte {place} is {value}" for place, value in self.changes)
        return f"copy {self.number} ({self.region}): {what or f'the first {self.length} bytes'}"


def regions(image: bytes) -> dict[str, range]:
    """Where the parts of a program lie: the header, the tables, the delegate's payload, and everything else."""
    mark, length, n_tables, segments = HEAD.unpack_from(image)
    assert mark == b"eh00"
    start = image.index(b"MLX0") - 4
    (n_payload,) = struct.unpack_from("<Q", image, start + 8)
    assert start >= segments
    return {
        "header": range(8 + length),
        "tables": range(8 + length, n_tables),
        "payload": range(start, start + n_payload),
        "segments": range(segments, len(image)),
    }


def copy(image: bytes, number: int) -> Copy:
    """The damaged copy of this number: bytes changed, bits flipped, or the end cut off."""
    rng = random.Random(number)
    (region,) = rng.choices(REGIONS, _SHARES)
    places = regions(image)[region]
    kind = rng.choices(("bytes", "bits", "cut"), (50, 40, 10))[0]
    if kind == "cut":
        return Copy(number, region, (), rng.choice(places))
    changes: dict[int, int] = {}
    # Of few changes more get past the first checks.
    for _ in range(rng.choice((1, 1, 3) if kind == "bytes" else (1, 1, 2, 8))):
        place = rng.choice(places)
        if kind == "bytes":
            changes[place] = rng.choice((*_VALUES, rng.randrange(256)))
        else:
            changes[place] = changes.get(place, image[place]) ^ 1 << rng.randrange(8)
    return Copy(number, region, tuple(changes.items()), len(image))
