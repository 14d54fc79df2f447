"""Buffers that a program keeps between calls are zeros at first and after a reset. Each load has separate buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import etkv
import mlx_programs

WIDTH, PLACES = 3, 4


class Ring(torch.nn.Module):
    """Adds ``x`` to row ``place`` of a ring. Returns all rows, and the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(PLACES, WIDTH))
        self.register_buffer("sums", torch.zeros(WIDTH, dtype=torch.int32))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows.index_copy_(0, place, self.rows[place] + x)
        self.sums.add_(1)
        return self.rows.clone(), self.sums.clone()


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("buffers") / "ring.pte"
    return mlx_programs.write(Ring(), (torch.ones(1, WIDTH), torch.tensor([0])), path, strict=True)


def execute(loaded: etkv.Program, x: torch.Tensor, place: int) -> list[torch.Tensor]:
    return [out.clone() for out in loaded._method.execute([x, torch.tensor([place])])]


def test_buffers_are_kept_over_a_hundred_calls(program):
    torch.manual_seed(1)
    with etkv.load(program, None) as loaded, etkv.load(program, None) as other:
        expected = torch.zeros(PLACES, WIDTH)
        for call in range(100):
            x = torch.randn(1, WIDTH)
            rows, sums = execute(loaded, x, call % PLACES)
            expected[call % PLACES] += x[0]
            torch.testing.assert_close(rows, expected)
            assert sums.tolist() == [call + 1] * WIDTH

        ones = torch.ones(1, WIDTH)
        fresh = execute(other, ones, 2)
        assert fresh[0].sum() == WIDTH
        loaded.reset_buffers()
        assert all(map(torch.equal, execute(loaded, ones, 2), fresh))
        # The buffers of the other program were not reset.
        assert execute(other, ones, 2)[1].tolist() == [2] * WIDTH


def test_an_index_beyond_the_end_changes_nothing(program):
    with etkv.load(program, None) as loaded:
        ones = torch.ones(1, WIDTH)
        execute(loaded, ones, 1)
        with pytest.raises(RuntimeError):
            execute(loaded, ones, PLACES)
        rows, sums = execute(loaded, ones, 1)
        assert rows[1].tolist() == [2.0] * WIDTH
        assert sums.tolist() == [2] * WIDTH


def test_a_program_without_buffers_has_none_to_reset(tmp_path):
    path = mlx_programs.write(torch.nn.Tanh(), (torch.ones(2),), tmp_path / "tanh.pte")
    with etkv.load(path, None) as loaded, pytest.raises(etkv.EtkvError, match="no loaded program keeps buffers"):
        loaded.reset_buffers()
