"""fairseq runs as a user starts them, stops them, and starts them again when they are finished."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_plugin.planner.units import parse_time
from tests.hosts.fairseq.conftest import (
    DROPLESS,
    LANGUAGE_MODEL,
    MOE,
    Corpus,
    Result,
    command,
    environment,
    run,
    run_alone,
)
from tests.hosts.stopped import own_lines, stopped

_LONG = "--max-update 100000 --save-interval-updates 5 --no-epoch-checkpoints"
_FIRST = r"first step: ([\d.]+ m?s), ([\d,]+) tokens/s; [\d,]+ steps left, .* at this speed"


@pytest.fixture(scope="module")
def two_ranks(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run on two ranks that is stopped: where it saves, its arguments, its log."""
    folder = tmp_path_factory.mktemp("two_ranks")
    save = folder / "run"
    line = f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} {_LONG} --save-dir {save}"
    variables = {name: value for name, value in environment().items() if name != "PYTHONWARNINGS"}
    started = command("fairseq-train", f"{line} --num-workers 1", 2)
    return save, line, stopped(started, "@ 10 updates, score", folder / "log", variables)


@pytest.mark.distributed
def test_no_screen_of_warnings_comes_before_the_first_step(
        two_ranks: tuple[Path, str, str]) -> None:
    """On all ranks; the steps are of rank 0 alone."""
    log = two_ranks[2].partition("death signal")[0]
    assert "Warning" not in log and "already been imported" not in log
    steps = Result(0, log).steps
    assert [step["num_updates"] for step in steps] == [*range(1, len(steps) + 1)]
    (first,) = re.findall(_FIRST, log)
    tokens = float(first[1].replace(",", "")) * parse_time(first[0])
    assert tokens == pytest.approx(steps[0]["wpb"], rel=0.02)
    before, _, after = log.partition("first step: ")
    assert "train_inner |" not in before and after.count("train_inner |") == len(steps) >= 10


@pytest.mark.slow
def test_known_warnings_are_shown_where_they_are_asked_for(corpus: Corpus,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    shown = run_alone("fairseq-train", f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --no-save "
                      "--max-update 3 --disable-validation --num-workers 1").ok()
    assert "Hydra14MigrationWarning" in shown.log and len(shown.steps) == 3
    assert len(shown.log.splitlines()) > 40


@pytest.mark.distributed
def test_two_ranks_that_are_stopped_say_once_what_was_kept(
        two_ranks: tuple[Path, str, str]) -> None:
    """And torchrun shows no lines but its own."""
    save, line, log = two_ranks
    [said] = [each for each in own_lines(log) if "INFO" not in each]
    found = re.fullmatch(
        rf"stopped at step (\d+), last checkpoint (\d+) in {save}; "
        "the same command resumes the run", said)
    assert found and 10 <= int(found[2]) <= int(found[1])
    assert log.count("stopped at step") == 1
    assert "KeyboardInterrupt" not in log and "CommError" not in log
    loaded = run("fairseq-train", f"{line} --max-update 1", ranks=2).ok().log
    assert f"Loaded checkpoint {save}/checkpoint_last-rank-0.pt" in loaded


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
