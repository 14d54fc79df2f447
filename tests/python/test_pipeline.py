"""A hostile ``tokenizer.json`` gives an error or ids within limits of time and memory, in Python and in the runners."""

from __future__ import annotations

import base64
import json
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import reference
import runner_tokenizer
from etkv import EtkvError, Tokenizer
from reference import EVERYTHING

REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
N = 1000 if EVERYTHING else 40
"""Generated tokenizers."""

PLAIN = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
}


def sequence(name: str, steps: list) -> dict:
    return {"type": "Sequence", name: steps}


def template(n: int) -> dict:
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * n
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {}}


GROWING = {
    "normalizer": {"normalizer": sequence("normalizers", [REPLACE] * 60)},
    "nested": {"normalizer": sequence("normalizers", [sequence("normalizers", [REPLACE] * 9)] * 9)},
    "regex": {
        "normalizer": sequence(
            "normalizers", [{"type": "Replace", "pattern": {"Regex": "x*"}, "content": "yyyyyyyy"}] * 9
        )
    },
    "prepend": {"normalizer": sequence("normalizers", [{"type": "Prepend", "prepend": "a" * 5000}])},
    "charsmap": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(b"\x04\0\0\0" + b"\0" * 4 + b"a" * 5000 + b"\0").decode(),
        }
    },
    "decoder": {"decoder": sequence("decoders", [REPLACE] * 60)},
    "template": {"post_processor": sequence("processors", [template(8)] * 30)},
}


def written(folder, changes: dict):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(PLAIN | changes))
    return folder


@pytest.mark.parametrize("name", GROWING)
def test_steps_that_multiply_are_refused(tmp_path, name):
    folder = written(tmp_path / "model", GROWING[name])
    with pytest.raises(EtkvError, match="times as long, the maximum is 1024") as told:
        Tokenizer.from_pretrained(folder)
    with pytest.raises(EtkvError, match="times as long"):
        Tokenizer.from_file(folder / "tokenizer.json")
    runner = runner_tokenizer.RunnerTokenizer()
    with pytest.raises(EtkvError) as told_there:
        runner.open(folder)
    runner.close()
    part = next(iter(GROWING[name]))
    for said in (told, told_there):
        assert f"its {part} makes a text up to" in str(said.value)


def test_padding_does_not_count(tmp_path):
    padding = {
        "strategy": {"Fixed": 10**11},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    assert Tokenizer.from_pretrained(written(tmp_path / "model", {"padding": padding})).encode("a") == [0]


def hostile(numbers: random.Random) -> dict:
    """Return random changes of a tokenizer: steps of any kind with any settings, some of wrong types."""

    def value(depth: int = 0):
        kind = numbers.randrange(9 if depth < 3 else 6)
        if kind < 2:
            return numbers.choice(["", "a", "▁", "(a+)+b", "\\", "[", "a" * 300, "\u0000", "Ġ", "<unk>"])
        if kind < 4:
            return numbers.choice([0, -1, 1, 3, 2**31, 2**63, 1e308, 10**11])
        if kind < 6:
            return numbers.choice([None, True, False])
        if kind == 6:
            return [value(depth + 1) for _ in range(numbers.randrange(4))]
        return {numbers.choice(["String", "Regex", "id", "type"]): value(depth + 1)}

    steps = {
        "normalizer": ("normalizers", ["Replace", "Prepend", "NFKD", "Lowercase", "Strip", "Precompiled", "ByteLevel"]),
        "pre_tokenizer": ("pretokenizers", ["ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "FixedLength"]),
        "post_processor": ("processors", ["ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"]),
        "decoder": ("decoders", ["Replace", "ByteFallback", "WordPiece", "Strip", "CTC", "Metaspace", "BPEDecoder"]),
    }
    names = ["pattern", "content", "prepend", "replacement", "behavior", "invert", "single", "pair", "special_tokens"]
    names += ["prefix", "suffix", "cleanup", "start", "stop", "precompiled_charsmap", "sep", "cls", "prepend_scheme"]

    def step(kinds: list[str]) -> dict:
        made = {"type": numbers.choice(kinds)}
        usual = {
            "pattern": {"String": "a"},
            "content": "bb",
            "behavior": "Isolated",
            "prepend": "_",
            "start": 1,
            "stop": 0,
        }
        usual |= {
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
            "replacement": "▁",
            "cleanup": True,
        }
        made |= usual | {"prepend_scheme": "always", "split": True, "prefix": "##", "suffix": "</w>", "length": 1}
        for name in numbers.sample(names, numbers.randrange(3)):
            made[name] = value()
        return made

    changes: dict = {}
    for part, (name, kinds) in steps.items():
        if numbers.random() < 0.6:
            inner = [step(kinds) for _ in range(numbers.choice([1, 2, 3, 40]))]
            changes[part] = sequence(name, inner)
    if numbers.random() < 0.3:
        changes["model"] = numbers.choice(
            [
                {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []},
                {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]], "dropout": value()},
                {"type": "Unigram", "vocab": [["a", value()], ["b", -1.0]], "unk_id": value()},
                {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "<none>", "max_input_chars_per_word": value()},
                {"type": value(), "vocab": value()},
            ]
        )
    if numbers.random() < 0.3:
        token = {"id": numbers.choice([0, 7, 2**32 - 1]), "content": numbers.choice(["", "a", "<s>", "\ufffd"])}
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        changes["added_tokens"] = [token | {flag: numbers.random() < 0.5 for flag in flags}]
    return changes


_READ = """
import json, resource, sys, time
import etkv
import tokenizers  # Its first import takes a second.
from etkv import Tokenizer
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
for folder in sys.stdin.read().split("\\n"):
    began = time.process_time()
    try:
        tokenizer = Tokenizer.from_pretrained(folder)
        ids = tokenizer.encode("aab a " * 50)
        tokenizer.decode(ids)
        stream = etkv.StreamingDetokenizer(tokenizer)
        for token in ids:
            stream.add_token(token)
        stream.finalize()
    except etkv.EtkvError:
        pass
    assert time.process_time() - began < 2, folder
    print(folder, flush=True)
"""


@pytest.mark.timeout(1800)
def test_hostile_tokenizers_end_in_an_error_or_in_ids(tmp_path):
    numbers = random.Random(7)
    folders = [str(written(tmp_path / str(n), hostile(numbers))) for n in range(N)]
    # The limit includes the memory that Python has already mapped.
    words = [sys.executable, "-c", _READ, 8 << 30]
    done = reference.run(words, stdin=None, input="\n".join(folders), timeout=1500)
    n_read = len(done.stdout.split())
    assert (done.returncode, n_read) == (0, N), done.stderr[-2000:] + file_of(tmp_path / str(n_read))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (2, 2))

    asked = f"encode 1 {(b'aab a ' * 50).hex()}\ndecode 0 0 1 0\n"
    for folder in folders:
        given = f"open {folder.encode().hex()}\n{asked}"
        ran = subprocess.run(
            [runner_tokenizer.TOOL], input=given, text=True, capture_output=True, preexec_fn=limited, check=False
        )
        assert ran.returncode == 0, f"{ran} of {file_of(folder)}"
        assert len(ran.stdout.splitlines()) == 3


def file_of(folder: Path | str) -> str:
    return (Path(folder) / "tokenizer.json").read_text()
