"""Runs contestants in turns, each round in a separate process, and computes medians and ratios of their figures."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Figures = dict[str, Any]
"""Figures of one round by name: numbers, lists of numbers, and ids."""

Option = TypeVar("Option")

PEER = Path(__file__).with_name("peer_mlx_lm.py")


class NotRunError(Exception):
    """A contestant did not run. The message has the reason in one line."""


def run_process(
    command: list[str], environment: Mapping[str, str], limit: float, *, messages: bool = False
) -> list[str]:
    """Runs a command to its end. Returns the lines of its standard output, and on request also those of standard
    error.

    Raises :class:`NotRunError` if it cannot start, fails, or takes longer than ``limit`` seconds.
    """
    name = Path(command[0]).name
    errors = subprocess.STDOUT if messages else subprocess.PIPE
    try:
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment), timeout=limit
        )
    except OSError as error:
        raise NotRunError(f"{name}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise NotRunError(f"took longer than {limit:.0f} s") from error
    if ended.returncode < 0:
        raise NotRunError(f"{signal.Signals(-ended.returncode).name} ended {name}")
    if ended.returncode > 0:
        said = ((ended.stdout if messages else ended.stderr) or "").strip().splitlines()
        raise NotRunError(said[-1] if said else f"{name} ended with status {ended.returncode}")
    return ended.stdout.splitlines()


def json_lines(lines: Iterable[str]) -> list[Figures]:
    """Returns the lines of an output that are JSON. Raises :class:`NotRunError` if there is none."""
    found = [json.loads(line) for line in lines if line.startswith("{")]
    if not found:
        raise NotRunError("it printed no figures")
    return found


def number(figures: Figures, metric: str) -> float | None:
    """Returns a figure as one number: the median of a list; None if there is none."""
    value = figures.get(metric)
    if isinstance(value, list):
        return statistics.median(value) if value else None
    return None if value is None else float(value)


@dataclass(frozen=True)
class Ratio:
    """How many times better one contestant is than another: the ratio of medians, and its range over the rounds."""

    value: float
    least: float
    most: float


@dataclass
class Results:
    """The rounds of several contestants on one case."""

    rounds: dict[str, list[Figures]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    def values(self, contestant: str, metric: str) -> list[float]:
        """Returns the figure of each round; an empty list if the contestant did not run or does not report it."""
        found = (number(figures, metric) for figures in self.rounds.get(contestant, []))
        return [value for value in found if value is not None]

    def median(self, contestant: str, metric: str) -> float | None:
        """Returns the median over the rounds; None if there is none."""
        values = self.values(contestant, metric)
        return statistics.median(values) if values else None

    def ratio(self, ours: str, theirs: str, metric: str, *, more_is_better: bool) -> Ratio | None:
        """Returns how many times better ``ours`` is by this figure; None if either is missing.

        Contestants run in turns, so the rounds of both are compared pairwise.
        """
        a, b = self.values(ours, metric), self.values(theirs, metric)
        if not more_is_better:
            a, b = b, a
        if not a or not b or statistics.median(b) <= 0.0:
            return None
        pairs = [one / other for one, other in zip(a, b, strict=False) if other > 0.0]
        return Ratio(statistics.median(a) / statistics.median(b), min(pairs), max(pairs))


@dataclass(frozen=True)
class Model:
    """A program, and the folder with the same weights for mlx-lm."""

    name: str
    program: Path
    weights: Path | None = None
    trained: bool = True
    """Whether the weights are trained. Without training, the model's texts are meaningless."""

    @property
    def config(self) -> Figures:
        """The settings in config.json of the weights; empty without them."""
        file = self.weights / "config.json" if self.weights else Path()
        return json.loads(file.read_text()) if file.is_file() else {}

    @property
    def n_ids(self) -> int:
        """The upper bound of the ids of prompts, exclusive."""
        return min(int(self.config.get("vocab_size", 200)), 40000)

    @property
    def head_dim(self) -> int:
        config = self.config
        heads = config.get("num_attention_heads", 1)
        return int(config.get("head_dim") or config.get("hidden_size", 64) // heads)

    def prompt(self, n_tokens: int) -> list[int]:
        """Returns the ids of a prompt, the same in every run."""
        return [1 + 7919 * i % (self.n_ids - 1) for i in range(n_tokens)]


@dataclass
class Bench:
    """One run of the benchmark: what it compares, where, and how long."""

    models: list[Model]
    folders: list[Path]
    output: Path
    environment: dict[str, str]
    device: str = "cpu"
    rounds: int = 3
    quick: bool = False
    limit: float = 1800.0
    contexts: list[int] = field(default_factory=list)
    samples: list[Figures] = field(default_factory=list)
    topic: str = ""

    def choose(self, *, quick: Option, cpu: Option, gpu: Option) -> Option:
        """Returns the size of a measurement: for ``--quick``, on a CPU, or on a GPU."""
        return quick if self.quick else gpu if self.device == "gpu" else cpu

    def tool(self, name: str, *options: object) -> list[Figures]:
        """Runs one of etkv's executables. Returns its JSON output, one object per line."""
        return json_lines(run_process(self.command(name, *options), self.environment, self.limit))

    def output_of_tool(self, name: str, *options: object) -> str:
        """Runs one of etkv's runners. Returns its complete output."""
        return "\n".join(run_process(self.command(name, *options), self.environment, self.limit, messages=True))

    def command(self, name: str, *options: object) -> list[str]:
        """Returns the command line of one of etkv's executables, which must be in one of the folders."""
        for folder in self.folders:
            if (folder / name).exists():
                return [str(folder / name), *map(str, options)]
        raise NotRunError(f"there is no {name} in {' or '.join(map(str, self.folders))}")

    def peer(self, work: str, model: Model, **job: object) -> Figures:
        """Runs mlx-lm on a model in a separate process; ``peer_mlx_lm.py`` has the kinds of work."""
        if model.weights is None:
            raise NotRunError(f"no folder of weights for {model.name}")
        job = {"work": work, "folder": str(model.weights), **job}
        file = self.output / "job.json"
        file.write_text(json.dumps(job))
        return json_lines(run_process([sys.executable, str(PEER), str(file)], self.environment, self.limit))[-1]

    def ids_file(self, ids: list[int]) -> Path:
        """Writes a prompt in the format that etkv's tools read."""
        file = self.output / "ids.txt"
        file.write_text(" ".join(map(str, ids)))
        return file

    def in_turns(
        self,
        case: Mapping[str, Any],
        contestants: Mapping[str, Callable[[], Figures]],
        rounds: int | None = None,
        skipped: Mapping[str, str] | None = None,
    ) -> Results:
        """Runs a round of each contestant, then the next round. A contestant that fails does not run in later rounds.

        ``skipped`` maps contestants that do not run at all to the reason.
        """
        results = Results(not_run=dict(skipped or {}))
        rounds = rounds or self.rounds
        label = ", ".join(str(value) for value in case.values())
        for turn in range(rounds):
            for name, run in contestants.items():
                if name in results.not_run:
                    continue
                say(f"{self.topic}: {label}: round {turn + 1} of {rounds}: {name}")
                try:
                    figures = run()
                except NotRunError as reason:
                    results.not_run[name] = str(reason)
                    results.rounds.pop(name, None)
                    continue
                results.rounds.setdefault(name, []).append(figures)
                sample = {"topic": self.topic, **case, "contestant": name, "round": turn + 1}
                self.samples.append({**sample, "figures": figures})
        return results


def say(text: str) -> None:
    """Shows what is running: on a terminal always in one line, otherwise in a new line for each text."""
    if sys.stderr.isatty():
        print(f"\r\033[K  {text}"[: max(os.get_terminal_size(2).columns - 1, 40)], end="", file=sys.stderr, flush=True)
    else:
        print(f"  {text}", file=sys.stderr, flush=True)
