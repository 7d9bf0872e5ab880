"""A routing trace through the planner: which policy for overloaded experts to use, before a cluster
is rented.

Of each call of a layer the loads are known, so the busiest rank of each policy of `parallel.spill`
is, too. Its modelled seconds (`planner.spill.SpillCosts`: products, rows on their way, lent
weights; forward and backward) are compared with those of as many rows under forced balance, where
every expert gets as many from every rank.
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
Calls = Mapping[Any, Sequence[Sequence[Counts]]]  # of every layer, step by step, pass by pass


@dataclass(frozen=True)
class CallTime:
    """One call of a layer.

    Attributes:
        seconds: under the policy.
        balanced: of as many rows under forced balance.
        lent: experts that ranks lend.
        third: of the steps, see `PARTS`.
    """

    seconds: float
    balanced: float
    lent: int
    third: int


@dataclass(frozen=True)
class PolicyTimes:
    """All calls under a policy, at least one."""

    policy: str
    calls: Sequence[CallTime]

    @property
    def mean(self) -> float:
        """Seconds of a call."""
        return sum(one.seconds for one in self.calls) / len(self.calls)

    @property
    def lent(self) -> float:
        """Experts that are lent in a call."""
        return sum(one.lent for one in self.calls) / len(self.calls)

    @property
    def worst(self) -> float:
        """The share of the worst call."""
        return min(one.balanced / one.seconds for one in self.calls)

    def share(self, third: int | None = None) -> float | None:
        """Throughput over that of the balanced calls; None: no call is in this third."""
        calls = [one for one in self.calls if third in (None, one.third)]
        if not calls:
            return None
        return sum(one.balanced for one in calls) / sum(one.seconds for one in calls)


def calls_of(traces: Sequence[Mapping[Any, Any]], experts: int, ranks: int | None) -> Calls:
    """Rows by rank and expert of every call in the traces of ranks.

    Args:
        traces: of each rank, see `observe.traces.read_trace`.
        ranks: that share the experts; None: those of the trace. Others are made of its ranks:
            several become one, or each one several by its tokens' order.
    Raises: ValueError: ranks or experts that do not fit, or ranks of unequal layers.
    """
    wanted = ranks or len(traces)
    check_fits(traces, experts, wanted)
    return {key: [[_counts(call, experts, wanted) for call in zip(*of_ranks, strict=False)]
                  for of_ranks in zip(*(trace[key] for trace in traces), strict=False)]
            for key in traces[0]}


def check_fits(traces: Sequence[Mapping[Any, Any]], experts: int, ranks: int) -> None:
    """`ValueError` unless the traces of ranks stand for so many ranks; see `calls_of`."""
    if ranks % len(traces) and len(traces) % ranks or experts % ranks:
        raise ValueError(
            f"ranks={ranks} does not fit a trace of {len(traces)} ranks and {experts} experts: "
            "must be a multiple or a divisor of the one, and divide the other; give --nodes and "
            "--ranks-per-node, or another --emulate")
    if not all(list(trace) == list(traces[0]) for trace in traces):
        raise ValueError("ranks have traces of different layers; give a folder of ranks that share "
                         "experts")


def resplit(of_ranks: Sequence[Any], ranks: int) -> list[Sequence[Any]]:
    """The choices [T, K] of a call by rank, in parts, for another number of ranks."""
    if ranks >= len(of_ranks):
        return [[part] for ids_TK in of_ranks
                for part in ids_TK.tensor_split(ranks // len(of_ranks))]
    each = len(of_ranks) // ranks
    return [of_ranks[at:at + each] for at in range(0, len(of_ranks), each)]


def _counts(of_ranks: Sequence[Any], experts: int, ranks: int) -> list[list[int]]:
    """of_ranks: [T, K] choices of each rank of the trace."""
    parts = [[one for ids_TK in some for one in ids_TK.flatten().tolist()]
             for some in resplit(of_ranks, ranks)]
    counts = []
    for part in parts:
        rows = Counter(part)
        if (most := max(rows, default=-1)) >= experts:
            raise ValueError(f"the trace chooses expert {most}: must be < experts={experts} of the "
                             "model file; give that of the run")
        counts.append([rows[expert] for expert in range(experts)])
    return counts


def simulate(calls: Calls, costs: SpillCosts, guests: int, replan: int) -> list[PolicyTimes]:
    """All policies, `never` first. Calls without a row are left out.

    Args:
        guests: experts that a rank may borrow.
        replan: steps of a placement that stands.
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
    """Seconds of a call whose rows are spread evenly over experts and ranks."""
    ranks = len(counts_WV)
    rows = sum(map(sum, counts_WV)) / ranks
    return costs.seconds(Spread(rows, rows * (ranks - 1) / ranks, 0.0))


