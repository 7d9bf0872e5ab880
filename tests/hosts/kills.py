"""SIGKILL to one rank after the other of a training job under torchrun, at random moments drawn
from a seed, until the job ends; the tests of each host call it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.scripts.emulate.host_faults import processes_of

SAVE_EVERY, RANKS = 3, 2
# the share of each kind of moment
WHEN = {"starting": 0.2, "training": 0.45, "saving": 0.35}
START_S = 6.0  # about the time from the start of a process to its first step
WAIT_S = 240.0


@dataclass(frozen=True)
class Job:
    """A job of one host.

    program: what torchrun starts. folder: of the checkpoints. out: what all ranks print. losses:
    (step, loss) in the order in which they were logged. saved: the last step whose checkpoint the
    job has reported as complete. unfinished: patterns of files that exist while it saves.
    """

    program: Sequence[str]
    folder: Path
    out: Path
    losses: Callable[[], list[tuple[int, float]]]
    saved: Callable[[], int]
    unfinished: Sequence[str]

    def step(self) -> int:
        """The last step that was logged; 0 before the first one."""
        return self.losses()[-1][0] if self.losses() else 0

    def is_saving(self, since: float) -> bool:
        """Whether files of an unfinished checkpoint exist that are newer than `since`."""
        for pattern in self.unfinished:
            for path in self.folder.glob(pattern):
                try:
                    if path.stat().st_mtime > since:
                        return True
                except FileNotFoundError:  # it got its name
                    continue
        return False


@dataclass(frozen=True)
class Kill:
    """when: `starting`, `training` or `saving`. at: the last step logged. saved: see `Job`.
    resumed: the step after which the next start went on that logged any; None if there is none.
    """

    when: str
    rank: int
    at: int
    saved: int
    resumed: int | None = None


def killed_again_and_again(job: Job, kills: int, seed: int,
                           environment: Mapping[str, str]) -> list[Kill]:
    """Start the job, kill a rank `kills` times, and wait for its good end."""
    draw = random.Random(seed)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
        str(RANKS), "--max-restarts", str(kills), *job.program
    ]
    made: list[tuple[Kill, int]] = []
    with open(job.out, "w", encoding="utf-8") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={
            **environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"})
        try:
            dead: set[int] = set()
            for _ in range(kills):
                when = draw.choices(list(WHEN), list(WHEN.values()))[0]
                kill, dead = _kill(job, launcher, when, draw, dead)
                until(lambda: _started(launcher, dead), job, launcher)  # noqa: B023 - called at once
                made.append((kill, len(job.losses())))
            until(lambda: launcher.poll() is not None, job, None)
        finally:
            for process in processes_of([launcher]).values():
                process.kill()
            launcher.kill()
            launcher.wait()
    assert launcher.returncode == 0, job.out.read_text()[-5000:]
    losses = job.losses()
    return [Kill(kill.when, kill.rank, kill.at, kill.saved, losses[first][0] - 1
                 if first < len(losses) else None) for kill, first in made]


def _kill(job: Job, launcher: subprocess.Popen, when: str, draw: random.Random,
          dead: set[int]) -> tuple[Kill, set[int]]:
    """Kill one of the processes that are not `dead`, at such a moment; all of their ids."""
    until(lambda: _started(launcher, dead), job, launcher)
    since, ranks = time.time(), processes_of([launcher])
    begin, rank = len(job.losses()), draw.randrange(RANKS)
    if when == "starting":
        end = time.time() + draw.uniform(0, START_S)
        until(lambda: time.time() > end or len(job.losses()) > begin, job, launcher)
    else:
        steps = draw.randint(1, 4)
        until(lambda: len(job.losses()) >= begin + steps, job, launcher)
        if when == "saving":
            until(lambda: job.is_saving(since), job, launcher, poll_s=0.0005)
        time.sleep(draw.uniform(0, 0.02))
    assert ranks[rank].is_running(), job.out.read_text()[-5000:]  # it ended before
    ranks[rank].kill()
    return Kill(when, rank, job.step(), job.saved()), {process.pid for process in ranks.values()}


def _started(launcher: subprocess.Popen, dead: set[int]) -> bool:
    ranks = processes_of([launcher])
    return len(ranks) == RANKS and not {process.pid for process in ranks.values()} & dead


def until(done: Callable[[], bool], job: Job, launcher: subprocess.Popen | None,
          poll_s: float = 0.02) -> None:
    """Wait for it; an `AssertionError` with the end of the log if the launcher ends first, or after
    `WAIT_S`. To look takes milliseconds of a core that the ranks need.
    """
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, job.out.read_text()[-5000:]
        assert launcher is None or launcher.poll() is None, job.out.read_text()[-5000:]
        time.sleep(poll_s)


def check(kills: Sequence[Kill], losses: Sequence[tuple[int, float]],
          wanted: Mapping[int, float], atol: float = 0.0) -> None:
    """All steps are there; every loss, before and after a kill, is that of the uninterrupted run;
    no start went on before a checkpoint that was complete.
    """
    assert {step for step, _ in losses} == set(wanted)
    wrong = [(step, loss, wanted[step]) for step, loss in losses
             if abs(loss - wanted[step]) > atol]
    assert not wrong, (wrong, kills)
    for kill in kills:
        assert kill.resumed is None or kill.saved <= kill.resumed, (kill, kills)


def table(host: str, kills: Sequence[Kill]) -> str:
    """A row per kind of moment: kills, steps that were trained again in the mean and at most."""
    rows = []
    for when in WHEN:
        again = [max(0, kill.at - kill.resumed) for kill in kills
                 if kill.when == when and kill.resumed is not None]
        count = sum(kill.when == when for kill in kills)
        rows.append(f"| {host} | {when} | {count} | {sum(again) / max(1, len(again)):.1f} | "
                    f"{max(again, default=0)} |")
    return "\n".join(rows)


def environment() -> dict[str, str]:
    """One thread per rank, no compiler: two small ranks on two cores."""
    inherited = {name: value for name, value in os.environ.items()
                 if name not in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")}
    return {**inherited, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
