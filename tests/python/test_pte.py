"""The contents of a program: its tables, and the report of ``python -m etkv inspect``."""

from __future__ import annotations

import json
import random
import sys

import pytest

import lacking_program
import reference
from etkv import __main__ as command
from etkv import _tables, describe_program, inspection, pte
from etkv.errors import EtkvError
from tiny_models import CONTEXT


@pytest.fixture(scope="module")
def program(exported):
    return exported("tiny-llama") / "model.pte"


def inspect(capsys, *arguments) -> str:
    assert command.main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_report(program, capsys):
    lines = inspect(capsys, program, "--capacity", 100, "--format", "f16", "--format", "affine4").splitlines()
    assert "method forward: MLXBackend" in lines
    assert "runs here (etkv 0.1.0, MLX 0.32.2)" in lines
    assert "get_eos_ids: [257]" in lines
    assert "cache: 2 layers of 2 KV heads, head_dim 16, full history, stored as f32 by default" in lines
    # 2 layers x 2 (keys and values) x 2 heads x 16 elements x 2 bytes = 256 bytes, for 100 positions.
    assert "cache in f16: 25.0 KiB at 100 positions, 256 bytes for the first one" in lines
    assert "2 UpdateAndAttend" in [line.strip() for line in lines]
    assert any(line.startswith("cache in affine4: not possible: layer 0") for line in lines), lines
    assert "inputs of the delegate: cache_position int64[2..64], input_ids int64[1, 2..64]" in lines
    fused = [line for line in lines if line.startswith("  pass fuse_linear, ")]
    assert [line.partition(": ")[2] for line in fused] == ["15 Addmm to 0, 0 Linear to 15"] * 2, lines
    devices = [line.partition(":")[0] for line in lines if line.startswith("instructions")]
    assert devices == ["instructions on the CPU", "instructions on a GPU"]


def test_tables_are_those_that_executorch_reads(program):
    from executorch.exir._serialize._flatbuffer import _program_flatbuffer_to_json

    tables, _ = pte.read_tables(program)
    assert pte._as_json(tables) == json.loads(_program_flatbuffer_to_json(tables))


def test_a_report_does_not_import_torch_or_the_exporter(program):
    code = "import sys, etkv.__main__ as m; m.main(sys.argv[1:]); print({'torch', 'executorch.exir'} & {*sys.modules})"
    ran = reference.run([sys.executable, "-c", code, "inspect", program, "--instructions"])
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "set()"), ran.stderr


def test_report_as_json(program, capsys):
    found = json.loads(inspect(capsys, program, "--json"))
    assert found["runs_here"]["runs"] is True
    assert found["program"]["operations"]["UpdateAndAttend"] == 2
    layer = {"n_kv_heads": 2, "k_head_dim": 16, "v_head_dim": 16, "window": 0, "sinks": 0, "chunk": 0, "dtype": "f32"}
    assert found["layers"] == [{**layer, "values_in_keys": False}] * 2
    assert found["cache"]["capacity"] == CONTEXT
    assert found["cache"]["bytes"]["f32"] == {"at_capacity": CONTEXT * 512, "a_position": 512}
    assert found["constants"]["bytes"] > 0


def test_instructions(program, capsys):
    lines = inspect(capsys, program, "--instructions").splitlines()
    assert sum("UpdateAndAttend q: t" in line for line in lines) == 2
    found = json.loads(inspect(capsys, program, "--instructions", "--json"))
    assert [one["operation"] for one in found["instructions"]].count("UpdateAndAttend") == 2
    assert "instructions_at_load" in found


def test_a_program_that_does_not_run_here(tmp_path, capsys):
    """The report lists every missing operation with its number of uses."""
    file = lacking_program.write(tmp_path / "x.pte")
    found = inspection.report(file)
    assert found["runs_here"]["runs"] is False
    assert "2 times" in found["runs_here"]["why"]
    assert "get_n_caches" in found["cache"]["unknown"]
    text = inspect(capsys, file)
    assert "does not run here (etkv" in text
    assert "cache: the program does not report `get_n_caches`" in text


def test_wrong_use(program, tmp_path, capsys):
    file = tmp_path / "x.pte"
    assert command.main(["inspect", str(file)]) == 2
    file.write_bytes(b"0123456789")
    assert command.main(["inspect", str(file)]) == 2
    assert command.main(["inspect", str(program), "--capacity", "0"]) == 2
    assert command.main(["inspect"]) == 2
    assert command.main(["what"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {file} cannot be read: No such file or directory",
        f"error: {file} is not an ExecuTorch program",
        "error: capacity is 0, the minimum is 1",
        "error: the following arguments are required: MODEL.pte",
        "error: argument COMMAND: invalid choice: 'what' (choose from 'inspect', 'generate', 'export')",
    ]


def test_truncated_program(program, tmp_path):
    """A file with truncated tables is refused, and never crashes the reader."""
    whole = program.read_bytes()
    file = tmp_path / "x.pte"
    for length in (8, 100, 1000, 5000):
        file.write_bytes(whole[:length])
        for reader in (pte.PteFile, describe_program, inspection.report):
            with pytest.raises(EtkvError, match="is damaged"):
                reader(file)
    file.write_bytes(whole[: pte.PteFile(program)._segments_at + 500])
    with pytest.raises(EtkvError, match="is damaged: it has"):
        describe_program(file)


def test_constants_are_those_that_the_runtime_returns(program):
    """Constants that are read from the tables equal those that the runtime returns."""
    read = pte.constant_methods(program)
    assert read == pte._run_constants(program, read.keys())
    assert all(type(value) in (int, float, bool, str, list) for value in read.values())
    assert {"get_n_caches", "kv_cache.dtype", "get_kv_heads"} <= read.keys()


def test_damaged_tables_of_constants_are_refused(program, tmp_path):
    held, numbers = bytearray(program.read_bytes()), random.Random(3)
    n_tables = len(pte.read_tables(program)[0])
    refused = 0
    for _ in range(300):
        damaged = held.copy()
        for _ in range(numbers.randrange(1, 4)):
            damaged[numbers.randrange(40, n_tables)] = numbers.choice([0, 1, 127, 128, 255, numbers.randrange(256)])
        path = tmp_path / "damaged.pte"
        path.write_bytes(damaged)
        try:
            _tables.constants(pte.read_tables(path)[0], lambda offset, n: bytes(n) if n < 1 << 20 else b"")
        except (*_tables.DAMAGE, EtkvError):
            refused += 1
    assert refused > 10
