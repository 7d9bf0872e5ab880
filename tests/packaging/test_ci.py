"""What `.ci/run` begins ends with it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"


def ended(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


@pytest.mark.skipif(not RUN.exists() or not Path("/proc").is_dir(), reason="no /proc, or a wheel")
def test_no_job_outlives_a_step_that_fails(tmp_path: Path) -> None:
    """With what the job itself has started."""
    text = RUN.read_text()
    functions = text[text.index("declare -A begun"):text.index("EXIT\n") + len("EXIT\n")]
    job = "sleep 300 & echo $! >child; wait"
    script = (f"set -euo pipefail\n{functions}in_background job bash -c {job!r}\n"
              "until [ -s child ]; do sleep 0.01; done\nfalse\n")
    made = subprocess.run(["bash", "-c", script], cwd=tmp_path, timeout=60)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while not ended(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert made.returncode == 1 and ended(child)
