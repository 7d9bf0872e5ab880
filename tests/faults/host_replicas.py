"""Replicas of fairseq-train and of Megatron's training script under torchft are killed at random
steps and come back; their losses must be those of an uninterrupted run with the same members.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from tests.faults import replica_hosts
from tests.faults.recorded import RECORD, Step, batches_of, set_cap, steps_of
from tests.faults.replicas import Job, Killed, kills_of
from tests.hosts import kills
from tests.preloaded import Finished, Server

JOB_S = 3600.0


@dataclass
class HostJob(Job):
    """A lighthouse and replicas of a host, in processes of this server. fails: by replica
    which attempts fail, see `recorded`; kills begin after them.
    """

    host: str = ""
    data: str = ""
    server: Server | None = None
    fails: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    ended: list[Finished] = field(default_factory=list)

    def begin(self) -> None:
        """See `Job.begin`."""
        for replica, plan in self.fails.items():
            self.plan(replica, plan)
        self._thread = Thread(target=lambda: self.ended.append(self.server.run(
            self.replicas, replica_hosts.supervise, self.host, str(self.folder), self.data,
            self.steps, self.lighthouse, environment=kills.environment(), timeout_s=JOB_S)))
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        (self.folder / "end").touch()
        for path in self.folder.glob("*.pid"):
            os.kill(int(path.read_text()), signal.SIGKILL)
        self._thread.join()
        super().__exit__()

    def ready(self) -> bool:
        """See `Job.ready`."""
        return all(sum("attempt" in line for line in self.lines(replica, RECORD))
                   > max(plan.get("attempts", [0])) for replica, plan in self.fails.items())

    def kill(self, replica: int) -> None:
        """See `Job.kill`."""
        path = self.folder / f"{replica}.pid"
        (self.folder / f"{replica}.hold").touch()
        os.kill(int(path.read_text()), signal.SIGKILL)
        self.until(lambda: not path.exists())

    def start(self, replica: int) -> None:
        """Let it come back."""
        (self.folder / f"{replica}.hold").unlink()

    def finish(self) -> None:
        """See `Job.finish`."""
        (self.folder / "finish").touch()
        set_cap(self.folder, self.steps)
        self.until(lambda: bool(self.ended))
        assert self.ended[0].code == 0, self.ended[0].log[-3000:] + self.logs()

    def lines(self, replica: int, name: str = "log.jsonl") -> list[dict[str, Any]]:
        """See `Job.lines`."""
        found = super().lines(replica, name)
        if self.host == "fairseq" or name == RECORD:
            return found
        return [{"step": line["iteration"], "loss": line["lm_loss"], "replicas": line["replicas"]}
                for line in found]

    def batches(self, replica: int, made: Mapping[int, Step]) -> dict[int, Any]:
        """The batch that this replica had in a step, where its record has them."""
        by_attempt = batches_of(self.lines(replica, RECORD))
        attempts = {step: {**at.logged, **at.attempts}.get(replica) for step, at in made.items()}
        return {step: by_attempt[attempt] for step, attempt in attempts.items()
                if attempt in by_attempt}


def run(job: HostJob, wanted: int, seed: int) -> tuple[list[Killed], float]:
    """The kills of a job, and the largest difference of a loss to that of the uninterrupted run."""
    job.folder.mkdir(parents=True)
    made = kills_of(job, wanted, seed)
    logs = [job.lines(replica) for replica in range(job.replicas)]
    records = [job.lines(replica, RECORD) for replica in range(job.replicas)]
    for log, record in zip(logs, records, strict=True):  # it logs what it made
        assert {line["step"] for line in log} <= {line.get("step") for line in record}
    steps = steps_of(records, job.steps)
    table = {step: sorted(at.attempts) for step, at in steps.items()}
    done = job.server.run(
        job.replicas, replica_hosts.replay, job.host, str(job.folder), job.data, job.steps, table,
        [job.batches(replica, steps) for replica in range(job.replicas)],
        environment=kills.environment(), timeout_s=JOB_S)
    assert done.code == 0, done.log[-5000:]
    wanted_logs = [job.lines(replica, "replay.jsonl") for replica in range(job.replicas)]
    return made, difference(logs, wanted_logs)


def difference(logs: Sequence[Sequence[Mapping[str, Any]]],
               wanted: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """The largest difference of a logged loss."""
    worst = 0.0
    for lines, other in zip(logs, wanted, strict=True):
        by_step = {line["step"]: line["loss"] for line in other}
        worst = max(worst, *(abs(line["loss"] - by_step[line["step"]])
                             for line in lines if line["loss"] is not None))
    return worst
