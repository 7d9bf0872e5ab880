"""Search over (TP, EP, ETP, DP, PP, micro-batch, r, d, algorithm): branch and bound, equal to
trying everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe_plugin.planner.all_to_all import COSTS
from moe_plugin.planner.choice import LayoutChoice, divisors, legal_choices
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.device import Device
from moe_plugin.planner.model import ModelShape, Plan
from moe_plugin.planner.model_cost import PlanCost, lower_bound_s, plan_cost

ANY = LayoutChoice(r=1)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be varied. degrees, algorithms: of the layouts. micro_batches: sequences at a time.
    Sizes: None: all divisors that fit.

    data_parallel_only: hosts without tensor and pipeline parallelism.
    """

    degrees: tuple[int, ...] = (1, 2, 4)
    algorithms: tuple[str, ...] = tuple(COSTS)
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    expert_ranks: tuple[int, ...] | None = None
    data_parallel_only: bool = False


@dataclass(frozen=True)
class Found:
    """plans: fastest first, the best layout of each. tried: layouts costed; skipped: plans that a
    bound ruled out; too_big: plans without memory.
    """

    plans: list[PlanCost]
    tried: int
    skipped: int
    too_big: int


def outlines(model: ModelShape, cluster: Cluster, space: Space) -> Iterator[Plan]:
    """All plans without their layout. TP stays inside a node, stages have equal layers, experts
    divide over ranks or ranks over experts.
    """
    for tp in divisors(cluster.ranks):
        if (space.data_parallel_only
                and tp > 1) or tp > cluster.ranks_per_node or model.heads % tp or (space.tp and tp
                                                                                   not in space.tp):
            continue
        for pp in divisors(cluster.ranks // tp):
            if (space.data_parallel_only
                    and pp > 1) or model.layers % pp or (space.pp and pp not in space.pp):
                continue
            dp = cluster.ranks // (tp * pp)
            for group in divisors(tp * dp):
                if (model.experts % group
                        and group % model.experts) or (space.expert_ranks
                                                       and group not in space.expert_ranks):
                    continue
                etp = max(1, group // model.experts)
                if model.model_dim % etp or (model.hidden_dim or model.ffn_dim) % etp:
                    continue
                for micro in space.micro_batches:
                    if model.global_batch % (dp * micro) == 0 and micro * model.sequence % tp == 0:
                        yield Plan(tp=tp, pp=pp, dp=dp, ep=group // etp, etp=etp, micro_batch=micro,
                                   layout=ANY)


def search(model: ModelShape, cluster: Cluster, device: Device, space: Space = Space(),
           keep: int = 8) -> Found:
    """The `keep` fastest plans that fit the device's memory, each in its best layout.

    Raises: ValueError: nothing fits; it names the least memory needed.
    """
    order = sorted(outlines(model, cluster, space), key=lambda p:
                   (lower_bound_s(model, cluster, device, p), p))
    found: list[PlanCost] = []
    tried = skipped = too_big = 0
    least = float("inf")
    for outline in order:
        if len(found) >= keep and lower_bound_s(model, cluster, device,
                                                outline) > found[keep - 1].seconds:
            skipped += 1
            continue
        costs = list(_layouts(model, cluster, device, space, outline))
        tried += len(costs)
        fitting = [c for c in costs if c.memory_bytes <= device.memory_bytes]
        least = min([least, *(c.memory_bytes for c in costs)])
        too_big += not fitting
        if fitting:
            found.append(min(fitting, key=_order))
            found.sort(key=_order)
    if not found:
        raise ValueError(
            f"no plan fits {device.memory_bytes:.3g} bytes a rank on {cluster.ranks} ranks: the "
            f"smallest needs {least:.3g}; use more "
            "ranks, a smaller model, or fewer sequences at a time" if least < float("inf") else
            f"no plan divides {cluster.ranks} ranks, {model.experts} experts, {model.layers} "
            f"layers and a batch of {model.global_batch}; "
            "change one of them")
    return Found(found[:keep], tried, skipped, too_big)


def _order(cost: PlanCost) -> tuple:
    return cost.seconds, cost.plan


def _layouts(model: ModelShape, cluster: Cluster, device: Device, space: Space,
             outline: Plan) -> Iterator[PlanCost]:
    for choice in legal_choices(model.experts, outline.expert_ranks, degrees=space.degrees,
                                algorithms=space.algorithms):
        yield plan_cost(model, cluster, device, replace(outline, layout=choice))


def neighbours(model: ModelShape, cluster: Cluster, device: Device, best: PlanCost,
               space: Space = Space()) -> dict[str, PlanCost]:
    """For each thing that could be otherwise, the best plan in which it alone is: what `explain`
    compares with.
    """
    plan, found = best.plan, {}
    for what in ("tp", "pp", "expert_ranks", "micro_batch"):
        mine = getattr(plan, what)
        rest = [w for w in ("tp", "pp", "expert_ranks", "micro_batch") if w != what]
        others = [
            o for o in outlines(model, cluster, space)
            if getattr(o, what) != mine and all(getattr(o, w) == getattr(plan, w) for w in rest)
        ]
        costs = [min(_layouts(model, cluster, device, space, o), key=_order) for o in others]
        if costs:
            found[what] = min(costs, key=_order)
    same = [
        replace(plan, layout=c) for c in legal_choices(
            model.experts, plan.expert_ranks, degrees=space.degrees, algorithms=space.algorithms)
    ]
    for what in ("r", "d", "algorithm"):
        fixed = [w for w in ("r", "d", "algorithm") if w != what]
        others = [p for p in same if getattr(p.layout, what) != getattr(plan.layout, what)
                  and all(getattr(p.layout, w) == getattr(plan.layout, w) for w in fixed)]
        costs = [plan_cost(model, cluster, device, p) for p in others]
        if costs:
            found[what] = min(costs, key=_order)
    return found
