"""Ranks are killed at random moments; torchrun starts all again, they resume, and nothing but time
is lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.hosts import kills
from tests.hosts.common.adapters import marked
from tests.hosts.common.host import Host

pytestmark = pytest.mark.slow
COUNTS = {"fairseq": [(2, 10, 10), (10, 1, 80), (10, 2, 80)],
          "megatron": [(1, 10, 10), (10, 1, 80), (10, 2, 80)]}


@pytest.mark.parametrize(("host", "count", "seed", "steps"), [
    marked(name, *case) for name, every in COUNTS.items() for case in every], indirect=["host"])
def test_killed_ranks_resume_to_the_same_losses(host: Host, tmp_path: Path, count: int, seed: int,
                                                steps: int) -> None:
    """Dropout, so that random states matter."""
    more = host.dropout + (" --lr-decay-iters 80" if host.name == "megatron" else
                           " --keep-interval-updates 1")
    wanted = host.train(tmp_path / "whole", steps, more, save=kills.SAVE_EVERY).ok()
    job = host.job(tmp_path / "killed run", tmp_path / "out", steps, more)
    made = kills.killed_again_and_again(job, count, seed, host.environment())
    print(kills.table(host.name, made))
    kills.check(made, job.losses(), {row["step"]: row["loss"] for row in wanted.rows},
                atol=1.1e-3 if host.name == "fairseq" else 1e-6)  # the log's last digit
    whole, killed = (host.tensors(tmp_path / name) for name in ("whole", "killed run"))
    assert whole.keys() == killed.keys() and len(whole) > 15
    for name, value in whole.items():
        # sums over memory that lies elsewhere may round otherwise
        torch.testing.assert_close(killed[name], value, rtol=0, atol=1e-6, msg=name)
