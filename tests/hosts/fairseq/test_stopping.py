"""fairseq runs that are stopped, and finished runs that are started again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hosts.fairseq.conftest import (
    DROPLESS,
    LANGUAGE_MODEL,
    MOE,
    Corpus,
    command,
    environment,
    run,
)
from tests.hosts.stopped import own_lines, stopped

_LONG = "--max-update 100000 --save-interval-updates 5 --no-epoch-checkpoints"


@pytest.mark.distributed
def test_two_ranks_that_are_stopped_say_once_what_was_kept(corpus: Corpus, tmp_path: Path) -> None:
    save = tmp_path / "run"
    line = f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} {_LONG} --save-dir {save}"
    for ranks, start, until in ((2, line, "@ 10 updates, score"),
                                (1, f"{line} --distributed-world-size 2", "@ 20 updates, score")):
        log = stopped(command("fairseq-train", start, ranks), until, tmp_path / "log",
                      environment())
        [(step, saved)] = re.findall(
            rf"^stopped at step (\d+), last checkpoint (\d+) in {save}; the same command goes on$",
            log, re.M)
        assert int(until.split()[1]) <= int(saved) <= int(step)
        assert "KeyboardInterrupt" not in log and "CommError" not in log
    assert "Traceback" not in log  # without torchrun
    loaded = run("fairseq-train", f"{line} --max-update 1", ranks=2).ok().log
    assert f"Loaded checkpoint {save}/checkpoint_last-rank-0.pt" in loaded


@pytest.mark.distributed
def test_torchrun_shows_its_own_lines_alone(corpus: Corpus, tmp_path: Path) -> None:
    line = f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} {_LONG} --no-save"
    log = stopped(command("fairseq-train", line, 2), '"num_updates": "3"', tmp_path / "log",
                  environment())
    said = [each for each in own_lines(log) if "train_inner" not in each]
    assert len(said) == 1 and re.fullmatch(r"stopped at step \d+; nothing was to be saved", said[0])


@pytest.mark.parametrize("limits", ["--max-update 2", "--max-epoch 1"])
def test_a_finished_run_says_so_and_trains_no_further_step(corpus: Corpus, tmp_path: Path,
                                                           limits: str) -> None:
    line = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --save-dir {tmp_path} "
            "--valid-subset test")
    first = run("fairseq-train", f"{line} {limits}").ok()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = run("fairseq-train", f"{line} {limits}").ok()
    flag, number = limits.split()
    assert f"the run of {tmp_path} is finished: it has {number} of {flag} {number}" in again.log
    assert not again.steps and first.steps
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    more = run("fairseq-train", f"{line} {flag} {int(number) + 1}").ok()
    assert more.steps and "is finished" not in more.log
