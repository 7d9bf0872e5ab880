"""`all_to_all: auto`: the fastest algorithm, by a calibrated model or measured, agreed by ranks;
and one trial of a collective or an all-to-all, measured while its result is used.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_plugin.comm import algorithms
from moe_plugin.comm.base import Comm
from moe_plugin.comm.exchange import Exchange
from moe_plugin.planner.all_to_all_cost import COSTS, predict
from moe_plugin.planner.trials import ContestRules
from moe_plugin.tuning.decisions import TunerSettings
from moe_plugin.tuning.default_hardware import Calibration
from moe_plugin.tuning.engine import Tuner
from moe_plugin.utils.machine import capturing, wait_for_device

log = logging.getLogger(__name__)
# the smallest time would favour a candidate whose times scatter
RULES = TunerSettings(tries=None, watch=math.inf, each=True,
                      contest=ContestRules(warm_up=1, ordered=True, smallest=False))


def bucket_of(size: float) -> int:
    """The logarithm of a size in bytes, rounded up."""
    return max(int(size) - 1, 0).bit_length()


def turn(tuner: Tuner[Any, str], bucket: Any, x: Tensor) -> tuple[str, bool]:
    """(candidate of this call, whether its time is wanted). Alike on all ranks; what goes to a CUDA
    graph is never a trial.
    """
    if capturing(x.device):
        return tuner.latest(bucket).choice, False
    name = tuner.choose(bucket)
    return name, tuner.wants_time(bucket)


def trial(tuner: Tuner[Any, str], bucket: Any, name: str, comm: Comm, x: Tensor,
          run: Callable[[str], Tensor], what: str) -> Tensor:
    """The result of a candidate in its trial; its time is that of the slowest rank.

    Args:
        tuner, bucket, name: of the candidate, see `turn`.
        x: what it takes.
        run: runs the candidate of this name.
        what: for the log, which says what is settled.
    """
    comm.agree_max([0.0])  # all begin together: else the end of what was before is charged to this
    wait_for_device(x.device)
    begun = time.perf_counter()
    out = run(name)
    wait_for_device(out.device)
    tuner.record(bucket, name, comm.agree_max([time.perf_counter() - begun])[0])
    for decision in tuner.pop_decisions():
        if decision.event == "settle" and comm.rank == 0:
            log.info("%s: %s (slowest rank, %s)", what, decision.choice, decision.why)
    return out


AGREE_EVERY = 64


class ExchangeTuner:
    """Chooses the algorithm for the exchanges of one group. Lives with the group.

    Buckets are powers of two of bytes per rank.
    """

    def __init__(self, comm: Comm) -> None:
        for reason, names in algorithms.left_out(comm).items() if comm.rank == 0 else ():
            log.info("all-to-all auto does not try %s: %s", ", ".join(names), reason)
        self.names = algorithms.candidates(comm)
        self.cluster = comm.state.get(Calibration).cluster
        self.tuner: Tuner[int, str] = Tuner(lambda bucket: dict.fromkeys(self.names), RULES)
        self.uneven_calls, self.uneven_bytes = 0, 0.0
        self.trials = 0  # made so far, equal on all ranks

    @classmethod
    def of(cls, comm: Comm) -> ExchangeTuner:
        """The group's tuner, made at the first use."""
        return comm.state.get(cls, lambda: cls(comm))

    def size(self, comm: Comm, x: Tensor, even: bool) -> float:
        """Bytes per rank, equal on all ranks. Uneven exchanges agree at the first call and then
        now and again: the choice needs no exact size.
        """
        mine = float(x.numel() * x.element_size())
        if even:
            return mine
        if self.uneven_calls % AGREE_EVERY == 0:
            self.uneven_bytes = comm.agree_max([mine])[0]
        self.uneven_calls += 1
        return self.uneven_bytes

    @property
    def exploring(self) -> bool:
        """Whether trials of any size are still to come."""
        return any(self.tuner.exploring(bucket) for bucket in self.tuner.entries)

    def chosen(self, comm: Comm, size: float) -> str | None:
        """The algorithm for exchanges of `size` bytes per rank: by the model where there is a
        cluster file, else by trials; None: there were too few.
        """
        if self.cluster is None:
            known = self.tuner.known(bucket_of(size))
            return self.tuner.latest(bucket_of(size)).choice if known else None
        nodes = comm.topology.nodes
        shape = self.cluster.resized(len(nodes), max(map(len, nodes)))
        return min((name for name in self.names if name in COSTS),
                   key=lambda name: predict(shape, name, size).seconds)


class AutoAllToAll(Exchange):
    """The fastest registered algorithm for each size: by the cluster file where one is set, else
    measured in the first calls and checked now and then.

    Those that need what the group lacks are not candidates, and the log says why. Ranks always
    agree.
    """

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        return self.resolve(comm, x, send, recv)(comm, x, send, recv)

    def resolve(self, comm: Comm, x: Tensor, send: Sequence[int] | None,
                recv: Sequence[int] | None) -> Exchange:
        """What to run for this call. Collective, in program order; a measured trial must not run in
        the background.
        """
        tuner = ExchangeTuner.of(comm)
        if tuner.cluster is None and len(tuner.names) == 1:
            return algorithms.get(tuner.names[0])
        size = tuner.size(comm, x, send is None and recv is None)
        if tuner.cluster is not None:
            return algorithms.get(tuner.chosen(comm, size))
        name, timed = turn(tuner.tuner, bucket_of(size), x)
        tuner.trials += timed
        return _Trial(tuner.tuner, bucket_of(size), name) if timed else algorithms.get(name)


@dataclass(frozen=True)
class _Trial(Exchange):
    tuner: Tuner[int, str]
    bucket: int
    name: str
    in_background = False  # it is measured, and ranks agree in it

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        return trial(self.tuner, self.bucket, self.name, comm, x,
                     lambda name: algorithms.get(name)(comm, x, send, recv),
                     f"all-to-all auto for about {x.numel() * x.element_size()} bytes per rank")


auto = algorithms.register("auto")(AutoAllToAll())
