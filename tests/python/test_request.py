"""Requests that are refused before anything is loaded, and the messages of the commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etkv import models
from etkv.errors import EtkvError
from etkv.export import ExportRequest, source
from etkv.export.__main__ import main


def _run(capsys, *arguments) -> str:
    """Run the command, which must fail. Return its message."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, "an error is one line"
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


@pytest.fixture
def model(tmp_path) -> Path:
    """Return a folder that looks like a model as long as its files are not read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "f8"], "dtype 'f8' is not one of float32, f32, float16, f16, bfloat16, bf16"),
        (["--quantize", "2w"], "quantize '2w' is not supported by backend mlx; expected 4w, 8w"),
        (["--backend", "gpu"], "backend 'gpu' is not one of mlx, cpu"),
        (
            ["--backend", "cpu", "--quantize", "4w"],
            "quantize '4w' is not supported by backend cpu; expected 8da4w, 8da8w",
        ),
        (
            ["--backend", "cpu", "--dtype", "f16"],
            "dtype 'f16' is not supported by backend cpu; expected float32, or bfloat16 for weights",
        ),
        (
            ["--backend", "cpu", "--dtype", "bf16", "--quantize", "8da8w"],
            "dtype 'bf16' and quantize '8da8w' are both for weights on backend cpu; leave one out",
        ),
        (["--backend", "cpu", "--group-size", "32"], "group-size 32 needs --quantize 8da4w or 8da8w"),
        (["--group-size", "32"], "group-size 32 needs --quantize 4w or 8w"),
        (["--quantize", "4w", "--group-size", "48"], "group-size 48 is not one of 32, 64, 128"),
        (["--group-size", "many"], "argument --group-size: invalid int value: 'many'"),
        (["--max-context", "1"], "max-context 1 is below the minimum of 2"),
        (["--max-context", "-5"], "max-context -5 is below the minimum of 2"),
        (["--prefill-chunk", "0"], "prefill-chunk 0 is below the minimum of 2"),
        (["--layers", "0"], "layers 0 is below the minimum of 1"),
        (["--logits", "first"], "logits 'first' is not one of all, last"),
        (["--tap-layers", "-1"], "tap-layers -1 is below the minimum of 0"),
        (["--tap-layers", "1,0,1"], "tap-layers has 1 twice"),
        (["--tap-layers", "1,two"], "argument --tap-layers: '1,two' is not a list of layers, such as 5,11,17"),
        (["--max-context", "9" * 20], f"max-context {'9' * 20} is above the maximum of 2147483647"),
        (["--dtype", "f32", "--dtype", "f32"], "argument --dtype is given twice; leave one out"),
        (["--layers", "1", "--layers=2"], "argument --layers is given twice; leave one out"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_arguments(capsys, tmp_path, model, arguments, said):
    folder = tmp_path / "not" / "there"
    assert _run(capsys, "--model", model, "--output", folder / "x.pte", *arguments) == said
    assert not (tmp_path / "not").exists()


def test_missing_arguments(capsys):
    assert "--model" in _run(capsys, "--output", "x.pte")


def test_missing_model(capsys, tmp_path):
    said = _run(capsys, "--model", tmp_path / "none", "--output", tmp_path / "x.pte")
    assert said == f"model {tmp_path / 'none'} does not exist; expected a Hugging Face model folder or a .gguf file"
    said = _run(capsys, "--model", "an-owner/a-model", "--output", tmp_path / "x.pte")
    assert said.endswith("run hf download an-owner/a-model --local-dir DIR, and name DIR")
    assert "File name too long" in _run(capsys, "--model", tmp_path / ("x" * 300), "--output", tmp_path / "x.pte")


def test_output_without_suffix(capsys, tmp_path, model):
    assert "expected a file name that ends in .pte" in _run(capsys, "--model", model, "--output", tmp_path / "x")


def test_output_is_a_folder(capsys, tmp_path, model):
    (tmp_path / "x.pte").mkdir()
    assert "is a folder" in _run(capsys, "--model", model, "--output", tmp_path / "x.pte")
    os.mkfifo(tmp_path / "y.pte")
    assert "is not a file" in _run(capsys, "--model", model, "--output", tmp_path / "y.pte")
    assert "File name too long" in _run(capsys, "--model", model, "--output", tmp_path / f"{'x' * 300}.pte")


@pytest.mark.parametrize("name", ["tokenizer.json", "export.json", "additional_chat_templates", "config.json"])
def test_other_files_of_an_export_are_folders(capsys, tmp_path, model, name):
    """Such an export would fail at its end, or replace the folder."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / name).touch() if name == "additional_chat_templates" else (folder / name).mkdir()
    said = _run(capsys, "--model", model, "--output", folder / "x.pte", "--keep-hf", folder)
    assert said.endswith("choose another folder")
    assert str(folder / name) in said


