"""What checks the matrix on a GPU, some of it on a CPU: its cells, and ranks of their own."""

from __future__ import annotations

import pytest
import torch

from tests.exactness import on_gpu


def test_cells_in_one_process() -> None:
    some = on_gpu.share("0/41", 1)
    assert len(some) >= 5 and {dtype for _, dtype in some} == {torch.float32, torch.float64}
    assert on_gpu.check_one("cpu", "0/41") == []


@pytest.mark.distributed
def test_cells_on_ranks() -> None:
    assert len(on_gpu.share("1/19", 2)) >= 4
    assert on_gpu.check_ranks(2, "cpu", "1/19") == []


def test_what_fails_is_told_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def differs(cell: object, results: object, dtype: object) -> None:
        compared.append(cell)
        assert len(compared) != 1, "off by 3"

    monkeypatch.setattr(on_gpu, "same", differs)
    [said] = on_gpu.check_one("cpu", "0/81")
    assert "off by 3" in said and "dispatch=" in said and len(compared) >= 2