def best(found: Sequence[PolicyTimes]) -> PolicyTimes:
    """The fastest policy; `never` where none saves `LEAST_GAIN`."""
    plain = found[0]
    fastest = min(found, key=lambda one: one.mean)
    return fastest if fastest.mean < plain.mean * (1 - LEAST_GAIN) else plain


def replay(traces: Sequence[Mapping[Any, Any]], model: ModelShape, cluster: Cluster,
           device: Device, guests: int, replan: int, ranks: int | None = None,
           tokens: int | None = None) -> list[PolicyTimes]:
    """All policies over the traces of ranks, see `simulate`.

    Args:
        ranks: of the cluster, which share the experts; None: those of the trace, on one node.
        tokens: of a rank, for which the trace's stand; None: as many as it has.
    """
    calls = calls_of(traces, model.experts, ranks)
    every = [call for steps in calls.values() for step in steps for call in step]
    if not any(any(map(any, call)) for call in every):
        raise ValueError("the trace has no choice of an expert; give another one")
    group = cluster.resized(1, len(every[0])) if ranks is None else cluster
    costs = spill_costs(model.layer(1), group, device)
    if tokens is not None:
        mean = sum(sum(map(sum, call)) for call in every) / len(every) / len(every[0])
        costs = replace(costs, row_s=costs.row_s * tokens * model.top_k / mean,
                        travel_s=costs.travel_s * tokens * model.top_k / mean)
    return simulate(calls, costs, guests, replan)


def what_to_use(found: Sequence[PolicyTimes]) -> str:
    """A sentence: the fastest policy for overloaded experts, and what it saves."""
    plain, chosen = found[0], best(found)
    if chosen is plain:
        return (f"Use parallel.spill: never. No policy saves {LEAST_GAIN:.0%} of a call: the load "
                "is even enough, or weights travel too slowly here.")
    return (f"Use parallel.spill: {chosen.policy} (--moe-spill {chosen.policy}): "
            f"{1 - chosen.mean / plain.mean:.0%} less of a call than never.")


def explain(found: Sequence[PolicyTimes]) -> str:
    """A line for each policy, and what to use."""
    rows = [["parallel.spill", "a call", "share", "worst call", *PARTS, "experts lent"]]
    for one in found:
        thirds = [one.share(third) for third in range(len(PARTS))]
        rows.append([one.policy, show_time(one.mean), f"{one.share():.1%}", f"{one.worst:.1%}",
                     *("-" if share is None else f"{share:.1%}" for share in thirds),
                     f"{one.lent:.1f}"])
    return "\n".join([
        f"{len(found[0].calls):,} calls of layers, forward and backward. Share: throughput over "
        "that of as many", "rows under forced balance; of all calls, of the worst, of a third of "
        "the steps.", "", aligned(rows), "", what_to_use(found), "Times are of products, rows on "
        "their way and lent weights: not of what does not depend", "on the load (router, "
        "attention, optimizer)."])


def as_dict(found: Sequence[PolicyTimes]) -> dict[str, Any]:
    """The same as JSON values."""
    return {"use": best(found).policy, "calls": len(found[0].calls), "policies": {one.policy: {
        "seconds": one.mean, "share": one.share(), "worst": one.worst, "lent": one.lent,
        **{name: one.share(third) for third, name in enumerate(PARTS)}} for one in found}}
