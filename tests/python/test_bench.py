"""`make bench`: medians, ratios, tables and reports of known values, and a short run of its topics on a tiny
program.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys

import pytest

import reference
from reference import EVERYTHING, Variant

sys.path.append(str(reference.ROOT))

from benches import repeating_model
from benches.run import __main__ as command
from benches.run import lengths, measure, models, plots, report
from benches.run.measure import Bench, Model, NotRunError, Results
from benches.run.report import Panel, Plot, Table, Topic

SHELL = ["/bin/sh", "-c"]


def results(**values):
    """Return results whose rounds have these values of `x`."""
    return Results({name: [{"x": value} for value in rounds] for name, rounds in values.items()})


def bench(tmp_path, **how):
    return Bench(models=[], folders=[], output=tmp_path, environment={}, **how)


# ---- Figures --------------------------------------------------------------------------------------------------------


def test_a_figure_is_a_number_or_the_median_of_a_list():
    figures = {"one": 3, "list": [5.0, 1.0, 2.0], "empty": [], "nothing": None}
    assert measure.number(figures, "one") == 3.0
    assert measure.number(figures, "list") == 2.0
    assert [measure.number(figures, name) for name in ("empty", "nothing", "other")] == [None] * 3


def test_medians_are_over_rounds():
    found = results(etkv=[1.0, 9.0, 2.0], other=[4.0, 2.0])
    assert found.median("etkv", "x") == 2.0
    assert found.median("other", "x") == 3.0
    assert found.median("third", "x") is None
    assert found.median("etkv", "y") is None


def test_a_ratio_above_1_is_better_both_ways():
    found = results(ours=[8.0, 9.0, 12.0], theirs=[4.0, 3.0, 6.0])
    more = found.ratio("ours", "theirs", "x", more_is_better=True)
    assert (more.value, more.least, more.most) == (9.0 / 4.0, 2.0, 3.0)
    less = found.ratio("ours", "theirs", "x", more_is_better=False)
    assert (less.value, less.least, less.most) == (4.0 / 9.0, 1.0 / 3.0, 0.5)


def test_a_ratio_needs_both_figures():
    found = results(ours=[1.0], zero=[0.0])
    assert found.ratio("ours", "absent", "x", more_is_better=True) is None
    assert found.ratio("absent", "ours", "x", more_is_better=True) is None
    assert found.ratio("ours", "zero", "x", more_is_better=True) is None


def test_rounds_alternate_and_every_sample_is_kept(tmp_path):
    calls = []

    def contestant(name):
        def run():
            calls.append(name)
            return {"x": len(calls)}

        return run

    def failing():
        calls.append("c")
        raise NotRunError("no c here")

    made = bench(tmp_path, rounds=2, topic="trial")
    found = made.in_turns(
        {"size": 4}, {"a": contestant("a"), "b": contestant("b"), "c": failing, "d": failing}, skipped={"d": "never"}
    )
    assert calls == ["a", "b", "c", "a", "b"]
    assert found.values("a", "x") == [1.0, 4.0]
    assert found.not_run == {"c": "no c here", "d": "never"}
    assert [(one["contestant"], one["round"]) for one in made.samples] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert made.samples[0] == {"topic": "trial", "size": 4, "contestant": "a", "round": 1, "figures": {"x": 1}}


def test_sizes_follow_the_device(tmp_path):
    sizes = {"quick": 1, "cpu": 2, "gpu": 3}
    assert bench(tmp_path).choose(**sizes) == 2
    assert bench(tmp_path, device="gpu").choose(**sizes) == 3
    assert bench(tmp_path, device="gpu", quick=True).choose(**sizes) == 1


@pytest.mark.parametrize(
    "words, reason",
    [
        (["/no/such/etkv_op"], "etkv_op: No such file"),
        ([*SHELL, "echo one >&2; echo two >&2; exit 3"], "two"),
        ([*SHELL, "exit 3"], "sh ended with status 3"),
        ([*SHELL, "kill -ABRT $$"], "SIGABRT ended sh"),
        ([*SHELL, "sleep 60"], "took longer than 1 s"),
    ],
)
def test_a_failed_run_has_a_reason(words, reason):
    with pytest.raises(NotRunError, match=reason):
        measure.run_process(words, {"PATH": "/bin:/usr/bin"}, limit=1.0)


def test_a_tool_that_is_missing_or_prints_no_figures_did_not_run(tmp_path):
    with pytest.raises(NotRunError, match="there is no etkv_op in"):
        Bench([], [tmp_path], tmp_path, {}).tool("etkv_op")
    with pytest.raises(NotRunError, match="no figures"):
        measure.json_lines(["text", ""])
    with pytest.raises(NotRunError, match="no folder of weights"):
        bench(tmp_path).peer("decode", Model("alone", tmp_path / "model.pte"))


# ---- Reports --------------------------------------------------------------------------------------------------------


def test_cells():
    assert report.cell(1234.56) == "1,234.6"
    assert report.cell(3 * 2**20, 0, 2**20) == "3"
    assert report.cell(None) == "not run"
    assert report.ratio_cell(None) == ""
    assert report.ratio_cell(measure.Ratio(1.5, 1.5, 1.501)) == "1.50"
    assert report.ratio_cell(measure.Ratio(1.5, 1.25, 2.0)) == "1.50 (1.25 to 2.00)"


def test_a_table_as_markdown():
    table = Table("title", "what is compared", ["", "a"], [["one", "1"], ["two", "not run"]])
    assert report.markdown_table(table).splitlines() == [
        *("### title", "", "what is compared", ""),
        *("|  | a |", "| --- | --- |", "| one | 1 |", "| two | not run |"),
    ]


def a_report():
    """Return a report with every kind of plot, including plots without measured values."""
    bars = [Panel("left", ["128", "2,048"], "context", "tokens/s", {"a": [1.0, None], "b": [2.0, 3.0]})]
    wide = [Panel("", ["affine4g64", "f16"], "", "MiB", {"MiB": [1.0, 2.0]})]
    lines = [Panel("", [1, 2, 64], "sequences", "tokens/s", {"a": [1.0, None, 900.0], "b": [None, None, None]})]
    nothing = [Panel("", [1], "x", "y", {"a": [None], "as many as x": [1.0]})]
    plotted = [
        Plot("nothing.png", "Nothing", "lines", nothing),
        Plot("bars.png", "Bars", "bars", bars),
        Plot("wide.png", "Wide", "bars", wide * 4),
        Plot("lines.png", "Lines", "lines", lines, log_x=True, log_y=True),
    ]
    table = Table("a table", "A ratio above 1: better.", ["x"], [["1"]])
    topic = Topic("decode", "Decoding", "About it.", [table], plotted, ["b, 128: there is no mlx-lm"])
    machine = {"device": "cpu", "device_name": "a device", "processor": "a processor", "cores": 2, "memory_gib": 24.0}
    return {
        "format": report.FORMAT,
        "started": "2026-01-01 00:00 UTC",
        "seconds": 60.0,
        "machine": {**machine, "system": "a system", "python": "3", "load_average": 0.0},
        "versions": {"etkv": "1", "MLX": None},
        "options": {"quick": True, "rounds": 3, "models": []},
        "topics": [report.topic_as_json(topic)],
        "samples": [],
    }


def test_a_report_is_written_read_and_drawn(tmp_path, capsys):
    report.write(a_report(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    for part in ("a device (cpu)", "short run", "### a table", "![Bars](bars.png)", "- b, 128: there is no mlx-lm"):
        assert part in text
    assert json.loads((tmp_path / "report.json").read_text()) == a_report()
    (tmp_path / "report.md").unlink()
    assert command.main(["--draw", str(tmp_path)]) == 0
    assert (tmp_path / "report.md").read_text() == text
    assert "### a table" in capsys.readouterr().out
    assert "nothing.png" not in text and not (tmp_path / "nothing.png").exists()
    for name in ("bars.png", "wide.png", "lines.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_reports_of_several_runs_are_joined(tmp_path):
    first, second = a_report(), a_report()
    second["topics"][0]["name"] = "op"
    made = report.joined([first, second])
    assert [topic["name"] for topic in made["topics"]] == ["decode", "op"]
    assert made["seconds"] == 120.0
    assert first == a_report()
    second["machine"]["device_name"] = "another"
    with pytest.raises(ValueError, match="different devices"):
        report.joined([first, second])


def test_marks_between_powers_of_ten():
    marks = plots.only(2, 5)
    assert [marks(value, None) for value in (2.0, 3.0, 50.0, 2000.0)] == ["2", "", "50", "2,000"]


# ---- Models ---------------------------------------------------------------------------------------------------------


def test_models_of_the_command_line(tmp_path):
    program = tmp_path / "model.pte"
    program.touch()
    model = models.named(f"a name={program}:{tmp_path}")
    assert (model.name, model.program, model.weights) == ("a name", program, tmp_path)
    assert models.named(f"x={program}").weights is None
    for wrong in ("model.pte", f"={program}", f"x={tmp_path}/other.pte"):
        with pytest.raises(ValueError):
            models.named(wrong)


def test_prompts_have_ids_of_the_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 4}')
    model = Model("tiny", tmp_path / "model.pte", tmp_path)
    ids = model.prompt(1000)
    assert len(ids) == 1000 and min(ids) >= 1 and max(ids) < 320
    assert model.head_dim == 16
    assert max(Model("alone", tmp_path / "model.pte").prompt(1000)) < 200


def test_a_model_that_repeats_compresses_and_no_two_tensors_are_equal(tmp_path):
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    repeating_model.write("tiny", tmp_path)
    shapes = repeating_model.tensors(repeating_model.config("tiny"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    matrices = [tensor.flatten()[:4096] for tensor in tensors.values() if tensor.dim() == 2]
    assert len({tuple(values.tolist()) for values in matrices}) == len(matrices)
    data = (tmp_path / "model.safetensors").read_bytes()
    assert len(lzma.compress(data, preset=1)) < len(data) / 5
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("aé\n").ids == list("aé\n".encode())
    assert tokenizer.decode(list("aé\n".encode())) == "aé\n"


def test_packed_models_are_unpacked_once(tmp_path):
    folder = tmp_path / "models" / "1-trial"
    (folder / "hf").mkdir(parents=True)
    (folder / "name.txt").write_text("a trial\n")
    for name in ("model.pte", "hf/model.safetensors"):
        (folder / f"{name}.xz").write_bytes(lzma.compress(name.encode()))
    (model,) = models.of_pack(tmp_path)
    assert (model.name, model.program.read_bytes()) == ("a trial", b"model.pte")
    assert (model.weights / "model.safetensors").read_bytes() == b"hf/model.safetensors"
    model.program.write_bytes(b"kept")
    assert models.of_pack(tmp_path)[0].program.read_bytes() == b"kept"


# ---- A run ----------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused(capsys):
    for words in (["--only", "nothing"], ["--rounds", "0"], ["--model", "x"]):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 2
    assert "unknown topic nothing" in capsys.readouterr().err


def run(tmp_path, *options):
    """Run the benchmark. Return its report."""
    words = [sys.executable, "-m", "benches.run", "--quick", "--output", tmp_path, *options]
    ended = subprocess.run(
        [str(word) for word in words], cwd=reference.ROOT, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "report.md").read_text() in ended.stdout
    return json.loads((tmp_path / "report.json").read_text())


def test_a_short_run_of_topics(tmp_path):
    program = reference.program(Variant("tiny-qwen3"))
    # The other topics need benchmarks that `make test` does not compile.
    chosen = list(command.TOPICS) if EVERYTHING else ["decode"]
    only = [word for name in chosen for word in ("--only", name)]
    made = run(tmp_path, "--model", f"tiny={program.path}:{program.hf}", *only)
    assert [topic["name"] for topic in made["topics"]] == [name for name in command.TOPICS if name in chosen]
    for topic in made["topics"]:
        assert topic["not_run"] == [], topic["name"]
        assert topic["tables"], topic["name"]
        assert all((tmp_path / plot["file"]).is_file() for plot in topic["plots"])
    of_lengths = [one for one in made["samples"] if one["topic"] == "lengths" and one["contestant"] == "etkv"]
    assert len(of_lengths) == ("lengths" in chosen)
    for sample in of_lengths:
        assert sample["figures"]["lengths"] == lengths.lengths(sample["longest"], len(sample["figures"]["lengths"]))
    decode = [one["figures"]["ids"] for one in made["samples"] if one["topic"] == "decode"]
    assert len(decode) == 4 and all(ids == decode[0] for ids in decode)


def test_without_programs_and_weights_the_report_says_so(tmp_path):
    program = reference.program(Variant("tiny-qwen3"))
    made = run(tmp_path, "--model", f"tiny={program.path}", "--binaries", tmp_path, "--only", "decode", "--only", "op")
    decode, op = made["topics"]
    assert "etkv, tiny, 48 tokens of context: there is no etkv_forward in" in decode["not_run"][0]
    assert "no folder of weights for tiny" in decode["not_run"][2]
    assert decode["tables"][0]["rows"] == [["48", "not run", "not run", "not run", "", "not run", "", ""]]
    assert "there is no etkv_op" in op["not_run"][0]
    assert made["samples"] == []
