"""Refuses a ``tokenizer.json`` whose steps together lengthen a text too much.

The runners have the same rule in ``examples/tokenizer/src/pipeline.rs``. A step that writes two characters for each
character doubles a text, and forty such steps exhaust the memory of a process. So the growth is checked before the file
is used.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from etkv.errors import EtkvError

MAX = 1024.0
"""Maximum factor by which a part of a tokenizer may lengthen a text. Published tokenizers stay below 200."""

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

_GROWTH = {"ByteLevel": 2.0, "BertNormalizer": 3.0, "Lowercase": 3.0}
"""Kinds of steps that write more bytes than they read with any settings."""

_STEPS = ("normalizers", "pretokenizers", "processors", "decoders")
"""The fields in which a sequence lists its steps."""


def checked(path: Path) -> Any:
    """Return the parsed ``tokenizer.json``. Return None if it is not JSON: the code that loads the tokenizer later
    raises the error.

    Raises :class:`EtkvError` for a tokenizer that lengthens texts too much.
    """
    try:
        contents = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    for part in _PARTS:
        growth = _growth(contents.get(part) if isinstance(contents, dict) else None)
        if growth > MAX:
            raise EtkvError(
                f"the tokenizer {path} cannot be used: its {part} makes a text up to {growth:.3g} times as long, the "
                f"maximum is {MAX:.0f}"
            )
    return contents


def _growth(step: Any) -> float:
    """Return the maximum number of bytes that ``step`` writes for each byte that it reads."""
    if not isinstance(step, dict):
        return 1.0
    growth = _own_growth(step)
    for steps in map(step.get, _STEPS):
        for inner in steps if isinstance(steps, list) else ():
            growth = min(growth * _growth(inner), 1e300)
    return growth


def _own_growth(step: dict[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        written, pattern = _bytes(step.get("content")), step.get("pattern")
        exact = _bytes(pattern.get("String")) if isinstance(pattern, dict) and "String" in pattern else 0
        # A regular expression may match one character, or the empty text before each character.
        return max(1.0, written / exact) if exact else 1.0 + written
    if kind == "Prepend":
        return 1.0 + _bytes(step.get("prepend"))
    if kind == "Metaspace":
        return 1.0 + _bytes(step.get("replacement"))
    if kind in ("WordPiece", "BPEDecoder", "CTC"):
        # These steps write a space, or the text of a special token, between tokens.
        return 1.0 + max(_bytes(step.get(name)) for name in ("prefix", "suffix", "pad_token", "word_delimiter_token"))
    if kind == "Precompiled":
        return _longest(step.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        single = step.get("single")
        pieces = [piece for piece in single if isinstance(piece, dict)] if isinstance(single, list) else []
        return float(max(1, sum("Sequence" in piece for piece in pieces)))
    return _GROWTH.get(kind, 1.0) if isinstance(kind, str) else 1.0


def _bytes(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _longest(charsmap: Any) -> float:
    """Return the bytes of the longest replacement in a character map. The replacements are stored after the map's
    trie.
    """
    try:
        data = base64.b64decode(charsmap)
    except (TypeError, ValueError):
        return 1.0
    written = data[4 + int.from_bytes(data[:4], "little") :]
    return float(max(map(len, written.split(b"\0")), default=1) or 1)
