"""What must hold for a training job of any host when a rank dies or a node goes silent; the tests
of each host call it.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from scripts.emulate import EmulatedCluster, RankEnd
from scripts.emulate.launch import start_torchrun
from tests.scripts.emulate import jobs

TIMEOUT_S = 10.0
# one layout, so that a resumed run gives the same bits
FLAGS = ["--moe-timeout", str(TIMEOUT_S), "--moe-all-to-all", "2dh", "--moe-parallel", "fixed"]
SAVE_EVERY = 3
SLACK_S = 20.0  # to notice, to write a trace and to end, on a busy machine
VICTIM = 3
# a CommError of ours, by its trace or in a line; or a trace that leads to the host's own collective
_OURS = "rror: rank {rank} of 4 in group 'ranks [0, 1, 2, 3]': "
_HOSTS = re.compile(r"distributed_c10d\.py.*in (all_reduce|all_gather\w*|barrier|broadcast\w*)")


def dies_in_an_exchange(cluster: EmulatedCluster, run: Any, argv: Sequence[str], log: str) -> None:
    """A rank is killed in the middle of an all-to-all, in a random step: every peer ends in time
    with an error that names it and what failed.
    """
    at = random.SystemRandom().randint(100, 300)
    ends = cluster.collect(
        jobs.start(cluster, jobs.die_in_exchange, VICTIM, at, run, [*argv, *FLAGS], log), 150)
    assert ends[VICTIM].exit == -signal.SIGKILL, ends[VICTIM].error
    survivors = [end for end in ends if end.rank != VICTIM]
    for end in survivors:
        assert end.seconds < ends[VICTIM].seconds + 2 * TIMEOUT_S + SLACK_S, (at, end)
    _all_named(survivors)
    assert any(f"rank {VICTIM} failed" in end.error and "send_receive of torch." in end.error
               for end in survivors), (at, survivors)


def falls_silent(cluster: EmulatedCluster, run: Any, argv: Sequence[str], log: str,
                 steps: Callable[[], int]) -> None:
    """Nobody hears node 1 any more: nothing tells so but time, and every rank ends within the
    time-out, wherever it waited.
    """
    ranks = jobs.start(cluster, run, [*argv, *FLAGS], log)
    wait_for(lambda: steps() >= 3, 90, lambda: Path(f"{log}0").read_text()[-3000:])
    cluster.set_hole(1)
    at = time.monotonic()
    ends = cluster.collect(ranks, 2 * TIMEOUT_S + SLACK_S)
    assert time.monotonic() < at + 2 * TIMEOUT_S + SLACK_S
    _all_named(ends)


def _all_named(ends: Sequence[RankEnd]) -> None:
    for end in ends:
        assert not end.ok and (_OURS.format(rank=end.rank) in end.error
                               or _HOSTS.search(end.error)), end


def is_restarted(cluster: EmulatedCluster, program: Sequence[str], log: Path,
                 steps: Callable[[], int], last: int) -> int:
    """torchrun on each node; one rank is killed after a random step. The job must end well. Returns
    the step after which it was killed.
    """
    step = random.SystemRandom().randint(SAVE_EVERY + 1, last - SAVE_EVERY)
    with open(log, "w", encoding="utf-8") as stream:
        started = start_torchrun(cluster, [*program, *FLAGS], 3, stdout=stream,
                                 stderr=subprocess.STDOUT)
        wait_for(lambda: steps() >= step, 200, log.read_text)
        killed = steps()
        processes_of(started)[VICTIM].kill()
        wait_for(lambda: all(process.poll() is not None for process in started), 250, log.read_text)
    assert [process.returncode for process in started] == [0, 0], log.read_text()[-5000:]
    return killed


def processes_of(started: Sequence[subprocess.Popen]) -> dict[int, psutil.Process]:
    """The living process of each rank under these launchers, seen from outside the nodes; not the
    helpers that it may have started.
    """
    found: dict[int, psutil.Process] = {}
    for launcher in started:
        try:
            children = psutil.Process(launcher.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        for child in children:
            try:
                rank, created = int(child.environ().get("RANK", -1)), child.create_time()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if rank not in found or created < found[rank].create_time():
                found[rank] = child
    found.pop(-1, None)
    return found


def wait_for(done: Callable[[], bool], seconds: float, log: Callable[[], str]) -> None:
    """Until it is so; an `AssertionError` with the end of a log after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, log()[-5000:]
        time.sleep(0.05)
