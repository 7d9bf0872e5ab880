"""Choice of the fastest all-to-all algorithm (`all_to_all: auto`), and exchanges that also serve as
trials.

The fastest algorithm is either predicted by a calibrated model or measured. All ranks use the same
algorithm. The output of a trial is used like the output of any other exchange.
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
# comparing the smallest times would favour candidates with widely varying times
RULES = TunerSettings(tries=None, watch=math.inf, each=True,
                      contest=ContestRules(warm_up=1, ordered=True, smallest=False))


def bucket_of(size: float) -> int:
    """Return the base-2 logarithm of a size in bytes, rounded up."""
    return max(int(size) - 1, 0).bit_length()


def turn(tuner: Tuner[Any, str], bucket: Any, x: Tensor) -> tuple[str, bool]:
    """Return the candidate to use in this call, and whether the call must be timed.

    All ranks return the same values. Calls that are captured in a CUDA graph are never trials.
    """
    if capturing(x.device):
        return tuner.latest(bucket).choice, False
    name = tuner.choose(bucket)
    return name, tuner.wants_time(bucket)


def trial(tuner: Tuner[Any, str], bucket: Any, name: str, comm: Comm, x: Tensor,
          run: Callable[[str], Tensor], what: str) -> Tensor:
    """Run a candidate as a trial, record the time of the slowest rank, and return the candidate's
    output.

    Args:
        tuner: tuner that records the time.
        bucket: load bucket of the call.
        name: name of the candidate; see `turn`.
        comm: the group.
        x: input tensor.
        run: function that runs the candidate with the given name.
        what: description of the trial for the log line that reports a decision.
    """
    # all ranks begin together, so that delays of earlier work are not part of the measured time
    comm.agree_max([0.0])
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
    """Selects the all-to-all algorithm for the exchanges of one group. The tuner is stored in the
    state of the group.

    Each bucket contains the sizes, in bytes per rank, between two consecutive powers of two.
    """

    def __init__(self, comm: Comm) -> None:
        for reason, names in algorithms.left_out(comm).items() if comm.rank == 0 else ():
            log.info("all-to-all auto excludes %s: %s", ", ".join(names), reason)
        self.names = algorithms.candidates(comm)
        self.cluster = comm.state.get(Calibration).cluster
        self.tuner: Tuner[int, str] = Tuner(lambda bucket: dict.fromkeys(self.names), RULES)
        self.uneven_calls, self.uneven_bytes = 0, 0.0
        self.trials = 0  # number of trials so far, equal on all ranks

    @classmethod
    def of(cls, comm: Comm) -> ExchangeTuner:
        """Return the tuner of a group. The tuner is created on first use."""
        return comm.state.get(cls, lambda: cls(comm))

    def size(self, comm: Comm, x: Tensor, even: bool) -> float:
        """Return the number of bytes per rank. The number is the same on all ranks.

        If ranks send different amounts, they agree on a size in the first call, and later only
        occasionally, because the choice of an algorithm does not need the exact size.
        """
        own_bytes = float(x.numel() * x.element_size())
        if even:
            return own_bytes
        if self.uneven_calls % AGREE_EVERY == 0:
            self.uneven_bytes = comm.agree_max([own_bytes])[0]
        self.uneven_calls += 1
        return self.uneven_bytes

    @property
    def exploring(self) -> bool:
        """True if trials of any size are pending."""
        return any(self.tuner.exploring(bucket) for bucket in self.tuner.entries)

    def chosen(self, comm: Comm, size: float) -> str | None:
        """Return the algorithm for exchanges of `size` bytes per rank.

        With a cluster file, the choice is predicted. Without a cluster file, it is measured, and
        None is returned if there have been too few trials.
        """
        if self.cluster is None:
            known = self.tuner.known(bucket_of(size))
            return self.tuner.latest(bucket_of(size)).choice if known else None
        nodes = comm.topology.nodes
        shape = self.cluster.resized(len(nodes), max(map(len, nodes)))
        return min((name for name in self.names if name in COSTS),
                   key=lambda name: predict(shape, name, size).seconds)


class AutoAllToAll(Exchange):
    """An all-to-all that uses the fastest registered algorithm for each size.

    With a cluster file, the choice is predicted. Without a cluster file, algorithms are measured in
    the first calls, and the choice is checked occasionally afterwards. Algorithms are excluded if
    the group does not meet their requirements, and the reason is logged. All ranks use the same
    algorithm in every call.
    """

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        return self.resolve(comm, x, send, recv)(comm, x, send, recv)

    def resolve(self, comm: Comm, x: Tensor, send: Sequence[int] | None,
                recv: Sequence[int] | None) -> Exchange:
        """Return the exchange to run in this call.

        All ranks must call this method in the same order. If the exchange is a trial, it must not
        run in the background, because it is timed.
        """
        tuner = ExchangeTuner.of(comm)
        if tuner.cluster is None and len(tuner.names) == 1:
            return algorithms.get(tuner.names[0])
        size = tuner.size(comm, x, send is None and recv is None)
        if tuner.cluster is not None:
            name = tuner.chosen(comm, size)
            assert name is not None  # a cluster file predicts it
            return algorithms.get(name)
        name, timed = turn(tuner.tuner, bucket_of(size), x)
        tuner.trials += timed
        return _Trial(tuner.tuner, bucket_of(size), name) if timed else algorithms.get(name)


@dataclass(frozen=True)
class _Trial(Exchange):
    tuner: Tuner[int, str]
    bucket: int
    name: str
    in_background = False  # the trial is measured, and ranks agree inside of it

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        return trial(self.tuner, self.bucket, self.name, comm, x,
                     lambda name: algorithms.get(name)(comm, x, send, recv),
                     f"all-to-all auto for about {x.numel() * x.element_size()} bytes per rank")


auto = algorithms.register("auto")(AutoAllToAll())
