"""`moe-plugin fault` says so where nothing went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("options", "message"), [
    (["--step", "40"], "kill did not happen on rank 0: step 40, place forward, was not reached; "
                       "the program made 0 steps"),
    (["--ranks", "1,3"], "kill happens on no rank: it is for 1, 3, the program has 1 (RANK 0 to 0)")
])
def test_a_fault_that_does_not_happen_is_said(options: list[str], message: str,
                                              tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print('trained'); sys.exit(3)")
    done = subprocess.run(
        [sys.executable, "-m", "moe_plugin.cli.main", "fault", "kill", *options, "--", str(script)],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
             }, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "trained\n")
    assert done.stderr == f"moe-plugin fault: {message}\n"
