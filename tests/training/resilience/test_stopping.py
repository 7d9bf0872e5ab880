"""A run that its user stops ends in one line, whatever becomes of the `KeyboardInterrupt`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_plugin.training.resilience.stopping import STATUS, Stopping

_SCRIPT = """
import os, signal
from moe_plugin.training.resilience.stopping import RUN, stops_in_one_line

class Loses:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass

with stops_in_one_line():
    RUN.resume(lambda: 7, 4, "run", "the same command")
    {body}
print("not here")
"""


@pytest.mark.parametrize("body", [
    "os.kill(os.getpid(), signal.SIGINT)",
    "Loses()\n    RUN.around_step(None)",  # Python drops what a destructor raises
    "Loses()\n    raise RuntimeError('Connection closed by peer')",
    "try:\n        os.kill(os.getpid(), signal.SIGINT)\n    finally:\n"
    "        os.kill(os.getpid(), signal.SIGINT)\n        print('ends in order', flush=True)"],
    ids=["once", "lost", "of another rank", "twice"])
def test_one_line(body: str) -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT.format(body=body)], text=True, timeout=100,
                          capture_output=True, check=False)
    said = "stopped at step 7, last checkpoint 4 in run; the same command resumes the run"
    lines = [line for line in done.stderr.splitlines() if line.startswith("stopped")]
    assert done.returncode == STATUS and lines == [said], done.stderr
    assert "not here" not in done.stdout
    if "Loses" not in body:  # there Python itself says what it drops
        assert done.stderr == f"{said}\n"
    assert ("ends in order" in done.stdout) is ("finally" in body)


def test_an_error_without_a_signal_stays_what_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT.format(body="raise RuntimeError('x')")],
                          text=True, timeout=100, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1 and done.stderr.endswith("RuntimeError: x\n")


def test_what_was_kept() -> None:
    run = Stopping()
    assert run.line() == "stopped"
    run.resume(lambda: 3, None, "run", "the same command")
    assert run.line() == "stopped at step 3, before the first checkpoint in run"
    run.saved = 2
    assert run.line() == (
        "stopped at step 3, last checkpoint 2 in run; the same command resumes the run")
    run.resume(lambda: 3, None, None, "")
    assert run.line() == "stopped at step 3; no checkpoints were requested"
