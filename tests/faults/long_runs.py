"""Runs of many minutes: their memory, open files and threads, and what a kill leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.hosts import HOSTS, RANKS
from tests.faults.seen import NAMES, Seen, last_line, other_losses

STEPS = 500_000  # more than any run makes
_PATIENT = {"plain": ["--timeout", "120"], "fairseq": ["--moe-timeout", "120"],
            "megatron": ["--moe-timeout", "120"]}


def soak(name: str, home: Path, minutes: float, more: Sequence[str] = (),
         what: str = "checkpoints every 3 steps", ranks: int = RANKS) -> Seen:
    """A run of so many minutes; memory, open files and threads of its first rank after a fifth of
    the time and at the end; then it is killed, and goes on.
    """
    host, folder = HOSTS[name](home / name), home / "soak" / f"{name} {what}".replace(" ", "-")
    host.ranks, rows = ranks, list[tuple[int, int, int]]()
    # such a run has the lowest priority, so that a rank may wait for long
    more = [*more, *_PATIENT[name]]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(host.train, folder, None, STEPS, more, 60 * minutes + 300)
        until, ticks = time.monotonic() + 60 * minutes, threading.Event()
        while time.monotonic() < until and not first.done():
            ticks.wait(60 * minutes / 10)
            rows += filter(None, [_used(folder)])
        process = _process(folder)
        if process:
            os.kill(process, signal.SIGKILL)
        ran = first.result()
    wrong = "" if process and rows else f"it ended: {last_line(ran.log, folder)}"
    saved, reached = host.saved(folder), max(ran.losses, default=0)
    steps = reached + 2
    if name == "megatron":  # it shuffles its data by the number of steps
        steps, more = STEPS, [*more, "--exit-interval", str(steps)]
    again = host.train(folder, None, steps, more, 60 * minutes + 300)
    wrong = wrong or ("" if again.code == 0 else last_line(again.log, folder))
    repeated = {step: loss for step, loss in again.losses.items() if step <= reached}
    wrong = wrong or other_losses(repeated, ran.losses, host.tolerance)
    begin, end = (rows[min(1, len(rows) - 1)], rows[-1]) if rows else ((0, 0, 0), (0, 0, 0))
    grown = [what for what, before, after, room in zip(
        ("memory", "open files", "threads"), begin, end, (64, 8, 4), strict=True)
        if after > before + room]
    return Seen(f"{minutes:g} minutes, {what}", NAMES[name],
                f"{reached} steps; memory of the first rank {begin[0]} MiB, then {end[0]} MiB; "
                f"open files {begin[1]}, then {end[1]}; threads {begin[2]}, then {end[2]}",
                f"killed after step {reached}; continued after step {saved}"
                + " with the same losses" * (saved < reached),
                wrong or (f"{' and '.join(grown)} grow" if grown else ""))


def _process(folder: Path) -> int:
    try:
        return int(json.loads((folder / "moe_plugin.lock").read_text())["process"])
    except (OSError, ValueError):
        return 0


def _used(folder: Path) -> tuple[int, int, int] | None:
    """MiB, open files and threads of the process that has a folder."""
    process = _process(folder)
    try:
        [kib] = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
        return (int(kib) // 1024, len(os.listdir(f"/proc/{process}/fd")),
                len(os.listdir(f"/proc/{process}/task")))
    except (OSError, ValueError):
        return None


def changing(home: Path, minutes: float) -> Seen:
    """Of layouts that change."""
    changes = ",".join(f"{step}={1 + step // 20 % 2}" for step in range(20, 40_000, 20))
    return soak("fairseq", home, minutes, ["--moe-expert-parallel-at", changes],
                "expert-parallel size alternates between 1 and 2")


def streaming(home: Path, minutes: float) -> Seen:
    """Of weights that stream on two ranks, which fairseq refuses."""
    return soak("megatron", home, minutes, [
        "--weights-on", "host", "--moe-activation-path", str(home),
        "--untie-embeddings-and-output-weights"], "weights that stream")


def streaming_alone(home: Path, minutes: float) -> Seen:
    """Of weights that stream on one rank."""
    return soak("fairseq", home, minutes, ["--weights-on", "host"],
                "weights that stream, one rank", ranks=1)
