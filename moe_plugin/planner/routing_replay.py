"""Replay a routing trace in the planner's simulation to choose a policy for overloaded experts, for
example before renting a cluster.

The trace contains the loads of all experts in each forward call of a layer. From these loads, the
load of the busiest rank is computed for each policy of `parallel.spill`. The predicted time of the
busiest rank includes matmuls, sent rows and lent weights, in the forward and backward passes
(`planner.spill.SpillCosts`). The predicted time is compared with the time under forced balance, in
which every rank sends the same number of rows to every expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.layer_cost import spill_costs
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.spill import (
    LEAST_GAIN,
    POLICIES,
    Counts,
    SpillCosts,
    SpillPlan,
    Spread,
    plan_spill,
)
from moe_plugin.planner.standing import StandingReplicas
from moe_plugin.planner.units import show_time
from moe_plugin.utils.messages import aligned, tracked

PARTS = ("early", "middle", "late")  # thirds of the steps
Calls = Mapping[Any, Sequence[Sequence[Counts]]]  # by layer: for each step, for each pass


@dataclass(frozen=True)
class CallTime:
    """Predicted times of one forward call of a layer.

    Attributes:
        seconds: time of the call under the policy.
        balanced: time in seconds of a call with the same number of rows under forced balance.
        lent: number of experts that are lent to other ranks in this call.
        third: in which third of the training run the call occurred, as an index (see `PARTS`).
    """

    seconds: float
    balanced: float
    lent: int
    third: int


@dataclass(frozen=True)
class PolicyTimes:
    """Predicted times of all calls under one policy. There is always at least one call."""

    policy: str
    calls: Sequence[CallTime]

    @property
    def mean(self) -> float:
        """Mean time per call in seconds."""
        return sum(one.seconds for one in self.calls) / len(self.calls)

    @property
    def lent(self) -> float:
        """Mean number of lent experts per call."""
        return sum(one.lent for one in self.calls) / len(self.calls)

    @property
    def worst(self) -> float:
        """The lowest throughput of any call, relative to the throughput of the same call under
        forced balance.
        """
        return min(one.balanced / one.seconds for one in self.calls)

    def share(self, third: int | None = None) -> float | None:
        """Return the total throughput of all calls, relative to their throughput under forced
        balance, or None if there are no calls.


        Args:
            third: index of the third of the training run to include. Defaults to all calls.
        """
        calls = [one for one in self.calls if third in (None, one.third)]
        if not calls:
            return None
        return sum(one.balanced for one in calls) / sum(one.seconds for one in calls)


def calls_of(traces: Sequence[Mapping[Any, Any]], experts: int, ranks: int | None) -> Calls:
    """For every call in the traces, return the number of rows by source rank and expert.

    Args:
        traces: routing trace of each rank (see `observe.traces.read_trace`).
        ranks: number of ranks over which the experts are distributed. Defaults to the number of
            ranks in the trace. For a smaller number, the data of several ranks in the trace is
            merged. For a larger number, the tokens of each rank are divided in order.

    Raises:
        ValueError: If the traces cannot be converted to the given number of ranks or experts, or if
            the ranks have traces of different layers.
    """
    wanted = ranks or len(traces)
    check_fits(traces, experts, wanted)
    return {key: [[_counts(call, experts, wanted) for call in zip(*of_ranks, strict=False)]
                  for of_ranks in zip(*(trace[key] for trace in traces), strict=False)]
            for key in traces[0]}


def check_fits(traces: Sequence[Mapping[Any, Any]], experts: int, ranks: int) -> None:
    """Check that the traces can be converted to the given number of ranks (see `calls_of`).

    Raises:
        ValueError: If the traces cannot be converted to the given number of ranks.
    """
    if ranks % len(traces) and len(traces) % ranks or experts % ranks:
        raise ValueError(
            f"ranks={ranks} is not possible for a trace of {len(traces)} ranks with {experts} "
            "experts: it must be a multiple or a divisor of the trace's number of ranks, and must "
            "divide the number of experts. Set --nodes and --ranks-per-node, or change --emulate")
    if not all(list(trace) == list(traces[0]) for trace in traces):
        raise ValueError("the ranks have traces of different layers. Use a folder whose ranks "
                         "share the same experts")


def resplit(of_ranks: Sequence[Any], ranks: int) -> list[Sequence[Any]]:
    """Distribute the choices of a call, [T, K] for each rank, over a different number of ranks.

    Returns: For each new rank, the choices of its tokens, as a list of tensors.
    """
    if ranks >= len(of_ranks):
        return [[part] for ids_TK in of_ranks
                for part in ids_TK.tensor_split(ranks // len(of_ranks))]
    size = len(of_ranks) // ranks
    return [of_ranks[at:at + size] for at in range(0, len(of_ranks), size)]


def _counts(of_ranks: Sequence[Any], experts: int, ranks: int) -> list[list[int]]:
    """Return the number of rows by source rank and expert. of_ranks: the choices, [T, K], of each
    rank in the trace.
    """
    parts = [[expert_id for ids_TK in some for expert_id in ids_TK.flatten().tolist()]
             for some in resplit(of_ranks, ranks)]
    counts = []
    for part in parts:
        rows = Counter(part)
        if (most := max(rows, default=-1)) >= experts:
            raise ValueError(f"the trace uses expert {most}, but the model file has only experts="
                             f"{experts}. Use the model file of the run")
        counts.append([rows[expert] for expert in range(experts)])
    return counts


def simulate(calls: Calls, costs: SpillCosts, guests: int, replan: int) -> list[PolicyTimes]:
    """Predict the times of all calls for each policy. The first policy is `never`. Calls without
    rows are skipped.

    Args:
        calls: for every call, the number of rows by source rank and expert (see `calls_of`).
        costs: predicted costs of moving rows and lending experts.
        guests: maximum number of experts that a rank may borrow at the same time.
        replan: number of training steps between two placements of the policy `standing`.
    """
    return [PolicyTimes(policy, [
        one for steps in calls.values() for one in _layer(policy, steps, costs, guests, replan)])
        for policy in tracked(POLICIES, "replaying", "policy")]


def _layer(policy: str, steps: Sequence[Sequence[Counts]], costs: SpillCosts, guests: int,
           replan: int) -> Iterator[CallTime]:
    standing = StandingReplicas(len(steps[0][0]), costs, guests, replan)
    for number, step in enumerate(steps):
        for counts_WV in step:
            if not any(map(any, counts_WV)):
                continue
            plan = (standing.plan(counts_WV) if policy == "standing"
                    else plan_spill(counts_WV, costs, policy, guests))
            standing.add(counts_WV)
            yield CallTime(costs.seconds((plan or SpillPlan(counts_WV, {})).spread()),
                           balanced_s(counts_WV, costs), len(plan.loans) if plan else 0,
                           number * len(PARTS) // len(steps))
        if policy == "standing" and standing.finish_step():
            standing.place()


def balanced_s(counts_WV: Counts, costs: SpillCosts) -> float:
    """Predict the time in seconds of a call whose rows are distributed evenly over experts and
    ranks.
    """
    ranks = len(counts_WV)
    rows = sum(map(sum, counts_WV)) / ranks
    return costs.seconds(Spread(rows, rows * (ranks - 1) / ranks, 0.0))


def best(found: Sequence[PolicyTimes]) -> PolicyTimes:
    """Return the fastest policy. If no policy saves at least the fraction `LEAST_GAIN` of the time,
    return `never`.
    """
    plain = found[0]
    fastest = min(found, key=lambda one: one.mean)
    return fastest if fastest.mean < plain.mean * (1 - LEAST_GAIN) else plain


def replay(traces: Sequence[Mapping[Any, Any]], model: ModelShape, cluster: Cluster,
           device: Device, guests: int, replan: int, ranks: int | None = None,
           tokens: int | None = None) -> list[PolicyTimes]:
    """Predict the times of all calls in the traces for each policy (see `simulate`).

    Args:
        traces: routing trace of each rank (see `observe.traces.read_trace`).
        guests: maximum number of experts that a rank may borrow at the same time.
        replan: number of training steps between two placements of the policy `standing`.
        ranks: number of ranks over which the experts are distributed. Defaults to the number of
            ranks in the trace, all on one node.
        tokens: number of tokens per rank. The loads in the trace are scaled to this number.
            Defaults to the number of tokens in the trace.
    """
    calls = calls_of(traces, model.experts, ranks)
    every = [call for steps in calls.values() for step in steps for call in step]
    if not any(any(map(any, call)) for call in every):
        raise ValueError("the trace contains no routed token. Use a different trace")
    group = cluster.resized(1, len(every[0])) if ranks is None else cluster
    costs = spill_costs(model.layer(1), group, device)
    if tokens is not None:
        mean = sum(sum(map(sum, call)) for call in every) / len(every) / len(every[0])
        costs = replace(costs, row_s=costs.row_s * tokens * model.top_k / mean,
                        travel_s=costs.travel_s * tokens * model.top_k / mean)
    return simulate(calls, costs, guests, replan)


def what_to_use(found: Sequence[PolicyTimes]) -> str:
    """Return a sentence that recommends a policy for overloaded experts and states how much time it
    saves.
    """
    plain, chosen = found[0], best(found)
    if chosen is plain:
        return (f"Use parallel.spill: never. No policy saves {LEAST_GAIN:.0%} of a call's time: "
                "the load is already even enough, or sending weights is too slow.")
    return (f"Use parallel.spill: {chosen.policy} (--moe-spill {chosen.policy}). It saves "
            f"{1 - chosen.mean / plain.mean:.0%} of a call's time compared with never.")


def explain(found: Sequence[PolicyTimes]) -> str:
    """Return a text that contains a table with one line per policy, and a recommendation."""
    rows = [["parallel.spill", "a call", "share", "worst call", *PARTS, "experts lent"]]
    for one in found:
        thirds = [one.share(third) for third in range(len(PARTS))]
        rows.append([one.policy, show_time(one.mean), f"{one.share():.1%}", f"{one.worst:.1%}",
                     *("-" if share is None else f"{share:.1%}" for share in thirds),
                     f"{one.lent:.1f}"])
    return "\n".join([
        f"{len(found[0].calls):,} layer calls, forward and backward. Share: throughput relative to "
        "the same number of",
        "rows under forced balance, for all calls, for the worst call, and for each third of the "
        "steps.", "", aligned(rows), "", what_to_use(found),
        "Times include matrix products, rows that are sent and lent weights. They exclude work",
        "that does not depend on the load (router, attention, optimizer)."])


def as_dict(found: Sequence[PolicyTimes]) -> dict[str, Any]:
    """Convert the comparison of policies to JSON-serializable values."""
    return {"use": best(found).policy, "calls": len(found[0].calls), "policies": {one.policy: {
        "seconds": one.mean, "share": one.share(), "worst": one.worst, "lent": one.lent,
        **{name: one.share(third) for third, name in enumerate(PARTS)}} for one in found}}