@pytest.mark.parametrize("inside", ["x.pte", "x.pte/hf", "tokenizer.json"])
def test_a_folder_in_place_of_a_file(capsys, tmp_path, model, inside):
    folder = tmp_path / "out"
    said = _run(capsys, "--model", model, "--output", folder / "x.pte", "--keep-hf", folder / inside)
    assert said.endswith("where there is a folder or keep-hf needs one; choose another folder")
    assert not folder.exists()


@pytest.mark.parametrize("option", ["--output", "--keep-hf"])
def test_unwritable_folder(capsys, tmp_path, model, option):
    (tmp_path / "file").touch()
    arguments = {"--output": tmp_path / "x.pte", option: tmp_path / "file" / "x.pte"}
    said = _run(capsys, "--model", model, *(part for pair in arguments.items() for part in pair))
    assert "is not writable" in said
    assert str(tmp_path / "file") in said


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(file.relative_to(folder)): file.read_bytes() if file.is_file() else None for file in folder.rglob("*")}


@pytest.mark.parametrize("through", ["model", "model/", "link", "model/../link", "link/within", "model/not/there/yet"])
@pytest.mark.parametrize("option", ["--output", "--keep-hf"])
def test_the_model_is_not_written_to(capsys, tmp_path, model, option, through):
    """Links to the folder are followed, and nothing is created before the check: no folder and no trial file."""
    (tmp_path / "link").symlink_to(model)
    (model / "within").mkdir()
    folder = tmp_path / through
    before = contents(tmp_path)
    given = folder / "x.pte" if option == "--output" else folder
    arguments = {"--output": tmp_path / "out" / "x.pte", option: given}
    said = _run(capsys, "--model", model, *(part for pair in arguments.items() for part in pair))
    assert said == (
        f"{option[2:]} {given} is inside the model's folder {model}, whose files the export would replace; "
        "choose a folder outside of it"
    )
    assert contents(tmp_path) == before
    # The path of the model may be a link, too.
    assert "is inside the model's folder" in _run(
        capsys, "--model", tmp_path / "link", *(part for pair in arguments.items() for part in pair)
    )
    assert contents(tmp_path) == before


def test_files_that_the_model_links_to_are_not_written_to(capsys, tmp_path, model):
    """For example, a model's folder in a hub's cache has only links."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (model / "config.json").replace(blobs / "config.json")
    (model / "config.json").symlink_to(blobs / "config.json")
    said = _run(capsys, "--model", model, "--output", tmp_path / "out" / "x.pte", "--keep-hf", blobs)
    assert said.startswith(f"keep-hf {blobs} has files that the model {model} links to")
    assert contents(blobs) == {"config.json": b"{}"}


def test_folders_around_and_beside_the_model_are_fine(tmp_path, model):
    request = ExportRequest(model, tmp_path / "x.pte", keep_hf=tmp_path / "model-hf").validated()
    assert (request.output, request.keep_hf) == (tmp_path / "x.pte", tmp_path / "model-hf")
    (model / "x.gguf").touch()
    request = ExportRequest(model / "x.gguf", model / "x.pte", keep_hf=model).validated()
    assert (request.output, request.keep_hf) == (model / "x.pte", model)


def test_aliases_and_relative_paths(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = ExportRequest(Path("model"), Path("out/x.pte"), dtype="bf16").validated()
    assert request.dtype == "bfloat16"
    assert request.model == model
    assert request.output == tmp_path / "out" / "x.pte"


def test_folder_without_config(tmp_path):
    with pytest.raises(EtkvError, match=r"has no config\.json"):
        source.find(tmp_path)


def test_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EtkvError, match="has no weights"):
        source.find(tmp_path)


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("model.gguf", b"something else", "is not a GGUF file: it begins with b'some'"),
        ("model.gguf", b"", "is not a GGUF file"),
        ("model.bin", b"", r"does not end in \.gguf"),
    ],
)
def test_files_that_are_not_gguf(tmp_path, name, contents, said):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(EtkvError, match=said):
        source.find(tmp_path / name)


def test_help_is_complete_and_needs_no_large_package():
    """``--help`` is fast: it imports no package that takes seconds."""
    program = (
        "import sys; from etkv.export.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'executorch.exir'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    for option in (
        *("--model", "--dtype", "--quantize", "--group-size", "--max-context", "--prefill-chunk"),
        *("--layers", "--logits", "--tap-layers", "--keep-hf"),
    ):
        assert option in done.stdout


def test_models_command(capsys):
    assert models.main(["no-such-model"]) == 2
    assert capsys.readouterr().err == "error: model 'no-such-model' is not one of smollm2-135m\n"
    assert models.main([]) == 2


def test_models_command_without_the_package(capsys, monkeypatch):
    monkeypatch.setitem(models._PACKAGES, "smollm2-135m", "no_such_package")
    assert models.main(["smollm2-135m"]) == 2
    assert "requirements-nodeps.txt" in capsys.readouterr().err
