"""Replicas of scripts/train_plain.py under torchft are killed at random steps and come back; what
they log must be what one process computes with the same members in every step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.distributed import free_port
from tests.faults.meeting import HEARTBEAT_MS, ROOT, start_lighthouse, started, until
from tests.faults.recorded import PLAN, RECORD, ended_in, read, set_cap, steps_of

SCRIPT = ROOT / "scripts" / "train_plain.py"
REPLICAS, PAUSE_S = 3, 0.15
DRAWN, AWAY, LEFT = 8, 10, 30  # steps: to a kill, at most; without the lost one; at a job's end
MARGIN = DRAWN + LEFT  # that a kill and a return need
PAGE = ROOT / "docs" / "benchmarks" / "elastic.md"


@dataclass(frozen=True)
class Killed:
    """A kill and a return. at: the last step that the replica had logged; resumed_s: until the
    others had made a step without it; lost: steps that the others skipped; back: the first step
    that it made again; back_s: from its start to that step.
    """

    replica: int
    at: int
    resumed_s: float
    lost: int
    back: int
    back_s: float


@dataclass
class Job:
    """A lighthouse and replicas in a folder."""

    folder: Path
    steps: int
    replicas: int = REPLICAS
    lighthouse: str = ""
    processes: dict[int, subprocess.Popen] = field(default_factory=dict)
    started: list[subprocess.Popen] = field(default_factory=list)

    def __enter__(self) -> Job:  # noqa: PYI034 - Self needs Python 3.11
        port = free_port()
        self.lighthouse = f"http://127.0.0.1:{port}"
        with open(self.folder / "lighthouse.out", "a", encoding="utf-8") as out:
            self.started.append(start_lighthouse(port, stdout=out, stderr=out))
        set_cap(self.folder, self.steps - LEFT)
        for replica in range(self.replicas):
            self.plan(replica, {"meets": self.replicas})
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()
            process.wait()

    def plan(self, replica: int, plan: Mapping[str, Any]) -> None:
        """What this replica does, see `recorded`."""
        path = self.folder / str(replica) / PLAN
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(plan))

    def begin(self) -> None:
        """Start all replicas."""
        for replica in range(self.replicas):
            self.start(replica)

    def kill(self, replica: int) -> None:
        """SIGKILL; it is gone when this returns."""
        self.processes[replica].kill()
        self.processes[replica].wait()

    def finish(self) -> None:
        """Wait for the good end of all replicas."""
        set_cap(self.folder, self.steps)
        self.until(lambda: all(process.poll() is not None for process in self.processes.values()))
        assert all(process.returncode == 0 for process in self.processes.values()), self.logs()

    def start(self, replica: int) -> None:
        """One replica of one rank; a step takes at least `PAUSE_S`."""
        self.processes[replica] = self._popen(
            [sys.executable, "-m", "moe_plugin.cli.main", "fault", "slow", "--seconds",
             str(PAUSE_S), "--", "-m", "tests.faults.plain_replica",
             str(self.folder / str(replica)), "--steps", str(self.steps), "--save-every", "1000000",
             "--timeout", "60", "--layers", "1", "--lighthouse", self.lighthouse, "--replica",
             str(replica)], f"{replica}")

    def _popen(self, command: list[str], name: str) -> subprocess.Popen:
        self.started.append(started(command, self.folder / f"{name}.out"))
        return self.started[-1]

    def lines(self, replica: int, name: str = "log.jsonl") -> list[dict[str, Any]]:
        """What this replica has logged, of all its starts."""
        return read(self.folder / str(replica) / name)

    def step(self, replica: int) -> int:
        """The last step that it has logged; 0 without one."""
        return self.lines(replica)[-1]["step"] if self.lines(replica) else 0

    def ready(self) -> bool:
        """Whether kills may begin."""
        return True

    def lost(self, replica: int) -> int:
        """Steps that it skipped because a replica was lost."""
        return (self.folder / f"{replica}.out").read_text().count("a replica was lost")

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for it; `AssertionError` with the ends of the logs if it does not come."""
        until(done, self.logs)

    def furthest(self) -> int:
        """The last step that any replica has logged."""
        return max(map(self.step, range(self.replicas)))

    def logs(self) -> str:
        """The end of every process's output."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}"
                         for path in sorted(self.folder.glob("*.out")))


def kill_and_return(job: Job, draw: random.Random) -> Killed | None:
    """One kill at a random moment, and the return; None if the job is about to end."""
    def together() -> bool:
        last = [job.lines(replica)[-1:] for replica in range(job.replicas)]
        return job.ready() and all(
            line and line[0]["replicas"] == job.replicas and line[0]["loss"] is not None
            for line in last)

    job.until(together)
    begin, victim = job.step(0), draw.randrange(job.replicas)
    if begin + MARGIN > job.steps:
        return None
    after = begin + draw.randint(1, DRAWN)
    job.until(lambda: job.step(victim) >= after)
    time.sleep(draw.uniform(0, PAUSE_S))
    others = [replica for replica in range(job.replicas) if replica != victim]
    lost, at = [job.lost(replica) for replica in others], job.step(victim)
    job.kill(victim)
    killed = time.monotonic()
    set_cap(job.folder, job.furthest() + AWAY)
    job.until(lambda: all(line and line[-1]["replicas"] == job.replicas - 1
                          for line in map(job.lines, others)))
    resumed_s = time.monotonic() - killed
    time.sleep(draw.uniform(0, 1))
    known, began = len(job.lines(victim)), time.monotonic()
    job.start(victim)
    job.until(lambda: len(job.lines(victim)) > known)
    set_cap(job.folder, max(job.furthest() + 4, job.steps - LEFT))  # one step together, at least
    worst = max(job.lost(replica) - before for replica, before in zip(others, lost, strict=True))
    return Killed(victim, at, resumed_s, worst, job.lines(victim)[known]["step"],
                  time.monotonic() - began)


def kills_of(job: Job, wanted: int, seed: int) -> list[Killed]:
    """Kills until there are so many or the job is about to end; then its good end."""
    made: list[Killed] = []
    with job:
        draw = random.Random(seed)
        while len(made) < wanted:
            killed = kill_and_return(job, draw)
            if killed is None:
                break
            made.append(killed)
        job.finish()
    return made


def run(folder: Path, kills_wanted: int, steps: int, seed: int) -> tuple[list[Killed], float]:
    """A job of plain PyTorch: its kills, and the largest difference of a loss to that of the
    uninterrupted run with the same members.
    """
    folder.mkdir(parents=True)
    job = Job(folder, steps)
    made = kills_of(job, kills_wanted, seed)
    return made, difference(folder, REPLICAS, steps)


def difference(folder: Path, replicas: int, steps: int, options: Sequence[str] = (),
               seeds: Sequence[int] = ()) -> float:
    """The largest difference between a logged loss and that of one process which has the members of
    each step.

    folder: of a job. options: of the script. seeds: of each replica's weights; none: the script's,
    for all.
    """
    logs, records = ([read(folder / str(replica) / name) for replica in range(replicas)]
                     for name in ("log.jsonl", RECORD))
    attempts = {step: made.attempts for step, made in steps_of(records, steps).items()}
    table = {step: sorted(of) for step, of in attempts.items()}
    script = train_plain()
    args = script.parse(["out", "--layers", "1", *options])
    # in the first step all take the weights of its only member
    torch.manual_seed(seeds[table[1][0]] if seeds else args.seed)
    model = script.Model(script.config_of(args), args.layers)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    worst = 0.0
    for step in range(1, steps + 1):
        gradients = [torch.zeros_like(p) for p in model.parameters()]
        for replica, lines in enumerate(logs):
            loss, balance = model(script.sequences(step - 1, replica, args.batch))
            model.zero_grad()
            (loss + balance).backward()
            for total, p in zip(gradients, model.parameters(), strict=True):
                total += p.grad * (replica in table[step]) / len(table[step])
            of = [line["loss"] for line in lines if line["step"] == step][-1:]
            if replica in table[step] and not of:
                assert ended_in(records[replica], attempts[step][replica]), (replica, step)
            elif replica in table[step] and of[0] is not None:
                worst = max(worst, abs(of[0] - loss.item()))
        for total, p in zip(gradients, model.parameters(), strict=True):
            p.grad = total
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
    return worst


def train_plain() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train_plain", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def page(made: Sequence[Killed], worst: float) -> str:
    """The committed table."""
    rows = "\n".join(f"| {k.replica} | {k.at} | {k.resumed_s:.1f} | {k.lost} | {k.back} | "
                     f"{k.back_s:.1f} |" for k in made)
    return f"""# Replicas that come and go

