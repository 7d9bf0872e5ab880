"""The training script on two ranks as a user starts it: its lines alone, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.training import EP2, MODEL

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
