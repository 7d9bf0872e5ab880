"""Branch and bound over (TP, EP, ETP, DP, PP, micro-batch, r, d, algorithm, send); exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.choice import SENDS, LayoutChoice, divisors, legal_choices
from moe_plugin.planner.cluster import HEAD_ROOM, Cluster, Device
from moe_plugin.planner.model import ModelPlan, ModelShape
from moe_plugin.planner.plan_cost import PlanCost, lower_bound_s, plan_cost
from moe_plugin.planner.units import show_size
from moe_plugin.utils.messages import tracked

ANY = LayoutChoice(r=1)
PLAN_AXES = ("tp", "pp", "expert_ranks", "micro_batch")
LAYOUT_AXES = ("r", "d", "algorithm", "send")


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a search varies.

    Attributes:
        degrees, algorithms, sends: of the layouts.
        micro_batches: sequences at a time.
        data_parallel_only: for hosts without tensor and pipeline parallelism.
    """

    degrees: tuple[int, ...] = (1, 2, 4)
    algorithms: tuple[str, ...] = field(default_factory=lambda: tuple(COSTS))
    sends: tuple[str, ...] = SENDS
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    data_parallel_only: bool = False


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        plans: fastest first, each in its best layout.
        tried: layouts costed.
        skipped: plans excluded by a bound.
        too_big: plans that exceed the memory.
    """

    plans: list[PlanCost]
    tried: int
    skipped: int
    too_big: int


def outlines(model: ModelShape, cluster: Cluster, space: Space) -> Iterator[ModelPlan]:
    """All plans without their layout.

    Tensor parallelism stays inside a node, stages have equal numbers of layers, and experts divide
    over ranks or ranks over experts.
    """
    for tp in divisors(cluster.ranks):
        if tp > cluster.ranks_per_node or model.heads % tp:
            continue
        for pp in divisors(cluster.ranks // tp):
            if model.layers % pp:
                continue
            if space.data_parallel_only and tp * pp > 1:
                continue
            for group in divisors(cluster.ranks // pp):
                yield from _micro_batches(model, cluster, space, tp, pp, group)


def _micro_batches(model: ModelShape, cluster: Cluster, space: Space, tp: int, pp: int,
                   group: int) -> Iterator[ModelPlan]:
    """The plans of one tp, pp and number of ranks per expert group."""
    dp, etp = cluster.ranks // (tp * pp), max(1, group // model.experts)
    if model.experts % group and group % model.experts:
        return
    if model.row_dim % etp or model.expert_dim % etp:
        return
    for micro in space.micro_batches:
        plan = ModelPlan(tp=tp, pp=pp, dp=dp, ep=group // etp, etp=etp, micro_batch=micro,
                         layout=ANY)
        if model.global_batch % (dp * micro) == 0 and micro * model.sequence % tp == 0:
            yield plan


def search(model: ModelShape, cluster: Cluster, device: Device, space: Space = Space(),
           keep: int = 8) -> Found:
    """The `keep` fastest plans that fit the device's memory, each in its best layout.

    Raises: ValueError: nothing fits; names the least memory needed.
    """
    order = sorted(outlines(model, cluster, space), key=lambda p:
                   (lower_bound_s(model, cluster, device, p), p))
    found: list[PlanCost] = []
    tried = skipped = too_big = 0
    least = float("inf")
    for outline in tracked(order, "searching", "plan"):
        if len(found) >= keep and lower_bound_s(model, cluster, device,
                                                outline) > found[keep - 1].seconds:
            skipped += 1
            continue
        costs = list(_layouts(model, cluster, device, space, outline))
        tried += len(costs)
        fitting = [c for c in costs if c.memory_bytes <= device.usable_bytes]
        least = min([least, *(c.memory_bytes for c in costs)])
        too_big += not fitting
        if fitting:
            found.append(min(fitting, key=_order))
            found.sort(key=_order)
    if not found:
        raise ValueError(
            f"no plan fits {show_size(device.memory_bytes)} per rank on {cluster.ranks} ranks: the "
            f"smallest needs {show_size(least)}, and {100 * HEAD_ROOM:.0f} % stay free; use "
            "more ranks, a smaller model, or fewer sequences at a time" if least < float("inf") else
            f"no plan divides {cluster.ranks} ranks, {model.experts} experts, {model.layers} "
            f"layers and a batch of {model.global_batch}; change one of them")
    return Found(found[:keep], tried, skipped, too_big)


def _order(cost: PlanCost) -> tuple:
    return cost.seconds, cost.plan


def _layouts(model: ModelShape, cluster: Cluster, device: Device, space: Space,
             outline: ModelPlan) -> Iterator[PlanCost]:
    for choice in legal_choices(model.experts, outline.expert_ranks, degrees=space.degrees,
                                algorithms=space.algorithms,
                                sends=sends_of(model, cluster, space, outline)):
        yield plan_cost(model, cluster, device, replace(outline, layout=choice))


def sends_of(model: ModelShape, cluster: Cluster, space: Space,
             outline: ModelPlan) -> tuple[str, ...]:
    """How often a token's row may travel: once only where it is exact and has several experts, and
    to nodes only from several of several ranks.
    """
    if model.capacity_factor is not None or model.top_k == 1:
        return ("rows",)
    group = outline.expert_cluster(cluster)
    flat = min(group.nodes, group.ranks_per_node) == 1
    return tuple(send for send in space.sends if send != "nodes" or not flat)


def alternatives(model: ModelShape, cluster: Cluster, device: Device, best: PlanCost,
                 space: Space = Space()) -> dict[str, PlanCost]:
    """For each axis, the best plan with another value there than `best` has; all other numbers may
    differ, too. One that does not fit the memory is named where none with another value does.
    """
    found: dict[str, PlanCost] = {}
    for outline in tracked(list(outlines(model, cluster, space)), "comparing", "plan"):
        for cost in _layouts(model, cluster, device, space, outline):
            for axis in (*PLAN_AXES, *LAYOUT_AXES):
                if value_of(cost.plan, axis) == value_of(best.plan, axis):
                    continue
                before = found.get(axis)
                if before is None or _rank(cost, device) < _rank(before, device):
                    found[axis] = cost
    return {axis: found[axis] for axis in (*PLAN_AXES, *LAYOUT_AXES) if axis in found}


def value_of(plan: ModelPlan, axis: str) -> int | str:
    """A plan's number, or name, on an axis of `PLAN_AXES` or `LAYOUT_AXES`."""
    value: int | str = getattr(plan.layout if axis in LAYOUT_AXES else plan, axis)
    return value


def _rank(cost: PlanCost, device: Device) -> tuple:
    """What fits comes first, the fastest first; of what does not, the smallest."""
    over = cost.memory_bytes > device.usable_bytes
    return over, cost.memory_bytes if over else 0.0, _order(cost)