{REPLICAS} replicas of `scripts/train_plain.py` train under torchft 0.2 on one machine (CPU, gloo).
The heartbeat timeout is {HEARTBEAT_MS / 1000:g} s. A randomly chosen replica is killed by SIGKILL
after a random step and restarted within one second. This happens {len(made)} times. The other
replicas make at most {AWAY} steps before they wait for it, so no run ends without it.

Every loss that a replica logged equals the loss of one process that averages the gradients of the
same members in every step. The largest difference is {worst:.1e}. No run stopped, and the remaining
replicas trained no step twice.

* *Others' next step*: the seconds from the kill to the next step of the other replicas. They
  include the heartbeat timeout.
* *Back*: the first step of the restarted replica, and the seconds from its start to this step.

This page is written by `python -m tests.faults.replicas`. [Replicas](../replicas.md) explains how
to run replicas.

| replica | killed after step | others' next step, s | steps they lost | back in step | back, s |
|---|---|---|---|---|---|
{rows}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--kills", type=int, default=20)
    p.add_argument("--steps", type=int, default=500, help="of a job; several jobs if need be")
    p.add_argument("--out", type=Path, default=PAGE)
    args = p.parse_args(argv)
    made, worst, seed = [], 0.0, 0
    with tempfile.TemporaryDirectory() as home:
        while len(made) < args.kills:
            more, other = run(Path(home, str(seed)), args.kills - len(made), args.steps, seed)
            made, worst, seed = [*made, *more], max(worst, other), seed + 1
            print(f"{len(made)} kills, largest difference {worst:.1e}", flush=True)
    args.out.write_text(page(made, worst))
    return 0


if __name__ == "__main__":
    sys.exit(main())
