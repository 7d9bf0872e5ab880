"""Replicas of a test wait for each other at the lighthouse: what happens then depends neither on
times nor on which one comes first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.distributed import listens
from tests.hosts import kills

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300.0  # for what ends sooner, on any machine
# a replica that is silent for so long is taken for lost; replicas speak ten times a second
HEARTBEAT_MS = 5000
JOIN_MS = 300_000  # for a first step, the lighthouse waits for all replicas that it hears
_PAGE = re.compile(r"\[(\d+)/\d+ participants healthy\]\[(\d+) heartbeating\]")


def until(done: Callable[[], bool], why: Callable[[], str] = lambda: "") -> None:
    """Wait for it; `AssertionError` after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)


def started(command: Sequence[str], out: Path, **variables: str) -> subprocess.Popen:
    """A program in the environment of small ranks, whose output is added to a file."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with open(out, "a", encoding="utf-8") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT,
                                env={**kills.environment(), "PYTHONPATH": path, **variables})


def heard(lighthouse: str) -> tuple[int, int]:
    """How many replicas ask for their next step, and how many it hears.

    Raises:
        OSError: it does not answer.
    """
    with urllib.request.urlopen(f"{lighthouse}/status", timeout=WAIT_S) as page:
        asking, living = _PAGE.findall(page.read().decode())[0]
    return int(asking), int(living)


def meet(lighthouse: str, replicas: int) -> None:
    """Wait until it hears so many: in a first step it then waits until all ask."""
    until(lambda: heard(lighthouse)[1] == replicas)


def until_asked(lighthouse: str, replicas: int = 1) -> None:
    """Wait until so many ask: they are in the next step of one that does not ask yet."""
    until(lambda: heard(lighthouse)[0] == replicas)


def start_lighthouse(port: int, heartbeat_ms: int = HEARTBEAT_MS, join_ms: int = JOIN_MS,
                     **options: Any) -> subprocess.Popen:
    """One that listens at this port. options: of `subprocess.Popen`."""
    program = Path(sys.executable).with_name("torchft_lighthouse")
    process = subprocess.Popen([
        str(program), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", "--join_timeout_ms",
        str(join_ms), "--heartbeat_timeout_ms", str(heartbeat_ms)],
        **{"stderr": subprocess.DEVNULL, **options})
    until(lambda: listens(port) or process.poll() is not None)
    return process
