"""Ranks of the Megatron training script are killed at random moments; torchrun starts all again,
they resume, and nothing but time is lost.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts import kills
from tests.hosts.megatron.ranks import ROOT, run_main
from tests.hosts.megatron.training import EP2, MODEL, QUICK, TRAIN

pytestmark = [pytest.mark.distributed, pytest.mark.megatron, pytest.mark.slow]


def logged(path: Path) -> list[tuple[int, float]]:
    """(step, loss) in the order of the log; a line that is being written is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(record["iteration"], record["lm_loss"]) for record in map(json.loads, lines)]


@pytest.mark.parametrize(("count", "seed", "steps"), [(1, 10, 10), (10, 1, 80), (10, 2, 80)])
def test_killed_ranks_resume_to_the_same_losses(data: str, tmp_path: Path, count: int, seed: int,
                                                steps: int) -> None:
    """Dropout, so that random states matter."""
    argv = [
        *MODEL, *EP2, "--data-path", data, "--train-iters", str(steps), "--hidden-dropout", "0.1",
        "--lr-decay-iters", "80", "--cpu", *QUICK
    ]
    run_main(TRAIN, [*argv, "--log-file", "whole.jsonl"], 2, tmp_path)
    folder = tmp_path / "killed run"
    latest, save = folder / "latest_checkpointed_iteration.txt", [
        "--save", str(folder), "--load", str(folder), "--save-interval", str(kills.SAVE_EVERY)]
    job = kills.Job(["-m", TRAIN, *argv, *save], folder,
                    tmp_path / "out", lambda: logged(folder / "log.jsonl"),
                    lambda: int(latest.read_text()) if latest.exists() else 0, ("iter_*.part",))
    made = kills.killed_again_and_again(job, count, seed,
                                        {**kills.environment(), "PYTHONPATH": ROOT})
    print(kills.table("Megatron", made))
    kills.check(made, job.losses(), dict(logged(tmp_path / "whole.jsonl")), atol=1e-6)
