"""Measures the cost and gain of speculative decoding: forwards of several tokens, and drafts on questions.

The first table shows how the cost of a forward depends on its number of tokens. The forwards return all rows of
logits, and the cost is relative to one token. The second table shows ``etkv_speculative`` on a few questions with
every draft, in turns, each in a separate process. Drafts are none, n-grams of the text, the model's first layers,
which read tokens, and the model's last layers, which read hidden states. Missing programs are exported. Figures are
sums over the questions of a kind. Speed is relative to the answers without a draft in the same round; the table has
the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / "build" / "bin"
MODEL = ROOT / "build" / "models" / "smollm2-135m" / "model.pte"

TOKENS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
CONTEXT = 96
"""The number of ids of a measurement: a multiple of every number in ``TOKENS``."""

QUESTIONS = {
    "a question": ["Why is the sky blue?", "What is a library?", "Who wrote Hamlet?"],
    "a list": ["List the numbers from one to twenty.", "Name the days of the week, and then name them once more."],
    "a copy": [
        "Copy this: 1, 2, 3, 4, 5, 6, 7, 8",
        "Correct the spelling, and change nothing else: The fox jumps over the lazi dog. The dog sleeps. The fox "
        "jumps over the dog again.",
    ],
}

LAYERS = 30
"""The number of layers of the model."""
SHAPES = {"auto": [], "2 x 1": ["--depth", "2", "--width", "1"], "2 x 4": ["--depth", "2", "--width", "4"]}


@dataclass(frozen=True)
class Draft:
    """A draft, its program and the shape of its trees."""

    name: str
    model: Path
    options: list[str]


def export(name: str, *options: object) -> Path:
    """Exports the model with these options. Returns the program."""
    from etkv.models import path

    output = MODEL.parent.with_name(f"{MODEL.parent.name}-{name}") / "model.pte"
    command = [sys.executable, "-m", "etkv.export", "--if-changed", "--model", path("smollm2-135m")]
    subprocess.run([str(word) for word in (*command, "--output", output, *options)], check=True)
    return output


def make_drafts(first: list[int], last: list[int]) -> list[Draft]:
    """Returns the drafts: none, n-grams of the text, and programs of the given numbers of first and last layers."""
    drafts = [Draft("none", MODEL, ["--depth", "0"]), Draft("ngram, auto", MODEL, [])]
    drafts.append(Draft("ngram, 4 x 1", MODEL, ["--depth", "4", "--width", "1"]))
    programs = [(f"first {n}", MODEL, export(f"first-{n}", "--layers", n)) for n in first]
    for n in last:
        tapped = export(f"tapped-{LAYERS - n - 1}", "--tap-layers", LAYERS - n - 1)
        programs.append((f"last {n}", tapped, export(f"last-{n}", "--draft", n)))
    for name, model, path in programs:
        drafts += [Draft(f"{name}, {shape}", model, ["--draft", str(path), *how]) for shape, how in SHAPES.items()]
    return drafts


def forward_seconds(model: Path, ids_file: Path, n_tokens: int) -> float:
    """Returns the mean seconds of a forward of ``n_tokens`` tokens with all rows of logits, over ``CONTEXT`` ids."""
    command = [BIN / "etkv_forward", "--model", model, "--ids-file", ids_file, "--rows", "all"]
    command += ["--chunk", str(n_tokens), "--repeat", "2", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # The first run reads the weights from the disk.
    return json.loads(done.stdout.splitlines()[-1])["runs"][-1]["prefill_seconds"] / (CONTEXT / n_tokens)


def print_costs(model: Path, rounds: int) -> None:
    """Prints the cost of a forward by its number of tokens."""
    ids_file = ROOT / "build" / "bench-ids.txt"
    ids_file.write_text(" ".join(str(1 + 7919 * i % 40000) for i in range(CONTEXT)))
    times: dict[int, list[float]] = {n_tokens: [] for n_tokens in TOKENS}
    for number in range(rounds):
        for n_tokens in TOKENS:
            print(f"  round {number + 1} of {rounds}: {n_tokens} tokens ", file=sys.stderr, end="\r", flush=True)
            times[n_tokens].append(forward_seconds(model, ids_file, n_tokens))
    one = statistics.median(times[1])
    print(f"a forward of n tokens, as a multiple of one token ({1000 * one:.1f} ms); rounds in turns: {rounds}")
    print("       n" + "".join(f"{n_tokens:7}" for n_tokens in TOKENS))
    print("    cost" + "".join(f"{statistics.median(times[n]) / one:7.2f}" for n in TOKENS))
    print(flush=True)


@dataclass
class Took:
    """Sums over some answers."""

    ids: int = 0
    steps: int = 0
    seconds: float = 0.0
    drafting: float = 0.0


def answer(draft: Draft, questions: list[str], most: int) -> tuple[Took, str]:
    """Runs the questions with one draft. Returns the figures and the answers."""
    command = [BIN / "etkv_speculative", "--model", draft.model, "--ids", "--max-tokens", str(most), *draft.options]
    for question in questions:
        command += ["--prompt", question]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    took = Took()
    found = re.findall(r"^(\d+) tokens? after the first in (\d+) steps?: .* ([\d.]+)/s, (\d+)%", done.stderr, re.M)
    assert len(found) == len(questions), done.stderr
    for ids, steps, rate, share in found:
        took.ids += int(ids)
        took.steps += int(steps)
        took.seconds += int(ids) / float(rate)
        took.drafting += int(ids) / float(rate) * int(share) / 100
    return took, done.stdout


def print_drafts(drafts: list[Draft], most: int, rounds: int) -> None:
    """Prints the gain of every draft, by kind of question."""
    print(f"at most {most} tokens an answer; rounds in turns: {rounds}")
    print(f"  {'':12}{'draft':24}{'tokens a step':>14}{'forwards a token':>18}{'drafting':>10}{'speed':>8}")
    for kind, questions in QUESTIONS.items():
        results: dict[str, list[Took]] = {draft.name: [] for draft in drafts}
        said = set()
        for number in range(rounds):
            for draft in drafts:
                progress = f"  round {number + 1} of {rounds}: {kind}, {draft.name}"
                print(f"{progress:60}", file=sys.stderr, end="\r", flush=True)
                took, text = answer(draft, questions, most)
                results[draft.name].append(took)
                said.add(text)
        for draft in drafts:
            all_rounds = results[draft.name]
            last = all_rounds[-1]
            pairs = zip(results[drafts[0].name], all_rounds, strict=True)
            speed = statistics.median((plain.seconds / plain.ids) / (one.seconds / one.ids) for plain, one in pairs)
            share = statistics.median(one.drafting / one.seconds for one in all_rounds)
            print(f"  {kind:12}{draft.name:24}{last.ids / last.steps:14.2f}{last.steps / last.ids:18.2f}", end="")
            print(f"{100 * share:9.0f}%{speed:8.2f}", flush=True)
            kind = ""
        if len(said) > 1:
            raise SystemExit("the answers differ between drafts")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, nargs="*", default=[10], metavar="N", help="first layers (10)")
    parser.add_argument(
        "--last", type=int, nargs="*", default=[2], metavar="N", help="last layers, which read hidden states (2)"
    )
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="maximum tokens of an answer (48)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each (3)")
    arguments = parser.parse_args()
    drafts = make_drafts(arguments.first, arguments.last)
    print_costs(MODEL, arguments.rounds)
    print_drafts(drafts, arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
