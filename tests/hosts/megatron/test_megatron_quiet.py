"""The training script on two ranks as a user starts it: our lines come once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.training import EP2, MODEL, QUICK, TRAIN
from tests.hosts.stopped import own_lines, stopped

pytestmark = pytest.mark.megatron
SCRIPT = TRAIN
PROGRAM = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
           "-m", SCRIPT]


def environment() -> dict[str, str]:
    """Of a user who knows nothing of warnings."""
    kept = {k: v for k, v in os.environ.items()
            if k not in ("PYTHONWARNINGS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return {**kept, "OMP_NUM_THREADS": "1"}


@pytest.mark.distributed
def test_a_run_that_goes_on_and_is_stopped_says_its_lines_once(data: str, tmp_path: Path) -> None:
    """Without warnings of packages that are missing; a finished run says so and writes nothing."""
    save = tmp_path / "run"
    arguments = [*MODEL, *EP2, *QUICK, "--data-path", data, "--cpu", "--save", str(save), "--load",
                 str(save), "--save-interval", "5", "--data-cache-path", str(tmp_path),
                 "--train-iters"]
    first = _said([*arguments, "3"], tmp_path)
    assert _steps(first) == [1, 2, 3]
    assert first.count(f"all 3 iterations are done; losses and balance: {save}/log.jsonl") == 1
    log = stopped([*PROGRAM, *arguments, "100000"], "iteration       12/", tmp_path / "log",
                  environment())
    _check_beginning(log.partition("death signal")[0].splitlines(), save)
    [(step, saved)] = re.findall(rf"^stopped at step (\d+), last checkpoint (\d+) in {save}; "
                                 "the same command resumes the run$", log, re.M)
    assert int(step) - 5 <= int(saved) <= int(step) and 10 <= int(saved)
    assert not [line for line in own_lines(log) if "Traceback" in line], log[-3000:]
    before = {path: path.stat().st_mtime_ns for path in save.rglob("*.distcp")}
    lines = _said([*arguments, "7"], tmp_path)
    assert f"the run in {save} is finished: {saved} of --train-iters 7 iterations are done. Use " \
        "a larger --train-iters to continue." in lines
    assert {path: path.stat().st_mtime_ns for path in save.rglob("*.distcp")} == before


def _said(arguments: list[str], cwd: Path) -> list[str]:
    """Lines of a run by command: a rank of the server has Megatron's handler of logs already."""
    return subprocess.run([*PROGRAM, *arguments], check=True, cwd=cwd, env=environment(), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout.splitlines()


def _steps(lines: list[str]) -> list[int]:
    """Iterations that Megatron's log has."""
    found = (re.search(r"iteration +(\d+)/ *\d+ \|", line) for line in lines)
    return [int(one[1]) for one in found if one]


def _check_beginning(lines: list[str], save: Path) -> None:
    """Of a run from iteration 3 on."""
    assert not [line for line in lines if "Apex" in line or "transformer-engine" in line]
    assert lines.count(f"continuing from iteration 3 of {save}") == 1
    (first,) = (line for line in lines if line.startswith("first step: "))
    assert re.search(r"tokens/s; 99,?996 steps left, .* at this speed$", first), first
    steps = _steps(lines)
    assert steps == list(range(4, 4 + len(steps)))


def test_known_warnings_are_shown_where_they_are_asked_for(data: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", SCRIPT, *MODEL, "--data-path", data, "--cpu", "--data-cache-path",
         str(tmp_path), "--train-iters", "1"], text=True, stdout=subprocess.PIPE, timeout=300,
        stderr=subprocess.STDOUT, env={**environment(), "PYTHONWARNINGS": "default"}, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert sum("Apex" in line for line in done.stdout.splitlines()) >= 2
