"""Branch-and-bound search for the fastest parallelization plans, and a static layer's cost.

The search varies the sizes TP, EP, ETP, DP and PP, the size of the micro-batches, and the layout of
MoE layers (r, d, the all-to-all algorithm and `send`).

The reference layer has a fixed layout and no overlap, and dispatches tokens with dense matmuls as
in GShard. Each rank has S tokens. Each of the E experts has C = k ceil(S / E) slots. Dispatch and
combine are matmuls with a mask of shape [S, E, C]. Each of these matmuls takes 2 S E C M FLOPs,
about 2 k S^2 M for any E, where M is the model dimension. There are two of them in the forward pass
and three in the backward pass, because the dispatch mask has no gradient. Each of them reads or
writes the mask. The all-to-all uses the algorithm `linear` and does not overlap with computation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.choice import DEGREES, SENDS, LayoutChoice, divisors, legal_choices
from moe_plugin.planner.cluster import HEAD_ROOM, Cluster, Device
from moe_plugin.planner.layer_cost import LayerCost, LayerShape, layer_cost, rank_choices
from moe_plugin.planner.model import ModelPlan, ModelShape
from moe_plugin.planner.once import GroupShape, all_to_all_s
from moe_plugin.planner.plan_cost import PlanCost, lower_bound_s, plan_cost
from moe_plugin.planner.units import show_size, show_time
from moe_plugin.utils.messages import tracked

MATMULS = 5
MASK_BYTES = 4


def static_layer_s(shape: LayerShape, cluster: Cluster, device: Device) -> float:
    """Predict the time in seconds of the static layer's forward and backward passes."""
    slots = shape.top_k * math.ceil(shape.tokens / shape.experts)
    mask = float(shape.tokens) * shape.experts * slots
    dispatch = device.matmul_s(shape.tokens, 2 * mask * shape.row_dim, mask * MASK_BYTES)
    shards = max(1, cluster.ranks // shape.experts)
    rows = shape.experts * slots * shards
    inner = shape.hidden_dim / shards
    experts = device.matmul_s(rows / max(1, shape.experts // cluster.ranks),
                               2.0 * shape.matrices * rows * shape.row_dim * inner)
    exchange = all_to_all_s(cluster, GroupShape(cluster.ranks), "linear", rows * shape.row_bytes)
    return MATMULS * dispatch + 3 * experts + 4 * exchange


@dataclass(frozen=True)
class ScaleRow:
    """Predicted times of a layer on a given number of ranks.

    Attributes:
        ranks: number of ranks.
        static_s: time of the static layer in seconds.
        plain_s: time in seconds with sparse dispatch, the largest possible r, d = 1 and the
            algorithm `linear`.
        r_alone_s: time in seconds as in `plain_s`, but with the best r.
        d_alone_s: time in seconds as in `plain_s`, but with the best d.
        all_s: time in seconds with the best r, the best d and the best all-to-all algorithm.
        choice: the layout whose time is `all_s`.
    """

    ranks: int
    static_s: float
    plain_s: float
    r_alone_s: float
    d_alone_s: float
    all_s: float
    choice: LayoutChoice

    @property
    def speedup(self) -> float:
        """Time of the static layer divided by the time with the best r, d and algorithm."""
        return self.static_s / self.all_s


def scale_table(shape: LayerShape, cluster: Cluster, device: Device, nodes: Sequence[int],
                experts_per_rank: float = 1.0) -> list[ScaleRow]:
    """Predict the times of a layer for several numbers of nodes.

    The numbers of tokens and experts per rank are the same for all numbers of nodes.
    """
    rows = []
    for count in nodes:
        resized = cluster.resized(count)
        experts = max(1, round(resized.ranks * experts_per_rank))
        rows.append(_scale_row(dataclasses.replace(shape, experts=experts), resized, device))
    return rows


def _scale_row(shape: LayerShape, cluster: Cluster, device: Device) -> ScaleRow:
    shards = max(1, cluster.ranks // shape.experts)

    def best(degrees: tuple[int, ...], algorithms: tuple[str, ...], free_r: bool) -> LayerCost:
        choices = legal_choices(shape.experts, cluster.ranks, degrees=degrees,
                                algorithms=algorithms)
        return rank_choices(shape, cluster, device,
                            [c for c in choices if free_r or c.r == shards])[0]

    total = best(DEGREES, tuple(COSTS), True)
    return ScaleRow(cluster.ranks, static_layer_s(shape, cluster, device),
                    layer_cost(shape, cluster, device, LayoutChoice(r=shards)).seconds,
                    best((1,), ("linear",), True).seconds,
                    best(DEGREES, ("linear",), False).seconds, total.seconds, total.choice)


def scale_text(rows: Sequence[ScaleRow]) -> str:
    """Format a table of predicted times. The table also contains the speed-up of each adaptation
    over the plain layer (`plain_s`).
    """
    lines = [f"{'ranks':>6}{'static':>11}{'plain':>10}{'r alone':>9}{'d alone':>9}"
             f"{'all':>9}{'static/all':>11}  layout"]
    for row in rows:
        gains = f"{row.plain_s / row.r_alone_s:8.2f}x{row.plain_s / row.d_alone_s:8.2f}x"
        lines.append(f"{row.ranks:6}{show_time(row.static_s):>11}{show_time(row.plain_s):>10}{gains}"
                     f"{show_time(row.all_s):>9}{row.speedup:10.2f}x  {row.choice.words}")
    return "\n".join(lines)


ANY = LayoutChoice(r=1)
PLAN_AXES = ("tp", "pp", "expert_ranks", "micro_batch")
LAYOUT_AXES = ("r", "d", "algorithm", "send")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The search space: the values that plans may use.

    Attributes:
        degrees: overlap degrees to try.
        algorithms: all-to-all algorithms to try.
        sends: values of `LayoutChoice.send` to try.
        micro_batches: numbers of sequences per micro-batch to try.
        data_parallel_only: if True, tensor and pipeline parallelism are excluded. This setting is
            used for host frameworks that support neither tensor nor pipeline parallelism.
        whole_experts: if True, no expert is divided among ranks. This setting is used for
            transformers.
    """

    degrees: tuple[int, ...] = (1, 2, 4)
    algorithms: tuple[str, ...] = field(default_factory=lambda: tuple(COSTS))
    sends: tuple[str, ...] = SENDS
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    data_parallel_only: bool = False
    whole_experts: bool = False


@dataclass(frozen=True)
class Found:
    """The result of a search for the fastest plans.

    Attributes:
        plans: the fastest plans, from fastest to slowest. Each plan contains its best layout.
        tried: number of layouts whose cost was predicted.
        skipped: number of plans that were excluded because of a lower bound on their time.
        too_big: number of plans that do not fit in the device's memory with any layout.
    """

    plans: list[PlanCost]
    tried: int
    skipped: int
    too_big: int


def outlines(model: ModelShape, cluster: Cluster, space: Space) -> Iterator[ModelPlan]:
    """Yield all possible plans, with placeholder layouts.

    Tensor parallelism stays within a node, and all pipeline stages have the same number of layers.
    The size of an expert group is a multiple or a divisor of the number of experts.
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
    """Yield the plans that are possible with the given tensor-parallel size, pipeline-parallel size
    and size of expert groups.
    """
    dp, etp = cluster.ranks // (tp * pp), max(1, group // model.experts)
    if model.experts % group and group % model.experts:
        return
    if model.row_dim % etp or model.expert_dim % etp or (space.whole_experts and etp > 1):
        return
    for micro in space.micro_batches:
        plan = ModelPlan(tp=tp, pp=pp, dp=dp, ep=group // etp, etp=etp, micro_batch=micro,
                         layout=ANY)
        if model.global_batch % (dp * micro) == 0 and micro * model.sequence % tp == 0:
            yield plan


def search(model: ModelShape, cluster: Cluster, device: Device, space: Space = Space(),
           keep: int = 8) -> Found:
    """Return the `keep` fastest plans that fit in the device's memory, each with its best layout.

    Raises:
        ValueError: If no plan fits in the device's memory. The message contains the number of bytes
            that the smallest plan needs.
    """
    order = sorted(outlines(model, cluster, space), key=lambda p:
                   (lower_bound_s(model, cluster, device, p), p))
    fastest: list[PlanCost] = []
    tried = skipped = too_big = 0
    least = float("inf")
    for outline in tracked(order, "searching", "plan"):
        if len(fastest) >= keep and lower_bound_s(model, cluster, device,
                                                  outline) > fastest[keep - 1].seconds:
            skipped += 1
            continue
        costs = list(_layouts(model, cluster, device, space, outline))
        tried += len(costs)
        fitting = [c for c in costs if c.memory_bytes <= device.usable_bytes]
        least = min([least, *(c.memory_bytes for c in costs)])
        too_big += not fitting
        if fitting:
            fastest.append(min(fitting, key=_order))
            fastest.sort(key=_order)
    if not fastest:
        raise ValueError(
            f"no plan fits {show_size(device.memory_bytes)} per rank on {cluster.ranks} ranks: "
            f"the smallest needs {show_size(least)}, and {100 * HEAD_ROOM:.0f} % must remain "
            "free. Use more ranks, a smaller model, or a smaller micro-batch"
            if least < float("inf") else
            f"no plan can divide {cluster.ranks} ranks, {model.experts} experts, {model.layers} "
            f"layers and a batch of {model.global_batch}. Change one of these numbers")
    return Found(fastest[:keep], tried, skipped, too_big)


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
    """Return the values of `LayoutChoice.send` that a plan may use.

    Sending a token once per rank or node is possible only if no tokens are dropped and each token
    has several experts. Sending a token once per node also requires several nodes with several
    ranks each.
    """
    if model.capacity_factor is not None or model.top_k == 1:
        return ("rows",)
    group = outline.expert_cluster(cluster)
    flat = min(group.nodes, group.ranks_per_node) == 1
    return tuple(send for send in space.sends if send != "nodes" or not flat)


def alternatives(model: ModelShape, cluster: Cluster, device: Device, best: PlanCost,
                 space: Space = Space()) -> dict[str, PlanCost]:
    """For each plan setting in `PLAN_AXES` and `LAYOUT_AXES`, return the best plan in which this
    setting differs from `best`.

    All other settings may differ as well. A plan that does not fit in the device's memory is
    returned only if no other such plan fits.
    """
    best_by_axis: dict[str, PlanCost] = {}
    for outline in tracked(list(outlines(model, cluster, space)), "comparing", "plan"):
        for cost in _layouts(model, cluster, device, space, outline):
            for axis in (*PLAN_AXES, *LAYOUT_AXES):
                if value_of(cost.plan, axis) == value_of(best.plan, axis):
                    continue
                before = best_by_axis.get(axis)
                if before is None or _rank(cost, device) < _rank(before, device):
                    best_by_axis[axis] = cost
    return {axis: best_by_axis[axis] for axis in (*PLAN_AXES, *LAYOUT_AXES) if axis in best_by_axis}


def value_of(plan: ModelPlan, axis: str) -> int | str:
    """Return the value that a plan has for a setting in `PLAN_AXES` or `LAYOUT_AXES`."""
    value: int | str = getattr(plan.layout if axis in LAYOUT_AXES else plan, axis)
    return value


def _rank(cost: PlanCost, device: Device) -> tuple:
    """Return a sort key: plans that fit in memory come first, sorted by time, followed by all other
    plans, sorted by memory use.
    """
    over = cost.memory_bytes > device.usable_bytes
    return over, cost.memory_bytes if over else 0.0, _order(cost)
