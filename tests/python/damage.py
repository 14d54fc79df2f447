"""Damaged copies of a program: the regions of a ``.pte``, and changes of some bytes.

A copy depends only on its number, and is the same on every machine. So a copy that crashes a process can be repeated.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

HEAD = struct.Struct("<8x4sIQQ")
"""The flatbuffer's own header, then the extended header: magic, length, bytes of tables, offset of the segments."""

REGIONS = ("header", "tables", "payload", "segments")
_SHARES = (15, 45, 30, 10)
_VALUES = (0, 1, 127, 128, 255)


@dataclass(frozen=True)
class Copy:
    """A damaged copy. ``changes`` has the offset and the new value of each changed byte. ``length`` counts bytes."""

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
    """Return the byte ranges of a program's regions: header, tables, the delegate's payload, and the rest."""
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
    """Return damaged copy ``number``, with bytes changed, bits flipped, or the end cut off."""
    rng = random.Random(number)
    (region,) = rng.choices(REGIONS, _SHARES)
    places = regions(image)[region]
    kind = rng.choices(("bytes", "bits", "cut"), (50, 40, 10))[0]
    if kind == "cut":
        return Copy(number, region, (), rng.choice(places))
    changes: dict[int, int] = {}
    # Copies with few changes pass the first checks more often.
    for _ in range(rng.choice((1, 1, 3) if kind == "bytes" else (1, 1, 2, 8))):
        place = rng.choice(places)
        if kind == "bytes":
            changes[place] = rng.choice((*_VALUES, rng.randrange(256)))
        else:
            changes[place] = changes.get(place, image[place]) ^ 1 << rng.randrange(8)
    return Copy(number, region, tuple(changes.items()), len(image))
