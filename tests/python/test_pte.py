"""The inspector."""

from __future__ import annotations

import pytest

from etkv import pte
from etkv.errors import EtkvError


def test_command(exported, capsys):
    assert pte.main([str(exported("tiny-llama") / "model.pte"), "--instructions"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "method forward: MLXBackend" in lines
    assert "get_eos_ids: [257]" in lines
    assert sum("UpdateAndAttendNode q=" in line for line in lines) == 2


def test_file_of_another_kind(tmp_path, capsys):
    file = tmp_path / "x.pte"
    assert pte.main([str(file)]) == 2
    file.write_bytes(b"0123456789")
    assert pte.main([str(file)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {file} cannot be read: No such file or directory",
        f"error: {file} is not an ExecuTorch program",
    ]


def test_truncated_program(exported, tmp_path):
    """The file is refused where its tables end early, and never crashes the reader."""
    whole = (exported("tiny-llama") / "model.pte").read_bytes()
    file = tmp_path / "x.pte"
    for length in (8, 100, 1000, 5000):
        file.write_bytes(whole[:length])
        for reader in (pte.delegates, pte.mlx_program):
            with pytest.raises(EtkvError, match="is damaged"):
                reader(file)
