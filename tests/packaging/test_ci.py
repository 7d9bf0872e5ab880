"""Where `.ci/run` runs, and that whatever it begins ends with it."""

from __future__ import annotations

import os
import shutil
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


@pytest.mark.skipif(not RUN.exists(), reason="a wheel has no .ci")
def test_everything_runs_in_a_folder_with_a_space(tmp_path: Path) -> None:
    """Twice: the second copy keeps the environment of the first, and none of its other files."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(RUN, tmp_path / ".ci" / "run")
    (tmp_path / "scripts" / "setup.sh").write_text(
        "pwd\ncat .venv/made 2>/dev/null || mkdir -p .venv runs/x\necho kept >.venv/made\nexit 7\n")
    said = [subprocess.run(["bash", str(tmp_path / ".ci" / "run")], capture_output=True, text=True,
                           check=False, timeout=60) for _ in range(2)]
    copy = f"{tmp_path}/runs/a folder/moe plugin"
    assert [(one.returncode, one.stdout.splitlines()) for one in said] == [
        (7, [copy]), (7, [copy, "kept"])], said
    assert not (Path(copy) / "runs").exists()
