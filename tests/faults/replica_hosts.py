"""One replica of a host's real program in a forked process: as a member of a job under torchft, or
in an uninterrupted run with the same members, where all replicas stay and gloo averages.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.training.resilience import elastic
from tests.distributed import free_port
from tests.faults import recorded

PAUSE_S = 0.12
Members = Mapping[int, Sequence[int]]  # by step, from 1: replicas whose gradients are averaged


@dataclass(frozen=True)
class Replica:
    """folder: of the job. data: of the host. steps: of the job. log: name of its log in its own
    folder. extra: arguments of the host.
    """

    folder: str
    data: str
    steps: int
    lighthouse: str
    number: int
    log: str = "log.jsonl"
    extra: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Its log."""
        return Path(self.folder, str(self.number), self.log)

    def write(self, **line: Any) -> None:
        """Add a line to its log."""
        recorded.write(self.path, **line)

    def pause(self) -> None:
        """Before a step: moments for kills."""
        if not Path(self.folder, "finish").exists():
            time.sleep(PAUSE_S)


def supervise(host: str, folder: str, data: str, steps: int, lighthouse: str) -> None:
    """A rank of a server's job: starts its replica, again where it was killed, as torchrun does."""
    replica = Replica(folder, data, steps, lighthouse, number_of_replica())
    replica.path.parent.mkdir(exist_ok=True)
    pid_file, hold = Path(folder, f"{replica.number}.pid"), Path(folder, f"{replica.number}.hold")
    while not Path(folder, "end").exists():
        pid = os.fork()
        if not pid:
            _in_child(host, replica)
        pid_file.with_suffix(".new").write_text(str(pid))
        pid_file.with_suffix(".new").rename(pid_file)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pid_file.unlink()
        if code != -signal.SIGKILL:
            raise SystemExit(code)
        while hold.exists():
            time.sleep(0.01)


def number_of_replica() -> int:
    """Of this replica, which has one rank."""
    number = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    return number


