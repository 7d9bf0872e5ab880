"""fairseq runs as a user starts them, stops them, and starts them again when they are finished."""

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
from tests.hosts.stopped import stopped

_LONG = "--max-update 100000 --save-interval-updates 5 --no-epoch-checkpoints"


@pytest.mark.distributed
def test_spawned_ranks_that_are_stopped_say_it_once(corpus: Corpus, tmp_path: Path) -> None:
    line = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} {_LONG} --no-save "
            "--distributed-world-size 2")
    log = stopped(command("fairseq-train", line), '"num_updates": "3"', tmp_path / "log",
                  environment())
    assert len(re.findall(r"^stopped at step \d+; no checkpoints were requested$", log, re.M)) == 1
    assert log.count("stopped at step") == 1
    assert not [word for word in ("KeyboardInterrupt", "CommError", "Traceback") if word in log]


@pytest.mark.parametrize("limits", ["--max-update 2", "--max-epoch 1"])
def test_a_finished_run_says_so_and_trains_no_further_step(corpus: Corpus, tmp_path: Path,
                                                           limits: str) -> None:
    line = (f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --save-dir {tmp_path} "
            "--valid-subset test")
    first = run("fairseq-train", f"{line} {limits}").ok()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = run("fairseq-train", f"{line} {limits}").ok()
    flag, number = limits.split()
    assert f"run of {tmp_path} is finished: it has done {number} of {flag} {number}" in again.log
    assert not again.steps and first.steps
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    more = run("fairseq-train", f"{line} {flag} {int(number) + 1}").ok()
    assert more.steps and "is finished" not in more.log
