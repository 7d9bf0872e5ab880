"""Replicas of scripts/train_plain.py under torchft are killed at random steps and come back; what
they log must be what one process computes with the same members in every step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
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
from tests.hosts import kills

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_plain.py"
REPLICAS, WAIT_S, PAUSE_S = 3, 120.0, 0.15
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
    lighthouse: str = ""
    processes: dict[int, subprocess.Popen] = field(default_factory=dict)
    started: list[subprocess.Popen] = field(default_factory=list)

    def __enter__(self) -> Job:  # noqa: PYI034 - Self needs Python 3.11
        port = free_port()
        self.lighthouse = f"http://127.0.0.1:{port}"
        program = Path(sys.executable).with_name("torchft_lighthouse")
        self._popen([str(program), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1",
                     "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "2000"], "lighthouse")
        for replica in range(REPLICAS):
            self.start(replica)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()
            process.wait()

    def start(self, replica: int) -> None:
        """One replica of one rank; a step takes at least `PAUSE_S`."""
        self.processes[replica] = self._popen(
            [sys.executable, "-m", "moe_plugin.cli.main", "fault", "slow", "--seconds",
             str(PAUSE_S), "--", str(SCRIPT), str(self.folder / str(replica)), "--steps",
             str(self.steps), "--save-every", "1000000", "--timeout", "10", "--layers", "1",
             "--lighthouse", self.lighthouse, "--replica", str(replica)], f"{replica}")

    def _popen(self, command: list[str], name: str) -> subprocess.Popen:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with open(self.folder / f"{name}.out", "a", encoding="utf-8") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={
                **kills.environment(), "PYTHONPATH": path})
        self.started.append(process)
        return process

    def lines(self, replica: int) -> list[dict[str, Any]]:
        """What this replica has logged, of all its starts."""
        path = self.folder / str(replica) / "log.jsonl"
        texts = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(text) for text in texts]

    def step(self, replica: int) -> int:
        """The last step that it has logged; 0 without one."""
        return self.lines(replica)[-1]["step"] if self.lines(replica) else 0

    def lost(self, replica: int) -> int:
        """Steps that it skipped because a replica was lost."""
        return (self.folder / f"{replica}.out").read_text().count("a replica was lost")

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for it; `AssertionError` with the ends of the logs after `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def logs(self) -> str:
        """The end of every process's output."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}"
                         for path in sorted(self.folder.glob("*.out")))


def kill_and_return(job: Job, draw: random.Random) -> Killed | None:
    """One kill at a random moment, and the return; None if the job is about to end."""
    def together() -> bool:
        last = [job.lines(replica)[-1:] for replica in range(REPLICAS)]
        return all(line and line[0]["replicas"] == REPLICAS and line[0]["loss"] is not None
                   for line in last)

    job.until(together)
    begin, victim = job.step(0), draw.randrange(REPLICAS)
    after = begin + draw.randint(1, 8)
    if after + 150 > job.steps:
        return None
    job.until(lambda: job.step(victim) >= after)
    time.sleep(draw.uniform(0, PAUSE_S))
    others = [replica for replica in range(REPLICAS) if replica != victim]
    lost, at = [job.lost(replica) for replica in others], job.step(victim)
    job.processes[victim].kill()
    job.processes[victim].wait()
    killed = time.monotonic()
    job.until(lambda: all(line and line[-1]["replicas"] == REPLICAS - 1
                          for line in map(job.lines, others)))
    resumed_s = time.monotonic() - killed
    time.sleep(draw.uniform(0, 1))
    known, began = len(job.lines(victim)), time.monotonic()
    job.start(victim)
    job.until(lambda: len(job.lines(victim)) > known)
    worst = max(job.lost(replica) - before for replica, before in zip(others, lost, strict=True))
    return Killed(victim, at, resumed_s, worst, job.lines(victim)[known]["step"],
                  time.monotonic() - began)


def run(folder: Path, kills_wanted: int, steps: int, seed: int) -> tuple[list[Killed], float]:
    """Kills until there are so many or the job ends; they, and the largest difference of a loss to
    that of the uninterrupted run with the same members.
    """
    folder.mkdir(parents=True)
    made: list[Killed] = []
    with Job(folder, steps) as job:
        draw = random.Random(seed)
        while len(made) < kills_wanted:
            killed = kill_and_return(job, draw)
            if killed is None:
                break
            made.append(killed)
        job.until(lambda: all(process.poll() is not None for process in job.processes.values()))
        assert all(process.returncode == 0 for process in job.processes.values()), job.logs()
        return made, difference([job.lines(replica) for replica in range(REPLICAS)], steps)


def difference(logs: Sequence[Sequence[Mapping[str, Any]]], steps: int) -> float:
    """The largest difference between a logged loss and that of one process which has the members of
    each step.
    """
    by_step: dict[int, dict[int, Mapping[str, Any]]] = {}
    for replica, lines in enumerate(logs):
        for line in lines:
            by_step.setdefault(line["step"], {})[replica] = line
    assert sorted(by_step) == list(range(1, steps + 1)), "a step is missing"
    spec = importlib.util.spec_from_file_location("train_plain", SCRIPT)
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = script.parse(["out", "--layers", "1"])
    torch.manual_seed(args.seed)
    model = script.Model(script.config_of(args), args.layers)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    worst, before = 0.0, set(range(REPLICAS))
    for step in range(1, steps + 1):
        here = by_step[step]
        members = _members(here, before)
        gradients = [torch.zeros_like(p) for p in model.parameters()]
        for replica in sorted(members):
            loss, balance = model(script.sequences(step - 1, replica, args.batch))
            model.zero_grad()
            (loss + balance).backward()
            for total, p in zip(gradients, model.parameters(), strict=True):
                total += p.grad / len(members)
            logged = here.get(replica, {}).get("loss")
            if logged is not None:
                worst = max(worst, abs(logged - loss.item()))
        for total, p in zip(gradients, model.parameters(), strict=True):
            p.grad = total
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        before = members
    return worst


def _members(lines: Mapping[int, Mapping[str, Any]], before: set[int]) -> set[int]:
    """Replicas whose gradients are in a step: those that logged a loss, and, where there were more,
    one that made the step before and was killed between the average and its log.
    """
    count = max(line["replicas"] for line in lines.values())
    members = {replica for replica, line in lines.items() if line["loss"] is not None}
    missing = [replica for replica in sorted(before - members) if replica not in lines]
    members |= set(missing[:count - len(members)])
    assert len(members) == count, (lines, before)
    return members


def page(made: Sequence[Killed], worst: float) -> str:
    """The committed table."""
    rows = "\n".join(f"| {k.replica} | {k.at} | {k.resumed_s:.1f} | {k.lost} | {k.back} | "
                     f"{k.back_s:.1f} |" for k in made)
    return f"""# Replicas that come and go

{REPLICAS} replicas of `scripts/train_plain.py` under torchft 0.2 on one machine (CPU, gloo,
heartbeat timeout 2 s): {len(made)} times a replica drawn at random is killed (SIGKILL) after a
random step, and started again up to one second later. Every loss that a replica logged equals the
loss of one process that averages the gradients of the same members in every step; the largest
difference is {worst:.1e}. No run was stopped and no step of the survivors was trained twice.
*Others' next step*: seconds from the kill to it. *Back*: its first step again, and seconds from its
start to it. Written by `python -m tests.faults.replicas`; how to run replicas:
[faults](../faults.md).

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
