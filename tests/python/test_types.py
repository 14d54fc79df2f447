"""Type annotations for users: right uses pass `mypy --strict`, and wrong uses are errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import etkv

RIGHT = """
from collections.abc import Iterator

import numpy as np
import torch

import etkv


def answers(path: str, question: str) -> Iterator[str]:
    params = etkv.read_kv_cache_metadata(path)
    config = etkv.CacheConfig(params.layers, capacity=512, k_format="f32", v_format="f32")
    with etkv.DecodeSession(config) as session, etkv.load(path, session, logits="last") as program:
        tokenizer = etkv.Tokenizer.from_pretrained(path)
        messages = [{"role": "user", "content": question}]
        prompt: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        for response in etkv.stream_generate(program, tokenizer, prompt, max_tokens=8, eos_token_ids=[2]):
            yield response.text
        answer = etkv.generate_tokens(program, np.array(prompt), temperature=0.5, seed=None)
        ids: list[int] = list(answer)
        if answer.finish_reason == "stop":
            yield tokenizer.decode(ids[: answer.cached_tokens])
        yield from etkv.Chat(program, tokenizer, system="Be brief.").send_message(text, max_tokens=3)
        yield etkv.generate(program, tokenizer, "The capital of", top_k=3)


def steps(path: str, config: etkv.CacheConfig) -> tuple[int, float]:
    small = etkv.CacheConfig([etkv.LayerConfig(2, 64, window=8)], 16)
    with etkv.TreeSession(config) as session, etkv.load(path, session) as program:
        best = program.forward([1, 2], range(2))[-1].argmax()
        etkv.Tokenizer.from_pretrained(path).decode([best])
        row = int(program.forward([best], [2])[-1].argmax())
        tensor: torch.Tensor = program.forward(torch.tensor([1]), [2])
        session.propose([-1, 0])
        session.commit([0], sequence=0)
        session.clear(release=True)
        try:
            session.rewind(9)
        except etkv.EtkvError as error:
            row += error.status
        memory = etkv.estimate(small, 3)
        return row + sum(layer.k_used for layer in memory.layers), float(tensor[0].max())
"""

WRONG = """
import etkv


def wrong(program: etkv.Program, session: etkv.DecodeSession, tokenizer: etkv.Tokenizer) -> None:
    etkv.generate_tokens(program, "Hello")  # arg-type
    etkv.stream_generate(program, tokenizer, "Hello", max_new_tokens=3)  # call-arg
    etkv.generate(program, tokenizer, "Hello", temperature="high")  # arg-type
    etkv.load("model.pte", session, logits="some")  # arg-type
    etkv.CacheConfig([etkv.LayerConfig(1, 8)], 16, "f32")  # call-arg
    etkv.LayerConfig(1, 8, 8, 4)  # call-arg
    session.config.capacity = 3  # misc
    session.propose([-1])  # attr-defined
    session.clear(True)  # call-arg
    tokenizer.beside("model.pte")  # attr-defined
    tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).append(3)  # attr-defined
    if etkv.generate_tokens(program, [1]).finish_reason == "end":  # comparison-overlap
        print(etkv.estimate(session.config, "3"))  # arg-type
    program.forward([1.5], [0])  # list-item
"""

ROOT = Path(__file__).parents[2]


def checked(tmp_path: Path, program: str) -> tuple[set[tuple[int, str]], str]:
    """Return the line and the code of each of mypy's errors in ``program``, and mypy's output.

    The config is that of `make lint`, which is strict, so that mypy reads torch from its cache. It reads etkv's
    sources. That users get the types is a test of its own.
    """
    file = tmp_path / "program.py"
    file.write_text(program)
    words = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    found = re.findall(r"program\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    assert (done.returncode, done.stderr) == (1 if found else 0, ""), done.stdout + done.stderr
    assert done.stdout.count(": error: ") == len(found), done.stdout
    return {(int(line), code) for line, code in found}, done.stdout


def test_right_uses_pass(tmp_path):
    assert checked(tmp_path, RIGHT)[0] == set(), checked(tmp_path, RIGHT)[1]


def test_wrong_uses_are_errors(tmp_path):
    marks = enumerate(WRONG.splitlines(), 1)
    expected = {(number, line.rpartition("# ")[2]) for number, line in marks if "  # " in line}
    found, said = checked(tmp_path, WRONG)
    assert found == expected, said


def test_the_package_says_that_it_has_types():
    assert Path(etkv.__file__).with_name("py.typed").is_file()
