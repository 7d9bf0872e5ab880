"""Runs that their user stops: what all ranks print."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

WAIT_S = 120.0


def stopped(command: Sequence[str], until: str, out: Path, environment: Mapping[str, str]) -> str:
    """The log of a command whose processes all get SIGINT, as from a terminal, when it has logged
    `until`. `AssertionError` if it ends before, or does not end.
    """
    with open(out, "w", encoding="utf-8") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT,
                                   env={**environment, "PYTHONUNBUFFERED": "1"},
                                   start_new_session=True)
        try:
            deadline = time.monotonic() + WAIT_S
            while until not in out.read_text():
                assert process.poll() is None, out.read_text()[-5000:]
                assert time.monotonic() < deadline, out.read_text()[-5000:]
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            process.wait(WAIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert process.returncode != 0
    return out.read_text()


def own_lines(log: str) -> list[str]:
    """What ranks print after the signal, without the launcher's own lines."""
    _, _, after = log.partition("death signal, shutting down workers")
    before_launchers, _, _ = after.partition("Traceback (most recent call last):\n  File \"<frozen")
    return [line for line in before_launchers.splitlines()[1:]
            if "closing signal SIGINT" not in line and line.strip()]
