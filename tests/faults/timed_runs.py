"""Runs of each host whose ranks are killed at random times, by real programs under torchrun: what
each process did when is in its folder, as `timed_rank` writes it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.host_replicas import JOB_S, HostJob
from tests.faults.meeting import started, until
from tests.faults.recorded import RECORD, read
from tests.faults.replicas import LEFT, Job
from tests.faults.timed_rank import STARTS, TIMES, Timed

RANKS, POLL_S = 2, 0.05
MOST = 50  # starts of a job: more kills than are drawn
KEPT = 4  # steps without a kill at the end
BACK = 120  # and so many in which a lost replica comes back


def last(path: Path, key: str = "at") -> dict[str, Any]:
    """The last whole line that has this; {}: none. It reads no more than the end of the file."""
    if not path.exists():
        return {}
    with open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - 4000))
        texts = stream.read().split(b"\n")[:-1]
    lines = (json.loads(text) for text in reversed(texts) if text[:1] == b"{")
    return next((line for line in lines if key in line), {})


def arguments(host: str, data: str, steps: int, saved: str, save_every: int) -> tuple[str, ...]:
    """Of a run whose two ranks share the experts. saved: the folder of its checkpoints."""
    if host == "fairseq":
        from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE

        return (data, *f"{LANGUAGE_MODEL} {MOE} {DROPLESS} --disable-validation".split(),
                "--max-update", str(steps), "--save-dir", saved, "--save-interval-updates",
                str(save_every), "--keep-interval-updates", "2", "--no-epoch-checkpoints",
                "--save-interval", str(steps))  # epochs: no further checkpoints at their ends
    from tests.hosts.megatron.test_megatron_script import FLAGS
    from tests.hosts.megatron.training import SCRIPT

    return (SCRIPT, *FLAGS, "--global-batch-size", "4", "--expert-model-parallel-size", str(RANKS),
            "--train-iters", str(steps), "--save", saved, "--load", saved, "--save-interval",
            str(save_every))


def torchrun(ranks: int, run: Timed, out: Path) -> subprocess.Popen:
    """The job of this run or replica, which torchrun starts again whenever it fails."""
    Path(run.folder).mkdir(parents=True, exist_ok=True)
    return started(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
         str(ranks), "--max-restarts", str(MOST), "-m", "tests.faults.timed_rank",
         json.dumps(asdict(run))], out, PYTHONUNBUFFERED="1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def kill_rank(folder: Path, rank: int) -> float:
    """SIGKILL to the living process of a rank; the time."""
    [*_, start] = [line for line in read(folder / STARTS) if line["rank"] == rank]
    at = time.time()
    os.kill(start["pid"], signal.SIGKILL)
    return at


def life(folder: Path) -> int:
    """The process that made the last step; 0 before the first one."""
    return last(folder / TIMES).get("life", 0)


@dataclass
class Failing:
    """Kills drawn from a seed: `every_s` seconds in the mean after all run again.

    victims: of which one is drawn. whole: whether all run. left: steps in which kills may be.
    kill: this victim; the time. log: what to show where it hangs.
    """

    every_s: float
    draw: random.Random
    victims: int
    whole: Callable[[], bool]
    left: Callable[[], int]
    kill: Callable[[int], float]
    log: Callable[[], str]

    def run(self) -> list[tuple[int, float]]:
        """(victim, time) of each kill."""
        made: list[tuple[int, float]] = []
        while True:
            self._until(self.whole)
            at = time.time() + self.draw.expovariate(1 / self.every_s)
            self._until(lambda: time.time() >= at or self.left() <= 0)  # noqa: B023 - at once
            if self.left() <= 0:
                return made
            victim = self.draw.randrange(self.victims)
            made.append((victim, self.kill(victim)))

    def _until(self, done: Callable[[], bool]) -> None:
        def waited() -> bool:
            time.sleep(POLL_S)  # to look takes time of a core that the ranks need
            return done()

        until(waited, self.log)


def alone(run: Timed, steps: int, every_s: float, seed: int) -> list[float]:
    """A run without replicas, to its good end; the times of the kills. every_s: 0: none."""
    folder, dead = Path(run.folder), {0}
    out = folder.with_suffix(".out")
    process = torchrun(RANKS, run, out)

    def whole() -> bool:
        assert process.poll() is None, out.read_text()[-4000:]
        return life(folder) not in dead

    def kill(rank: int) -> float:
        dead.add(life(folder))
        return kill_rank(folder, rank)

    try:
        made = Failing(
            every_s, random.Random(seed), RANKS, whole,
            lambda: steps - KEPT - last(folder / TIMES)["step"], kill,
            lambda: out.read_text()[-4000:]).run() if every_s else []
        assert process.wait(JOB_S) == 0, out.read_text()[-4000:]
    finally:
        process.terminate()  # with its ranks
        process.wait()
    return [at for _, at in made]


@dataclass
class TimedReplicas(HostJob):
    """Replicas of a host, each of one rank in a process of its own under its own torchrun."""

    pause_s: float = 0.0

    def begin(self) -> None:
        """See `Job.begin`."""
        (self.folder / "finish").touch()  # no pauses but ours
        for number in range(self.replicas):
            run = Timed(self.host, str(self.folder / str(number)), pause_s=self.pause_s,
                        data=self.data, steps=self.steps, lighthouse=self.lighthouse,
                        number=number)
            self.processes[number] = torchrun(1, run, self.folder / f"{number}.out")

    def fail(self, every_s: float, seed: int) -> list[tuple[int, float]]:
        """The whole job: (replica, time) of each kill."""
        dead, folders = {0}, [self.folder / str(number) for number in range(self.replicas)]

        def whole() -> bool:
            assert all(process.poll() is None for process in self.processes.values()), self.logs()
            return not dead & set(map(life, folders)) and all(
                sum(map(bool, last(folder / RECORD, "attempts")["attempts"])) == self.replicas
                for folder in folders)

        def kill(number: int) -> float:
            dead.add(life(folders[number]))
            return kill_rank(folders[number], 0)

        with self:
            made = Failing(every_s, random.Random(seed), self.replicas, whole, self.left, kill,
                           self.logs).run()
            Job.finish(self)
        return made

    def left(self) -> int:
        """Steps in which a replica may be lost."""
        done = max(last(self.folder / str(number) / TIMES)["step"]
                   for number in range(self.replicas))
        return self.steps - LEFT - BACK - done

    def __exit__(self, *given: object) -> None:
        for process in self.processes.values():
            process.terminate()  # with its rank
            process.wait()
        Job.__exit__(self, *given)
