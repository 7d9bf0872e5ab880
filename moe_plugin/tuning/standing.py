"""Replicas of heavily loaded experts in a training layer. The replicas are placed once for several
steps (`planner.standing`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.config.parallel import MEASURED, ParallelConfig
from moe_plugin.experts import Experts
from moe_plugin.planner.peer_choice import Throughput
from moe_plugin.planner.spill import Counts, SpillCosts, SpillPlan
from moe_plugin.planner.standing import StandingReplicas
from moe_plugin.records import ExpertRows, RowCounts
from moe_plugin.routing.counting import counts
from moe_plugin.tuning.timer import mark, seconds_between

log = logging.getLogger(__name__)


class LayerReplicas:
    """A `dispatch.base.SpillPlanner` that changes its plan only between steps.

    A recomputed forward pass therefore uses the same plan as the original pass.

    Args:
        parallel: parallelism settings of the layer.
        comm: group of ranks among which the layer's experts are distributed.
        experts: experts of the layer.
        costs: model of the costs of a call; see `planner.spill.SpillCosts`.

    Attributes:
        standing: object that decides where replicas are placed.
        speeds: object that measures the speed of this rank, or None if speeds are configured or
            assumed to be equal.
    """

    def __init__(self, parallel: ParallelConfig, comm: Comm, experts: Experts,
                 costs: SpillCosts) -> None:
        self.comm, self.experts, self._paused = comm, experts, False
        self.given = parallel.rank_speeds(comm.size)
        self.speeds = MeasuredSpeeds(comm, experts) if parallel.speeds == MEASURED else None
        self.standing = StandingReplicas(comm.size, costs, parallel.guests, parallel.replan)

    def __call__(self, counts_WV: Counts) -> SpillPlan | None:
        """Return the plan for a call. In training, the call's load is added to the statistics."""
        if self._paused:
            return None
        if counts(self.experts.training):
            self.standing.add(counts_WV)
        return self.standing.plan(counts_WV)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager inside which no plans are made and loads are ignored."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def finish_step(self) -> None:
        """Finish an optimizer step.

        If replicas are about to be placed and speeds are measured, all ranks must call this method.
        """
        if not self.standing.finish_step():
            return
        before = self.standing.placed
        self.standing.place(self.given if self.speeds is None else self.speeds.agreed())
        placed = self.standing.placed
        if placed != before and self.comm.rank == 0:
            log.info("expert slots of %d ranks: %s", self.comm.size,
                     "no replicas" if placed is None else list(placed.logical))


class MeasuredSpeeds:
    """The measured speed of each rank's experts in rows per second. Speeds are averaged like the
    throughput in SWARM.

    Only the forward passes of experts are measured, because these passes do not wait for other
    ranks.

    Args:
        comm: the ranks.
        experts: experts of the layer. Hooks on these experts are used for the measurement.
    """

    def __init__(self, comm: Comm, experts: Experts) -> None:
        self.comm, self._average = comm, Throughput()
        self._rows = 0
        self._marks: list[Any] = []
        experts.register_forward_pre_hook(self._before)
        experts.register_forward_hook(self._after)

    def agreed(self) -> list[float] | None:
        """Return the speeds of all ranks, or None if no rank has computed any rows. All ranks
        return the same speeds.

        The mean speed of the other ranks is used for a rank that has not computed any rows. All
        ranks must call this method. On a GPU, the host waits for the device.
        """
        seconds = sum(seconds_between(start, end) for start, end in self._marks)
        if self._rows and seconds > 0:
            self._average.add(self._rows, seconds)
        self._rows = 0
        self._marks = []
        mine_1 = torch.tensor([self._average.value or 0.0], dtype=torch.float64)
        speeds = self.comm.hosts.all_gather(mine_1).tolist()
        known = [speed for speed in speeds if speed]
        mean = sum(known) / len(known) if known else 0.0
        return [speed or mean for speed in speeds] if known else None

    def _before(self, experts: Experts, args: tuple[ExpertRows]) -> None:
        self._start = mark(args[0].x.device)

    def _after(self, experts: Experts, args: tuple[ExpertRows], output: Tensor) -> None:
        rows = args[0].rows
        if experts.training and isinstance(rows, RowCounts) and rows.total:
            self._rows += rows.total
            self._marks.append((self._start, mark(output.device)))
