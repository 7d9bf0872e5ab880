"""`auto`: the algorithm that is fastest here, by measurement or by a calibrated model, agreed by
all ranks.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_plugin.comm import algorithms
from moe_plugin.comm.base import Comm, Exchange
from moe_plugin.planner.all_to_all import COSTS, predict
from moe_plugin.planner.cluster import Cluster

log = logging.getLogger(__name__)
CANDIDATES: dict[str, Exchange] = {
    name: algorithms.get(name) for name in ("linear", "native", "2dh", "leader")
}
WARM_UP, TRIALS = 1, 6
AGREE_EVERY = 64
MARGIN = 0.03


@dataclass
class Trials:
    """Measures candidates in turn, then settles on the fastest. A pure state machine, equal on all
    ranks.

    names: candidates, the plainest first: a later one must be faster by `MARGIN` to replace it.
    """

    names: list[str]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    done: int = 0
    chosen: str | None = None

    def next(self) -> str:
        """The candidate to run now."""
        return self.chosen or self.names[self.done % len(self.names)]

    def record(self, seconds: float, agree: Callable[[list[float]], list[float]]) -> None:
        """How long it took. After the last trial `agree` (maximum over ranks) makes the ranks'
        times one, and so the choice.
        """
        self.seconds.setdefault(self.next(), []).append(seconds)
        self.done += 1
        if self.done == len(self.names) * (WARM_UP + TRIALS):
            # the median: the fastest of a few favours an algorithm whose times scatter
            self.settle(
                agree([statistics.median(self.seconds[name][WARM_UP:]) for name in self.names]))

    def settle(self, times: Sequence[float]) -> None:
        """Choose by the slowest rank's time of each candidate."""
        best = 0
        for i, value in enumerate(times):
            if value < times[best] * (1 - MARGIN):
                best = i
        self.chosen = self.names[best]
        self.seconds = {name: [value] for name, value in zip(self.names, times, strict=True)}


@dataclass
class Chooser:
    """What `auto` knows of one group. Lives with the group."""

    names: list[str]
    cluster: Cluster | None
    buckets: dict[int, Trials] = field(default_factory=dict)
    uneven_calls: int = 0
    uneven_bytes: float = 0.0

    @classmethod
    def of(cls, comm: Comm) -> Chooser:
        """The group's chooser; made at the first use, with a logged reason where there is nothing
        to choose.
        """
        if "chooser" not in comm.memo:
            flat = comm.topology.why_flat()
            names = ["linear"
                     ] + ["native"] * comm.receive_first + ([] if flat else ["2dh", "leader"])
            if flat:
                log.info("all-to-all auto falls back to linear: %s", flat)
            comm.memo["chooser"] = cls(names, comm.memo.get("cluster"))
        return comm.memo["chooser"]

    def size(self, comm: Comm, x: Tensor, even: bool) -> float:
        """Bytes a rank, equal on all ranks. Uneven exchanges agree at the first call and then now
        and again: the choice needs no exact size.
        """
        mine = float(x.numel() * x.element_size())
        if even:
            return mine
        if self.uneven_calls % AGREE_EVERY == 0:
            self.uneven_bytes = comm.agree_max([mine])[0]
        self.uneven_calls += 1
        return self.uneven_bytes

    def trials(self, size: float) -> Trials:
        """Of the bucket (a power of two of bytes) of this size."""
        bucket = max(int(size) - 1, 0).bit_length()
        if bucket not in self.buckets:
            self.buckets[bucket] = Trials(self.names)
            if len(self.names) == 1:
                self.buckets[bucket].chosen = self.names[0]
        return self.buckets[bucket]

    def by_model(self, comm: Comm, size: float) -> str:
        """The candidate of least predicted time."""
        shape = self.cluster.resized(len(comm.topology.nodes), max(map(len, comm.topology.nodes)))
        return min((name for name in self.names if name in COSTS),
                   key=lambda name: predict(shape, name, size).seconds)


class Auto(Exchange):
    """The fastest of linear, native, 2dh and leader for each size: by the cluster file where one is
    set, else measured in the first calls.

    On one node, or with one rank a node, only the linear ones are candidates, and the log says why.
    Ranks always agree.
    """

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        return self.resolve(comm, x, send, recv)(comm, x, send, recv)

    def resolve(self, comm: Comm, x: Tensor, send: Sequence[int] | None,
                recv: Sequence[int] | None) -> Exchange:
        """What to run for this call. Collective, in program order; a measured trial must not run in
        the background.
        """
        chooser = Chooser.of(comm)
        if chooser.cluster is None and len(chooser.names) == 1:
            return CANDIDATES[chooser.names[0]]
        size = chooser.size(comm, x, send is None and recv is None)
        if chooser.cluster is not None:
            return CANDIDATES[chooser.by_model(comm, size)]
        trials = chooser.trials(size)
        return CANDIDATES[trials.chosen] if trials.chosen else _Trial(trials)


@dataclass(frozen=True)
class _Trial(Exchange):
    trials: Trials
    in_background = False  # it is measured, and ranks agree in it

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        # all begin together: else the end of the last exchange is charged to this one
        comm.agree_max([0.0])
        _synchronise(x)
        start = time.perf_counter()
        out = CANDIDATES[self.trials.next()](comm, x, send, recv)
        _synchronise(out)
        self.trials.record(time.perf_counter() - start, comm.agree_max)
        if self.trials.chosen and comm.rank == 0:
            log.info(
                "all-to-all auto: %s for about %d bytes a rank (slowest rank's ms: %s)",
                self.trials.chosen,
                x.numel() * x.element_size(),
                ", ".join(f"{name} {1e3 * values[0]:.2f}"
                          for name, values in self.trials.seconds.items()))
        return out


def _synchronise(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


auto = algorithms.register("auto")(Auto())
