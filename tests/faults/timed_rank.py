"""A rank of a run whose time is counted: the host's own program, that writes when it started and
when each of its steps ended.

    torchrun ... -m tests.faults.timed_rank '{"host": "fairseq", ...}'     # the fields of `Timed`
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.faults import recorded
from tests.faults.replica_hosts import Replica, run_program

STARTS, TIMES, TRACE = "starts.jsonl", "times.jsonl", "trace"


@dataclass(frozen=True)
class Timed:
    """A run, or one replica of it.

    Attributes:
        folder: of this run or replica: times and traces.
        arguments: of the host's program, of a run without replicas.
        pause_s: that a rank waits in each step, as for an accelerator.
        data, steps, lighthouse, number: of a replica; lighthouse "": it is none.
    """

    host: str
    folder: str
    arguments: tuple[str, ...] = ()
    pause_s: float = 0.0
    data: str = ""
    steps: int = 0
    lighthouse: str = ""
    number: int = 0

    @property
    def traced(self) -> tuple[str, ...]:
        """The flags by which either host writes what its tokens chose."""
        return "--moe-stats-trace", str(Path(self.folder, TRACE))


def note_times(folder: Path, rank: int, pause_s: float) -> None:
    """Write the start of this process, and on rank 0 the end of each step, of either host."""
    from moe_plugin.observe.features import LayerRecords

    recorded.write(folder / STARTS, rank=rank, pid=os.getpid(),
                   at=psutil.Process().create_time())
    of_class = LayerRecords.after_step

    def after_step(self: Any, facts: Any) -> None:
        of_class(self, facts)
        if rank == 0:
            loss = facts.loss if facts.logged is None else facts.logged.loss
            recorded.write(folder / TIMES, step=facts.number, made=facts.made, at=time.time(),
                           life=os.getpid(), loss=loss)
        time.sleep(pause_s)

    LayerRecords.after_step = after_step  # type: ignore[method-assign]


def main(given: str) -> None:
    """The program."""
    run, rank = Timed(**json.loads(given)), int(os.environ["RANK"])
    folder = Path(run.folder)
    note_times(folder, rank, run.pause_s)
    if run.lighthouse:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
        run_program(run.host, Replica(str(folder.parent), run.data, run.steps, run.lighthouse,
                                      run.number, extra=run.traced))
    elif run.host == "fairseq":
        from tests.hosts.fairseq.commands import run_command

        run_command("fairseq-train", [*run.arguments, *run.traced])
    else:
        from moe_plugin.hosts.megatron import launch

        raise SystemExit(launch.main(["--moe-cpu", *run.arguments, *run.traced]))


if __name__ == "__main__":
    main(sys.argv[1])
