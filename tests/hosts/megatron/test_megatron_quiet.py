"""The training script on two ranks as a user starts it: its lines alone, once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.training import EP2, MODEL
from tests.hosts.stopped import own_lines, stopped

pytestmark = pytest.mark.megatron
PROGRAM = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
           "-m", "moe_plugin.hosts.megatron.train"]


def log_of(arguments: list[str], **variables: str) -> list[str]:
    """The lines of a run."""
    kept = {k: v for k, v in os.environ.items()
            if k not in ("PYTHONWARNINGS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([*PROGRAM, *arguments], text=True, stdout=subprocess.PIPE, timeout=300,
                          stderr=subprocess.STDOUT, env={**kept, "OMP_NUM_THREADS": "1",
                                                         **variables}, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout.splitlines()


@pytest.mark.distributed
def test_known_warnings_are_hidden_on_all_ranks(data: str, tmp_path: Path) -> None:
    """Also those of a run that goes on from a checkpoint, and says so."""
    save = str(tmp_path / "run")
    arguments = [*MODEL, *EP2, "--data-path", data, "--cpu", "--save", save, "--load", save,
                 "--data-cache-path", str(tmp_path), "--train-iters"]
    shown = log_of([*arguments, "3"], PYTHONWARNINGS="default")
    lines = log_of([*arguments, "6"])
    assert not [line for line in lines if "Warning" in line or "warnings.warn" in line]
    assert sum(line.startswith("iteration ") for line in lines) == 3 and len(lines) <= 14, lines
    assert lines.count(f"goes on from iteration 3, of {save}") == 1
    (first,) = (line for line in lines if line.startswith("first step: "))
    assert first.endswith(" if all take as long") and "tokens/s; 2 steps left, " in first
    steps = [line for line in lines if line.startswith("iteration ")]
    assert lines.index(first) < lines.index(steps[0])
    assert [line.endswith(" left") for line in steps] == [True, True, False]
    assert sum("Apex" in line for line in shown) >= 4 and len(shown) > len(lines) + 20


@pytest.mark.distributed
def test_a_run_that_is_stopped_says_once_what_was_kept(data: str, tmp_path: Path) -> None:
    """Then a finished run, which says so and writes nothing."""
    save = tmp_path / "run"
    arguments = [*MODEL, *EP2, "--data-path", data, "--cpu", "--save", str(save), "--load",
                 str(save), "--save-interval", "5", "--data-cache-path", str(tmp_path),
                 "--train-iters"]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR",
                                                             "MASTER_PORT")}
    log = stopped([*PROGRAM, *arguments, "100000"], "iteration 12/", tmp_path / "log",
                  {**kept, "OMP_NUM_THREADS": "1"})
    said = [line for line in own_lines(log) if not line.startswith(("iteration ", "step "))]
    [(step, saved)] = re.findall(rf"^stopped at step (\d+), last checkpoint (\d+) in {save}; "
                                 "the same command goes on$", log, re.M)
    assert int(step) - 5 <= int(saved) <= int(step) and 10 <= int(saved)
    assert all(line.startswith(("stopped at", "checkpoint: ")) for line in said), said
    assert f"checkpoint: {save}/iter_0000005" in log and f"checkpoint: {save}/iter_0000010" in log
    before = {path: path.stat().st_mtime_ns for path in save.rglob("*.distcp")}
    lines = log_of([*arguments, "7"])
    assert f"the run of {save} is finished: it has {saved} of --train-iters 7; a larger number " \
        "goes on" in lines
    assert {path: path.stat().st_mtime_ns for path in save.rglob("*.distcp")} == before
