"""Ranks that give up (`tests/memory/test_tier_failures.py` has several at a time)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from moe_plugin.comm import CommError, watchdog
from moe_plugin.comm.host_collectives import collectives_named
from tests.distributed import run_gloo


class OldError(OSError):
    """Without what errors have since Python 3.11."""

    @property
    def add_note(self) -> NoReturn:
        raise AttributeError("add_note")


def test_a_rank_says_why_on_any_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(dist, name, lambda value=value: value)  # and no store answers
    error = OldError("disk is gone")
    error.__notes__ = ["of block 3"]
    for _ in range(2):  # the second time it is known
        watchdog.abort_job(error)
    assert error.__notes__ == ["of block 3",
                               "rank 1 of the job gave up: OldError: disk is gone"]


def _all_end_alike() -> tuple[str, bool]:
    try:
        with watchdog.says_why():
            raise ValueError(f"of rank {dist.get_rank()}")
    except ValueError as error:
        sum_1 = torch.ones(1)
        dist.all_reduce(sum_1)  # nothing is broken
        assert sum_1.item() == 2
        return str(error), watchdog.is_of_another_rank(error)


@pytest.mark.distributed
def test_ranks_that_end_alike_are_left_alone() -> None:
    results = run_gloo(2, _all_end_alike)
    assert [said for said, _ in results] == ["of rank 0", "of rank 1"]
    assert not any(heard for _, heard in results)


def _one_ends(folder: Path) -> None:
    said = folder / str(dist.get_rank())
    try:
        with watchdog.says_why(), collectives_named("a sum"):
            if dist.get_rank() == 1:
                raise ModuleNotFoundError("No module named 'x'")
            dist.all_reduce(torch.ones(1))
    except (CommError, ModuleNotFoundError) as error:
        said.write_text(f"{watchdog.is_of_another_rank(error)} {error}")
    os._exit(3)  # the groups are of no use


@pytest.mark.distributed
def test_the_others_end_by_the_words_of_the_rank_that_failed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died"):
        run_gloo(2, _one_ends, tmp_path)
    first, second = ((tmp_path / str(rank)).read_text() for rank in (0, 1))
    assert second == "False No module named 'x'"
    assert first.startswith("True rank 0 of 2 in group")
    assert first.endswith("; rank 1 of the job gave up: ModuleNotFoundError: No module named 'x'")


def test_an_error_before_ranks_have_met_keeps_its_text() -> None:
    """Else a rank whose peer was killed in a restart would speak of a missing group."""
    with pytest.raises(dist.DistError, match="connection reset"), collectives_named("set-up"):
        raise dist.DistError("connection reset")
