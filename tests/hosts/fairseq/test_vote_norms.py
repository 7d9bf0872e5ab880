"""fairseq's check of gradient norms under votes: by majority."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moe_plugin.comm import Comm, run_simulated
from moe_plugin.planner.vote_assignments import cyclic
from moe_plugin.training.resilience.vote import Ballots
from moe_plugin.training.run import Run

pytest.importorskip("fairseq")

from moe_plugin.hosts.fairseq.run import FileTurns  # noqa: E402
from moe_plugin.hosts.fairseq.trainer import MoETrainer  # noqa: E402


def checked(comm: Comm, norms: list[float]) -> str:
    """What ends the run of this rank; empty: nothing does."""
    model = nn.Linear(1, 1)
    trainer = SimpleNamespace(
        run=Run([FileTurns(Ballots(cyclic(3, 3), comm), model, nn.Identity(), None)]))
    try:
        MoETrainer._check_grad_norms(trainer, torch.tensor(norms[comm.rank]))
    except FloatingPointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wrong", [0.5, 2.0, math.nan, math.inf, -1.0])
def test_one_rank_with_another_norm_ends_no_run(wrong: float,
                                                caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for rank in range(3):
            norms = [wrong if each == rank else 1.5 for each in range(3)]
            assert run_simulated(3, lambda comm, norms=norms: checked(comm, norms)) == [""] * 3
    assert [record.getMessage().split("majority: ")[1] for record in caplog.records] == [
        "[0]", "[1]", "[2]"]


def test_norms_without_a_majority_end_it_on_all() -> None:
    found = run_simulated(3, lambda comm: checked(comm, [1.0, 2.0, 3.0]))
    assert found[0].startswith("step 0: no majority of the 3 workers") and len({*found}) == 1
    assert run_simulated(3, lambda comm: checked(comm, [1.0, 1.0 + 1e-7, 1.0])) == [""] * 3
