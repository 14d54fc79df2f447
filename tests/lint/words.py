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


def git(command: str, *arguments: str) -> list[str]:
    """Returns the files that a command of Git prints."""
    done = subprocess.run(["git", command, "-z", *arguments], capture_output=True, text=True)
    # `git grep` ends with 1 if no file has such a line.
    if done.returncode > 1 or done.stderr:
        sys.exit(f"git {command}: {done.stderr.strip() or done.returncode}")
    return [name for name in done.stdout.split("\0") if name]


def main() -> int:
    """Prints the file and line of each retired word and phrase. Returns 1 if there is one, or 0."""
    patterns = {pattern: (re.compile(pattern), word) for pattern, word in (RETIRED | PHRASES).items()}
    names = [name for name in git("ls-files") if name not in EXEMPT]
    texts = {name: name for name in names if any(pattern.search(name) for pattern, _ in patterns.values())}
    # Git finds the files with such lines in a fortieth of the time.
    for name in git("grep", "-PIl", *(word for pattern in patterns for word in ("-e", pattern))):
        if name not in EXEMPT:
            texts[name] = f"{name}\n{Path(name).read_text(encoding='utf-8')}"
    found = 0
    for name, text in texts.items():
        for pattern, (compiled, word) in patterns.items():
            if name.startswith(OWN_MEANING.get(pattern, "//")):
                continue
            # The file's name is line 0.
            for number, line in enumerate(text.splitlines()):
                for match in compiled.finditer(line):
                    print(f"{name}:{number}: `{match[0]}` is not used; say: {word}")
                    found += 1
    if found:
        print(f"{found} words to replace; docs/glossary.md has the words in use", file=sys.stderr)
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