def _in_child(host: str, replica: Replica) -> None:
    code = 1
    try:
        out = os.open(Path(replica.folder, f"{replica.number}.out"),
                      os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(out, stream)
        run_program(host, replica)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - the log is the report
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_program(host: str, replica: Replica) -> None:
    """The host's program as this replica, which records its steps."""
    _replace(recorded.recorded(replica.path.parent, replica.number))
    PROGRAMS[host](replica, {})


def replay(host: str, folder: str, data: str, steps: int, members: Members,
           batches: Sequence[Mapping[int, Any]], trace: str = "") -> None:
    """A rank: its replica in the uninterrupted run. batches: of each replica by step, see
    `_fairseq`. trace: folder in its own one for what its tokens choose.
    """
    number = number_of_replica()
    Path(folder, "finish").touch()
    traced = ("--moe-stats-trace", f"{folder}/{number}/{trace}") if trace else ()
    replica = Replica(folder, data, steps, "none", number, "replay.jsonl", traced)

    def replayed(*args: Any, **kwargs: Any) -> Replayed:
        return Replayed(replica, members, len(batches), *args[2:4])

    _replace(replayed)
    PROGRAMS[host](replica, batches[number])


def _replace(made: Callable[..., Any]) -> None:
    elastic.ElasticReplica = made  # type: ignore[misc]


class Replayed:
    """In the place of `ElasticReplica`: step by step the mean of the members' gradients, which all
    replicas take. The first member of the first step gives its state to all.
    """

    def __init__(self, replica: Replica, members: Members, size: int, state: Callable[[], Any],
                 load: Callable[[Any], None]) -> None:
        store = dist.FileStore(f"{replica.folder}/store", size)
        self._group = dist.ProcessGroupGloo(store, replica.number, size)
        self._replica, self._table, self._step = replica, members, 0
        self._state, self._load = state, load
        self.members, self.healed = 0, False

    def average(self, gradients: Sequence[Tensor | None]) -> bool:
        """See `ElasticReplica.average`."""
        self._step += 1
        who, number = self._table[self._step], self._replica.number
        self.members, self.healed = len(who), self._step == 1 and number not in who
        if self._step == 1:
            self._share(who)
        here = [gradient for gradient in gradients if gradient is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in here):
            # in one piece, so that sums are added in the order of the run that is compared
            alike = [gradient for gradient in here if gradient.dtype == dtype]
            total_N = torch.cat([gradient.reshape(-1) for gradient in alike])
            total_N *= number in who
            self._group.allreduce([total_N]).wait()
            if dtype.is_floating_point:
                total_N /= len(who)
            parts = total_N.split([gradient.numel() for gradient in alike])
            for gradient, part_N in zip(alike, parts, strict=True):
                gradient.copy_(part_N.view_as(gradient))
        return True

    def _share(self, who: Sequence[int]) -> None:
        first, path = min(who), Path(self._replica.folder, "first.pt")
        if self._replica.number == first:
            torch.save(self._state(), path)
        self._group.barrier().wait()
        if self._replica.number != first:
            self._load(torch.load(path, weights_only=False))

    def close(self) -> None:
        """See `ElasticReplica.close`."""


def _fairseq(replica: Replica, batches: Mapping[int, Any]) -> None:
    """`fairseq-train`; its log has the loss of each step, its record the batch of each attempt.
    batches: ids of samples by step, in place of those that come in turn.
    """
    from fairseq.tasks.fairseq_task import FairseqTask

    from moe_plugin.hosts.fairseq import trainer as of_host
    from moe_plugin.routing import contract as of_routers
    from tests.hosts.fairseq.commands import run_command
    from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE

    of_task, of_trainer = FairseqTask.train_step, of_host.MoETrainer.train_step
    finish, losses, finished = of_routers.finish_step_of_any, [], []

    def forward_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, size, logged = of_task(self, *args, **kwargs)
        losses.append(float(loss) / size)
        return loss, size, logged

    def update(self: Any, samples: Any, raise_oom: bool = False) -> Any:
        before = self.get_num_updates()
        replica.pause()
        if before + 1 in batches:
            data = self.task.dataset("train")
            samples = [data.collater([data[i] for i in ids]) for ids in batches[before + 1]]
        recorded.write(replica.path.with_name(recorded.RECORD),
                       ids=[sample["id"].tolist() for sample in samples])
        finished.clear()
        logged = of_trainer(self, samples, raise_oom)
        replicas = self.run.find(elastic.ReplicaSteps)
        made = self.get_num_updates() > before and not replicas.lost
        assert len(finished) == made, "routers end a step that was lost"
        if made:
            now = replicas.replica
            replica.write(step=self.get_num_updates(), replicas=now.members,
                          loss=None if now.healed else losses[-1])
        return logged

    def finish_step(model: Any) -> None:
        finished.append(finish(model))

    FairseqTask.train_step, of_host.MoETrainer.train_step = forward_backward, update
    of_routers.finish_step_of_any = finish_step
    run_command("fairseq-train", (
        f"{replica.data} {LANGUAGE_MODEL} {MOE} {DROPLESS} --max-update {replica.steps} --no-save "
        f"--disable-validation --moe-lighthouse {replica.lighthouse} --moe-replica "
        f"{replica.number} --moe-timeout 60 --moe-router sigmoid_bias --moe-router-bias-rate 0.1 "
        f"--seed {replica.number + 1}").split() + list(replica.extra))


def _megatron(replica: Replica, _: Mapping[int, Any]) -> None:
    """Megatron's own training loop, with a router whose bias follows the loads of all replicas."""
    from moe_plugin.hosts.megatron import launch
    from moe_plugin.hosts.megatron.script import Script
    from tests.hosts.megatron.test_megatron_script import FLAGS
    from tests.hosts.megatron.training import SCRIPT

    of_script = Script.around_step

    def around_step(self: Any, given: Any, step: Any) -> Any:
        replica.pause()
        return of_script(self, given, step)

    Script.around_step = around_step  # type: ignore[method-assign]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    sys.modules.pop("moe_plugin.hosts.megatron.spec", None)  # it follows the script's arguments
    raise SystemExit(launch.main([
        "--moe-cpu", SCRIPT, *FLAGS, "--global-batch-size", "4", "--optimizer", "sgd", "--lr",
        "0.1", "--min-lr", "0.1", "--moe-router", "sigmoid_bias", "--train-iters",
        str(replica.steps), "--log-file", str(replica.path), "--moe-timeout", "60",
        "--moe-lighthouse", replica.lighthouse, "--moe-replica", str(replica.number), "--seed",
        str(replica.number + 1), *replica.extra]))


PROGRAMS = {"fairseq": _fairseq, "megatron": _megatron}
