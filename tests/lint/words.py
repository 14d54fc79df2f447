"""Refuses words that docs/glossary.md has retired, and unclear phrases, in all files that git tracks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXEMPT = {"CHANGELOG.md", "Cargo.lock", "docs/glossary.md", "requirements.txt", "tests/lint/words.py"}
"""Files that are not searched: lock files, and files that must name the words, such as the list of changes."""

LANE = r"(?<![A-Za-z])[Ll]anes?(?![a-z])"
OWN_MEANING = {LANE: ("crates/etkv-cpu/src/", "crates/etkv-cuda/src/kernels/")}
"""Patterns, and the folders in which their words have another meaning: a lane is an element of a vector, or a thread
of a warp."""

RETIRED = {
    LANE: "layer group",
    r"(?i)verdict": "verification result",
    r"(?i)abandon": "abort, roll back",
    r"(?i)\b(take|takes|taken|taking|took)[ _]back\b": "roll back",
    r"\b(cache|buffers?) (is|are|was|were) lost\b|\bself\.lost\b": "poisoned",
    r"\b(cache|program)`? broke\b": "poisoned",
    r"\bmax_step\b|MAX_STEP\b": "max_step_tokens",
    r"(?i)quantize_after": "quantized_kv_start",
    r"(?<![a-z])end_ids|\bkEndIds\b": "eos_token_ids",
    r"(?i)guess": "draft token, draft, feature predictor",
    r"Feature(Type|sView|Draft)|GivenFeatures|feature_(type|draft)|fed with features": "hidden states",
    r"(?i)\bplain decoding|\bplainly\b|common/plain\b": "reference decoding",
    r"\bChance\b|\b(by|to)[ _]chance\b(?!\W+of)|sampler\.chance": "rng",
    r"\bCosts\b|speculation/costs": "latency model",
    r"(?i)\bdeferred\b|[\"']put back ": "preempted",
    r"(?i)\b(is|are|or) no numbers?\b": "NaN, not finite",
    r"HeldPrefix|common/prefix\.": "prefix cache",
    r"\bstore::Rows\b|store/rows\b": "KV view",
    r"--max-new-tokens": "--max-tokens",
    r"(?<![A-Za-z0-9])_?(MOST|LEAST|FEWEST)(?![A-Za-z0-9])|\bk(Most|Least)[A-Z]": "MAX, MIN",
    r"\b(un)turned\b": "unrotated",
    r"etkv[_-]text|examples/text\b|\bTextStream\b": "tokenizer",
}
"""Patterns, and the words in use. Words that also have an ordinary meaning are refused in other forms only."""

PHRASES = {
    r"(?i)\b(nobody|whoever)\b|\b(any|every|some)body\b": "the caller, thread, file or owner by its name",
    r"(?i)\b(is|are|was|were) to be\b": "is, must be, expected",
    r"(?i)\b(has|have|had) not been(?=[^\w\s]|$)": "is rolled back",
    r"(?i)\b(step|forward) (has|had) been(?=[^\w\s]| when\b|$)": "commits",
    r"(?i)\bwhat (it|a thing) is made of\b": "what it wraps, its parts",
}
"""Patterns of phrases that slow a reader down, and the phrases in use."""


def main() -> int:
    """Prints the file and line of each retired word and phrase. Returns 1 if there is one, or 0."""
    patterns = [(re.compile(pattern, re.MULTILINE), word) for pattern, word in (RETIRED | PHRASES).items()]
    names = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout.split("\0")
    found = 0
    for name in names:
        path = Path(name)
        if not name or name in EXEMPT or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        # The file's name is line 0. Most patterns are nowhere in a file, so the whole file is searched first.
        text = f"{name}\n{text}"
        for pattern, word in patterns:
            if name.startswith(OWN_MEANING.get(pattern.pattern, "//")) or not pattern.search(text):
                continue
            for number, line in enumerate(text.splitlines()):
                for match in pattern.finditer(line):
                    print(f"{name}:{number}: `{match[0]}` is not used; say: {word}")
                    found += 1
    if found:
        print(f"{found} words to replace; docs/glossary.md has the words in use", file=sys.stderr)
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
