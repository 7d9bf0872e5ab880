"""Replicas of experts with a high load. The replicas stay in place for several training steps, and
each replica computes a fraction of the rows of its expert.

Every n steps, the expert loads of the last n steps determine which replicas each rank stores. The
best of three placements is used. The first placement is EPLB with experts that remain on their own
rank (`replicas.host_replicas`). The second placement is EPLB with experts that may move to any rank
(`replicas.host_placed`). The third placement consists of the experts that `least_loaded` would lend
(`spill.plan_spill`). Each rank that stores an expert computes a fraction of the expert's rows.
These fractions are computed from the throughputs of the ranks by SWARM's interleaved weighted
round-robin scheduling (`peer_choice.Wiring`), except that ties are resolved in favor of the rank
with the lowest index rather than randomly. Until the next placement, the rows of every call are
divided according to these fractions. A call is executed like any other plan of `spill`: owners send
their weights to the replicas and receive the gradients of these weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from moe_plugin.planner.replicas import Loads, ReplicaMap, host_placed, host_replicas, hosting
from moe_plugin.planner.spill import Counts, SpillCosts, SpillPlan, plan_spill, round_shares, saves

TASKS = 32  # number of parts into which a rank's share of all rows is divided
SLACK = 0.02  # of the busiest rank's time; a smaller gain does not justify a replica
Shares = Mapping[int, Mapping[int, float]]  # share of rows by replicated expert and by rank


def wired_shares(loads: Loads, placed: ReplicaMap, speeds: Sequence[float]) -> Shares:
    """For each replicated expert, return the fraction of its rows that each rank computes.

    The load of each expert is divided into tasks. Each task is assigned to the rank that is
    predicted to be idle first, among the ranks that store the expert. Experts that are stored on a
    single rank are assigned first. Replicated experts are then assigned in the order of decreasing
    load, so that small loads fill the remaining gaps. Replicas with the smallest loads are removed
    as long as this increases the time of the busiest rank by at most the fraction `SLACK`. The
    removed replicas would save less time than it takes to send their weights.

    Args:
        loads: number of rows of each expert. At least one number must not be zero.
        placed: describes which ranks store a replica of each expert.
        speeds: speed of each rank, for example in rows per second.
    """
    holders = {e: frozenset(placed.holders(e)) for e in placed.physical}
    several = sorted((e for e in holders if len(holders[e]) > 1), key=lambda e: (loads[e], e))
    best = _wired(loads, holders, speeds)
    most = _busiest(best, loads, speeds) * (1 + SLACK)
    low, high = 0, len(several)  # replicas of the first `low` experts are not needed
    while low < high:
        middle = (low + high + 1) // 2
        fewer = {**holders, **{e: frozenset({e // _local(loads, speeds)})
                               for e in several[:middle]}}
        shares = _wired(loads, fewer, speeds)
        if _busiest(shares, loads, speeds) <= most:
            best, low = shares, middle
        else:
            high = middle - 1
    return best


def _local(loads: Loads, speeds: Sequence[float]) -> int:
    """Return the number of experts that each rank owns."""
    return len(loads) // len(speeds)


def _wired(loads: Loads, holders: Mapping[int, frozenset[int]], speeds: Sequence[float]) -> Shares:
    busy, task = [0.0] * len(speeds), sum(loads) / (len(speeds) * TASKS)
    for expert, ranks in holders.items():
        if len(ranks) == 1:
            busy[min(ranks)] += loads[expert] / speeds[min(ranks)]
    shares: dict[int, dict[int, float]] = {}
    for expert in sorted((e for e in holders if len(holders[e]) > 1), key=lambda e: (-loads[e], e)):
        tasks, tasks_by_rank = max(1, math.ceil(loads[expert] / task)), Counter[int]()
        for _ in range(tasks):
            rank = min(holders[expert], key=lambda w: (busy[w], w))
            busy[rank] += loads[expert] / tasks / speeds[rank]
            tasks_by_rank[rank] += 1
        shares[expert] = {rank: tasks_by_rank[rank] / tasks for rank in sorted(tasks_by_rank)}
    return shares


def _busiest(shares: Shares, loads: Loads, speeds: Sequence[float]) -> float:
    """Return the time that the busiest rank needs to compute its rows. The unit is the time of one
    row on a rank of speed 1.
    """
    rows, local = [0.0] * len(speeds), _local(loads, speeds)
    for expert, load in enumerate(loads):
        for rank, share in shares.get(expert, {expert // local: 1.0}).items():
            rows[rank] += share * load
    return max(n / speed for n, speed in zip(rows, speeds, strict=True))


def evenest(maps: Sequence[ReplicaMap], loads: Loads,
            speeds: Sequence[float]) -> tuple[ReplicaMap, Shares]:
    """Return the placement for which the busiest rank finishes first, and the fraction of each
    expert's rows that each rank computes under this placement.

    If the times of several placements differ by at most the fraction `SLACK`, the first of them is
    returned.
    """
    shares = [wired_shares(loads, placed, speeds) for placed in maps]
    times = [_busiest(one, loads, speeds) for one in shares]
    return next((placed, one) for placed, one, seconds in zip(maps, shares, times, strict=True)
                if seconds <= min(times) * (1 + SLACK))


class StandingReplicas:
    """The replicas of the experts of one layer. All ranks compute the same placement of replicas.

    Args:
        ranks: number of ranks, called W.
        costs: predicted costs of moving rows and lending experts.
        guests: maximum number of experts that a rank may borrow at the same time.
        every: number of training steps between consecutive placements.

    Attributes:
        placed: the experts that each rank stores, or None if no expert is replicated.
        shares: for each replicated expert, the fraction of its rows that each rank computes.
    """

    def __init__(self, ranks: int, costs: SpillCosts, guests: int, every: int) -> None:
        self.ranks, self.costs, self.guests, self.every = ranks, costs, guests, every
        self.placed: ReplicaMap | None = None
        self.shares: Shares = {}
        self._loads: list[int] = []
        self._calls = self._steps = 0

    def plan(self, counts_WV: Counts) -> SpillPlan | None:
        """Return the plan of a call, or None if every rank computes exactly the rows of the experts
        that it owns.
        """
        if not self.shares:
            return None
        amounts = {}
        for expert, shares in self.shares.items():
            rows = sum(row[expert] for row in counts_WV)
            amounts[expert] = [0] * self.ranks
            for rank, given in zip(shares, round_shares(list(shares.values()), rows), strict=True):
                amounts[expert][rank] = given
        return SpillPlan(counts_WV, amounts)

    def add(self, counts_WV: Counts) -> None:
        """Add the expert loads of one training call to the sum since the last placement."""
        self._calls += 1
        loads = [sum(column) for column in zip(*counts_WV, strict=True)]
        before = self._loads or [0] * len(loads)
        self._loads = [a + b for a, b in zip(before, loads, strict=True)]

    def finish_step(self) -> bool:
        """Count one training step, and return whether `place` must be called now."""
        self._steps += 1
        return self._steps % self.every == 0

    def place(self, speeds: Sequence[float] | None = None) -> None:
        """Choose a placement of replicas from the mean loads since the last placement. If no
        placement saves time, no expert is replicated.

        Args:
            speeds: speed of each rank, in any unit. By default, all ranks are equally fast.
        """
        loads, calls = self._loads, self._calls
        self._loads, self._calls = [], 0
        self.placed, self.shares = None, {}
        if not any(loads):
            return
        pace = [1.0] * self.ranks if speeds is None else [s / max(speeds) for s in speeds]
        local = len(loads) // self.ranks
        # rows of a mean call, assuming that every rank has the same tokens
        mean_WV = [[round(load / calls / self.ranks) for load in loads]] * self.ranks
        lent = plan_spill(mean_WV, self.costs, "least_loaded", self.guests,
                          None if speeds is None else pace)
        placed, shares = evenest(
            [host_replicas(loads, self.ranks, self.guests, pace),
             host_placed(loads, self.ranks, self.guests),
             *([] if lent is None else [hosting(
                 [lent.guests(rank) for rank in range(self.ranks)], local, self.guests)])],
            loads, pace)
        self.shares = {e: given for e, given in shares.items()
                       if any(rank != e // local for rank in given)}
        plan = self.plan(mean_WV)
        if plan is not None and saves(plan.counts_WV, plan.amounts, self.costs,
                                      None if speeds is None else pace):
            self.placed = placed
        else:
            self.shares = {}

    def state(self) -> dict[str, Any]:
        """Return the state as plain values, which can be stored in a checkpoint."""
        return {"ranks": self.ranks, "steps": self._steps, "calls": self._calls,
                "loads": self._loads, "slots": None if self.placed is None else self.placed.logical,
                "shares": {e: dict(given) for e, given in self.shares.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that was returned by `state`, possibly in an earlier run.

        A state from a run with a different number of ranks is ignored, and placement starts from
        scratch.
        """
        if state.get("ranks") != self.ranks:
            return
        self._steps, self._calls = state["steps"], state["calls"]
        self._loads, slots = list(state["loads"]), state["slots"]
        self.placed = None if slots is None else ReplicaMap(tuple(slots), self.ranks)
        self.shares = {int(e): {int(rank): share for rank, share in given.items()}
                       for e, given in state["shares"].items()}
