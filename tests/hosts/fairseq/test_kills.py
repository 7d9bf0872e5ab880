"""Ranks of fairseq-train are killed at random moments; torchrun starts all again, they resume, and
nothing but time is lost.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hosts import kills
from tests.hosts.fairseq.conftest import (
    BIN,
    DROPLESS,
    LANGUAGE_MODEL,
    MOE,
    Corpus,
    Result,
    environment,
    run,
)
from tests.scripts.emulate import jobs

pytestmark = [pytest.mark.distributed, pytest.mark.fairseq]


def arguments(corpus: Corpus, folder: Path, steps: int) -> str:
    """Dropout, so that random states matter."""
    return (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --dropout 0.1 --max-update {steps} "
            f"--save-interval-updates {kills.SAVE_EVERY} --keep-interval-updates 1 "
            f"--no-epoch-checkpoints --disable-validation --save-dir {folder}")


@pytest.mark.parametrize(("count", "seed", "steps"), [
    (2, 10, 10), pytest.param(10, 1, 80, marks=pytest.mark.slow),
    pytest.param(10, 2, 80, marks=pytest.mark.slow)])
def test_killed_ranks_resume_to_the_same_losses(corpus: Corpus, tmp_path: Path, count: int,
                                                seed: int, steps: int) -> None:
    whole, killed, out = tmp_path / "whole", tmp_path / "killed", tmp_path / "out"
    wanted = run("fairseq-train", arguments(corpus, whole, steps), ranks=2).ok()

    def losses() -> list[tuple[int, float]]:
        return [(int(entry["num_updates"]), entry["loss"])
                for entry in Result(0, out.read_text()).steps]

    def saved() -> int:
        found = re.findall(r"Saved checkpoint .* @ (\d+) updates", out.read_text())
        return int(found[-1]) if found else 0

    job = kills.Job([str(BIN / "fairseq-train"), *arguments(corpus, killed, steps).split()],
                    killed, out, losses, saved, ("*.tmp", "*.new"))
    made = kills.killed_again_and_again(job, count, seed, environment())
    print(kills.table("fairseq", made))
    kills.check(made, losses(), {int(entry["num_updates"]): entry["loss"]
                                 for entry in wanted.steps}, atol=1.1e-3)  # the log's last digit
    # sums over memory that lies elsewhere may round otherwise
    jobs.same_parameters(whole, killed, 2, atol=1e-6)
