"""Measures the cost and gain of draft tokens: forwards of several tokens, and answers with n-grams as drafts."""

from __future__ import annotations

import re
from functools import partial

from .measure import Bench, Figures, Model, NotRunError, Results
from .report import Panel, Plot, Table, Topic, cell, ratio_cell

NAME = "speculation"

ETKV, PEER = "etkv", "mlx-lm"

DRAFTS = {
    "none": ["--depth", "0"],
    "n-grams, 4 x 1": ["--depth", "4", "--width", "1"],
    "n-grams, auto": [],
}
"""Name -> options of ``etkv_speculative``: no drafts, chains of four tokens, and the tuned shape."""

PROMPT = "Copy this: 1, 2, 3, 4, 5, 6, 7, 8"


def measure(bench: Bench) -> Topic:
    """Measures forwards and answers on the first model."""
    topic = Topic(
        NAME,
        "Speculation",
        "Draft tokens save time if a forward of several tokens takes little longer than a forward of one token, and if "
        "enough of them are accepted. `make bench-speculation` compares more drafts.",
    )
    model = bench.models[0]
    sizes = bench.choose(quick=[1, 4], cpu=[1, 2, 4, 8, 16], gpu=[1, 2, 4, 8, 16, 32])
    found = {size: forwards(bench, topic, model, size) for size in sizes}
    topic.tables = [costs(model, found)]
    series: dict[str, list[float | None]] = {
        name: [relative(found, name, size) for size in sizes] for name in (ETKV, PEER)
    }
    series["as many forwards of one token"] = [float(size) for size in sizes]
    panel = Panel(model.name, sizes, "tokens of a forward", "forwards of one token", series)
    title = "What a forward of several tokens takes"
    topic.plots = [Plot("speculation.png", title, "lines", [panel], log_x=True, log_y=True)]
    if (model.program.parent / "tokenizer.json").exists():
        topic.tables.append(answers(bench, topic, model))
    else:
        topic.not_run.append(f"etkv_speculative: no tokenizer.json in the folder of {model.program.name}")
    return topic


def forwards(bench: Bench, topic: Topic, model: Model, size: int) -> Results:
    """Runs a prompt in steps of ``size`` tokens, with all rows of logits."""
    ids = model.prompt(bench.choose(quick=16, cpu=96, gpu=192))
    file = bench.ids_file(ids)

    def etkv() -> Figures:
        options = ["--model", model.program, "--ids-file", file, "--rows", "all", "--chunk", size]
        (result,) = bench.tool("etkv_forward", *options, "--capacity", len(ids), "--repeat", 2, "--json")
        return {"step_seconds": result["runs"][-1]["prefill_seconds"] / (len(ids) / size)}

    peer = partial(bench.peer, "forwards", model, ids=ids, tokens=size)
    results = bench.in_turns({"model": model.name, "tokens": size}, {ETKV: etkv, PEER: peer})
    topic.left_out(results, f"forwards of {size}")
    return results


def relative(found: dict[int, Results], contestant: str, size: int) -> float | None:
    """Returns the time of a forward of ``size`` tokens as a multiple of a forward of one."""
    one, many = (found[n].median(contestant, "step_seconds") for n in (1, size))
    return many / one if one and many else None


def costs(model: Model, found: dict[int, Results]) -> Table:
    """Returns the table of forwards."""
    made = Table(
        f"{model.name}: forwards of several tokens",
        "Milliseconds of a forward with all rows of logits, also as a multiple of a forward of one token. A ratio "
        "above 1 means that etkv is that many times as fast as mlx-lm.",
        ["tokens", "etkv, ms", "in forwards of one", "mlx-lm, ms", "in forwards of one", "ratio"],
    )
    for size, one in found.items():
        row = [str(size)]
        for name in (ETKV, PEER):
            row += [cell(one.median(name, "step_seconds"), 2, 1e-3), cell(relative(found, name, size), 2)]
        made.rows.append([*row, ratio_cell(one.ratio(ETKV, PEER, "step_seconds", more_is_better=False))])
    return made


def answers(bench: Bench, topic: Topic, model: Model) -> Table:
    """Answers a prompt with every draft. Returns the table."""
    most = bench.choose(quick=8, cpu=48, gpu=128)

    def run(options: list[str]) -> Figures:
        command = ["--model", model.program, "--max-tokens", most, "--prompt", PROMPT, *options]
        if not has_chat_template(model):
            command.append("--raw")
        text = bench.output_of_tool("etkv_speculative", *command)
        found = re.search(r"^(\d+) tokens? after the first in (\d+) steps?: .* ([\d.]+)/s,", text, re.M)
        if not found:
            raise NotRunError(f"etkv_speculative printed no figures: {text[-200:]!r}")
        tokens, steps, speed = map(float, found.groups())
        return {"tokens_a_step": tokens / steps, "tokens_per_second": speed}

    contestants = {name: partial(run, options) for name, options in DRAFTS.items()}
    results = bench.in_turns({"model": model.name, "answers": most}, contestants)
    topic.left_out(results, "answers")
    note = (
        f"Answers of at most {most} tokens to `{PROMPT}`; drafts are n-grams of the text. A ratio above 1 means that "
    )
    note += "the answer is that many times as fast as without drafts."
    if not model.trained:
        note += " These weights are not trained, so the number of tokens a step is meaningless."
    made = Table(
        f"{model.name}: answers",
        note,
        ["draft", "tokens a step", "tokens/s", "ratio"],
    )
    for name in DRAFTS:
        row = [name, cell(results.median(name, "tokens_a_step"), 2), cell(results.median(name, "tokens_per_second"))]
        made.rows.append([*row, ratio_cell(results.ratio(name, "none", "tokens_per_second", more_is_better=True))])
    return made


def has_chat_template(model: Model) -> bool:
    """Returns whether the model has a chat template, so that prompts can be questions."""
    folder = model.program.parent
    settings = folder / "tokenizer_config.json"
    beside = (folder / "chat_template.jinja").exists()
    return beside or (settings.exists() and "chat_template" in settings.read_text())
