"""How far a plan's prediction can be trusted: corrections, spread, confidence, and doubts.

Every repeat of every measurement is divided by what the fitted constants predict for it. The
median of these ratios corrects the predicted time of the part of a step that the measurement stands
for; the ratios between which nine of ten repeats are give its spread. The spread of a step counts
the errors of all parts as if they came together, which is never too small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_plugin.planner.all_to_all_cost import COSTS, predict
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.collectives import GroupShape, all_gather_s, all_reduce_s
from moe_plugin.planner.layer_cost import COMPUTE, LayerShape, layer_cost
from moe_plugin.planner.measured import (
    ALL_GATHER,
    ALL_REDUCE,
    DENSE,
    HEAD,
    HOST,
    HOST_LAYERS,
    HOST_SEQUENCES,
    HOST_UPDATE,
    MATMUL,
    MOE,
    REDUCE_SCATTER,
    TENSOR,
    UPDATE,
    UPDATES,
    MeasuredNetwork,
    Processor,
    Timing,
)
from moe_plugin.planner.model import ModelPlan, ModelShape
from moe_plugin.planner.plan_cost import (
    PlanCost,
    dense_layer_s,
    dense_s,
    expert_parameters,
    plan_cost,
)
from moe_plugin.planner.recompute import RECOMPUTED
from moe_plugin.planner.units import show_size, show_time

EXCHANGES, MOE_LAYERS, MOE_EXCHANGE = "all-to-all", "MoE layers", "MoE exchange"
KINDS = {REDUCE_SCATTER: ALL_GATHER}  # both are in one layer
BYTES = (EXCHANGES, ALL_REDUCE, ALL_GATHER)  # what sizes of these are
# which measurement stands for a part of a step
CHECKS = {
    "attention": DENSE, "dense FFN": DENSE, "output head": HEAD, MOE_LAYERS: MOE,
    MOE_EXCHANGE: EXCHANGES, "gradient reduction": ALL_REDUCE, "tensor parallel": ALL_REDUCE,
    "stage to stage": EXCHANGES
}
# and in plans with tensor-parallel ranks, for all parts of a dense layer together
CUT = dict.fromkeys(("attention", "dense FFN", "tensor parallel"), TENSOR)
LAYERS = ("attention", "dense FFN", "tensor parallel", MOE_LAYERS, MOE_EXCHANGE)
STAGE = (*LAYERS, "output head", "stage to stage")
# parts that are other parts once more, and are corrected as these are
FOLLOWING = {"pipeline bubble": STAGE, RECOMPUTED: LAYERS}
# parts in which a rank waits for others; a stage's bubble, too
WAITS = (MOE_EXCHANGE, "tensor parallel", "stage to stage", "gradient reduction", "pipeline bubble")
OPTIMIZER, OWN = "optimizer", "host's own"
# parameters' tensors of a layer, and of a model besides; experts of a rank are one for each matrix
TENSORS = {"fairseq": (17, 4), "megatron": (9, 4)}
INSIDE = 0.9  # of the repeats are in the spread
MEAN_ERROR = 0.3  # of a fit, at most
WIDTH = 3.0  # high / low of a step, at most
FACTOR = 10.0  # of a correction, up or down, of a part that counts
COUNTS = 0.05  # of a step, from which on a part counts
REACH = 8.0  # beyond the measured sizes, up or down
CONFIDENCE = (("high", 1.3), ("medium", 2.0))  # high / low of the step


@dataclass(frozen=True)
class Residuals:
    """Measured over predicted seconds of one kind of measurement.

    Attributes:
        by_size: of every repeat, by the size that was measured, rising.
    """

    by_size: dict[float, tuple[float, ...]]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of all sizes."""
        return tuple(ratio for found in self.by_size.values() for ratio in found)

    @property
    def sizes(self) -> tuple[float, float]:
        """The smallest and the largest."""
        return min(self.by_size), max(self.by_size)

    def at(self, size: float | None) -> Residuals:
        """Those of the measured sizes next to one: the fit errs otherwise at other sizes. None:
        all.
        """
        if size is None:
            return self
        below = [one for one in self.by_size if one <= size]
        above = [one for one in self.by_size if one >= size]
        near = {*below[-1:], *above[:1]}
        return Residuals({one: found for one, found in self.by_size.items() if one in near})

    @property
    def center(self) -> float:
        """The median."""
        return float(np.median(self.ratios))

    @property
    def low(self) -> float:
        """Below it are half of those that are outside."""
        return float(np.quantile(self.ratios, (1 - INSIDE) / 2))

    @property
    def high(self) -> float:
        """Above it are half of those that are outside."""
        return float(np.quantile(self.ratios, (1 + INSIDE) / 2))


def predicted_s(timing: Timing, cluster: Cluster, processor: Processor) -> float | None:
    """What the fits say of a measurement; None: it is no check of them."""
    model, device = processor.model, processor.device
    if timing.name in COSTS:
        return predict(cluster, timing.name, timing.size).seconds
    if timing.name == ALL_REDUCE:
        return all_reduce_s(cluster, GroupShape(cluster.ranks), timing.size)
    if timing.name in (ALL_GATHER, REDUCE_SCATTER):
        return all_gather_s(cluster, GroupShape(cluster.ranks), timing.size)
    tokens = int(timing.size)
    if timing.name == MATMUL:
        return device.matmul_s(tokens, 2.0 * tokens * model.model_dim * model.expert_dim)
    if timing.name == MOE:
        shape = layer_of_rank(model, cluster.ranks)
        return layer_cost(replace(shape, tokens=tokens * times_more(model, shape)), Cluster(),
                          device, LayoutChoice(r=1)).seconds
    if timing.name == TENSOR:
        return sum(dense_layer_s(model, cluster, device, tokens,
                                 processor.tensor_ranks).values())
    parts = dense_s(model, device, tokens)
    if timing.name == DENSE:
        return parts["attention"] + parts["dense FFN"]
    return parts["output head"] if timing.name == HEAD else None


def layer_of_rank(model: ModelShape, ranks: int) -> LayerShape:
    """An MoE layer that computes on one rank, without exchanges, what a rank of `ranks` does."""
    shape, cut = model.layer(1), max(1, ranks // model.experts)
    experts = max(1, model.experts // ranks)
    return replace(shape, experts=experts, top_k=min(model.top_k, experts), skew=1.0,
                   hidden_dim=max(1, shape.hidden_dim // cut))


def times_more(model: ModelShape, shape: LayerShape) -> int:
    """Tokens for one, with which fewer choices of a token make at least as many rows."""
    return -(-model.top_k // shape.top_k)


def residuals(network: MeasuredNetwork | None, processor: Processor) -> dict[str, Residuals]:
    """By kind of measurement: all-to-all (all algorithms together), all-reduce, all-gather (with
    its reverse), matmul, parts.

    network: None on one rank.
    """
    cluster = network.cluster if network else Cluster()
    ratios: dict[str, dict[float, tuple[float, ...]]] = {}
    for timing in [*(network.timings if network else []), *processor.timings]:
        expected = predicted_s(timing, cluster, processor)
        if expected:
            kind = EXCHANGES if timing.name in COSTS else KINDS.get(timing.name, timing.name)
            sizes = ratios.setdefault(kind, {})
            sizes[timing.size] = (*sizes.get(timing.size, ()),
                                  *(s / expected for s in timing.seconds))
    return {kind: Residuals(dict(sorted(sizes.items()))) for kind, sizes in ratios.items()}


def check_of(name: str, model: ModelShape, plan: ModelPlan,
             found: Mapping[str, Residuals]) -> Residuals | None:
    """The measurement that stands for a part of a plan's step, at the plan's size; None: there is
    none.
    """
    kind = CUT.get(name, "") if plan.tp > 1 else ""
    kind = kind if kind in found else CHECKS.get(name, "")
    size = sizes_of(model, plan).get(kind)
    if name == MOE_EXCHANGE and not plan.layout.exchanges:  # collectives of weights, or of tokens
        kind, size = ALL_GATHER, sizes_of(model, plan).get(ALL_GATHER)
    return found[kind].at(size) if kind in found else None


def sizes_of(model: ModelShape, plan: ModelPlan) -> dict[str, float]:
    """Tokens or bytes of a plan by kind of measurement."""
    tokens, dense, size = plan.tokens(model), plan.micro_batch * model.sequence, {}
    if plan.expert_ranks > 1:
        shape = model.layer(tokens)
        if plan.layout.exchanges:
            size[EXCHANGES] = shape.rows * max(1, plan.layout.r) * shape.row_bytes / plan.layout.d
        elif plan.layout.gather_tokens:
            size[ALL_GATHER] = tokens * shape.row_bytes
        else:
            size[ALL_GATHER] = model.experts * shape.expert_bytes / plan.expert_ranks
    if plan.dp > 1:
        size[ALL_REDUCE] = 4 * model.dense_parameters / (plan.tp * plan.pp)
    return {**size, MOE: tokens, HEAD: dense, DENSE: dense, TENSOR: dense}


def mean_error(timings: Sequence[Timing], cluster: Cluster, processor: Processor) -> float:
    """Mean of |predicted - median| / median."""
    errors = [abs(expected - t.median) / t.median for t in timings
              if (expected := predicted_s(t, cluster, processor)) is not None]
    return sum(errors) / len(errors)


@dataclass(frozen=True)
class Estimate:
    """A plan's step after correction.

    parts: seconds by part: (low, middle, high).
    """

    cost: PlanCost
    parts: dict[str, tuple[float, float, float]]

    def _sum(self, index: int) -> float:
        return sum(part[index] for part in self.parts.values())

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self._sum(1)

    @property
    def low(self) -> float:
        """Lower end of the spread."""
        return self._sum(0)

    @property
    def high(self) -> float:
        """Upper end of the spread."""
        return self._sum(2)

    def confidence(self, doubted: bool = False) -> str:
        """high, medium or low. doubted: there are doubts (see `doubts`)."""
        if doubted:
            return "low"
        width = self.high / self.low
        return next((word for word, most in CONFIDENCE if width <= most), "low")


def estimate(model: ModelShape, cost: PlanCost, found: Mapping[str, Residuals],
             updates: Sequence[Timing] = (), host: HostShare | None = None) -> Estimate:
    """A plan's step, corrected part by part; what nothing was measured for stays as predicted.

    Args:
        updates: among them optimizer steps that were measured; the planner's own model has none.
        host: what its steps take besides.
    """
    parts: dict[str, tuple[float, float, float]] = {}
    times = parts_of(cost)
    for name, seconds in times.items():
        check = check_of(name, model, cost.plan, found)
        low, center, high = (check.low, check.center, check.high) if check else (1.0, 1.0, 1.0)
        if seconds and name not in FOLLOWING:
            parts[name] = seconds * low, seconds * center, seconds * high
    for name, others in FOLLOWING.items():
        if times.get(name):
            share = times[name] / sum(times.get(other, 0.0) for other in others)
            low, center, high = (share * sum(parts[o][i] for o in others if o in parts)
                                 for i in range(3))
            parts[name] = low, center, high
    sizes = {UPDATE: parameters_of(model, cost.plan), UPDATES: tensors_of(model, cost.plan)}
    for timing in updates:
        if timing.name in sizes:
            each, seconds = sizes[timing.name] / timing.size, sorted(timing.seconds)
            before = parts.get(OPTIMIZER, (0.0, 0.0, 0.0))
            here = seconds[0], timing.median, seconds[-1]
            parts[OPTIMIZER] = tuple(a + each * b for a, b in zip(before, here, strict=True))
    if host is not None:
        own, update = host.seconds(model, cost.plan)
        like = found.get(DENSE)  # which runs in the same way
        low, high = (like.low / like.center, like.high / like.center) if like else (1.0, 1.0)
        parts[OWN] = own * low, own, own * high
        parts[OPTIMIZER] = tuple(max(0.0, one + update) for one in parts[OPTIMIZER])
    return Estimate(cost, parts)


@dataclass(frozen=True)
class HostShare:
    """What steps of the host take beyond the parts that stand for them, in seconds: norms and
    losses of its own, Python, small tensors. It may be less than nothing.

    Attributes:
        layer_s, rest_s: of products, for each layer and besides, with so many tokens.
        update_layer_s, update_rest_s: of the optimizer's step.
    """

    layer_s: float
    rest_s: float
    update_layer_s: float
    update_rest_s: float
    tokens: int

    def seconds(self, model: ModelShape, plan: ModelPlan) -> tuple[float, float]:
        """(products, optimizer) of a plan's step; products grow with tokens."""
        layers = model.fullest(plan.pp)[0]
        passes = plan.micro_batches(model) * plan.tokens(model) / self.tokens
        return (max(0.0, passes * (layers * self.layer_s + self.rest_s)),
                layers * self.update_layer_s + self.update_rest_s)


def host_share(network: MeasuredNetwork | None, processor: Processor,
               found: Mapping[str, Residuals]) -> HostShare | None:
    """From the host's steps of few layers, less what the parts predict of them; None: none were
    measured.
    """
    taken = {(t.name, t.size): t.median for t in processor.timings}
    if (HOST, HOST_LAYERS[0]) not in taken:
        return None
    cluster = network.cluster if network else Cluster()
    plan = ModelPlan(tp=1, pp=1, dp=cluster.ranks, ep=cluster.ranks, etp=1,
                     micro_batch=HOST_SEQUENCES, layout=LayoutChoice(r=1))
    over = []
    for layers in HOST_LAYERS:
        model = replace(processor.model, layers=layers, moe_every=1, skew=processor.skew,
                        global_batch=HOST_SEQUENCES * cluster.ranks)
        made = by_part(estimate(model, plan_cost(model, cluster, processor.device, plan), found,
                                processor.timings))
        over.append([taken[name, layers] - made[part][1]
                     for name, part in ((HOST, "products"), (HOST_UPDATE, OPTIMIZER))])
    (first, update), (second, more) = over
    return HostShare(second - first, 2 * first - second, more - update, 2 * update - more,
                     HOST_SEQUENCES * processor.model.sequence)


def by_part(estimate: Estimate) -> dict[str, list[float]]:
    """Low, middle and high seconds by `planner.prediction.PARTS`."""
    parts: dict[str, list[float]] = {}
    for name, seconds in estimate.parts.items():
        part = "exchange" if name in WAITS else OPTIMIZER if name == OPTIMIZER else "products"
        so_far = parts.get(part, [0.0] * 3)
        parts[part] = [before + float(one) for before, one in zip(so_far, seconds, strict=True)]
    return parts


def parts_of(cost: PlanCost) -> dict[str, float]:
    """Seconds by part, those of MoE layers in two: what they compute, and what they wait for."""
    layer = cost.layer
    busy = layer.forward.busy(COMPUTE) + layer.backward.busy(COMPUTE)
    found, total = dict(cost.time), cost.time[MOE_LAYERS]
    found[MOE_LAYERS] = total * min(1.0, busy / layer.seconds) if layer.seconds else 0.0
    found[MOE_EXCHANGE] = total - found[MOE_LAYERS]
    return found


def parameters_of(model: ModelShape, plan: ModelPlan) -> float:
    """Parameters that one rank of the fullest stage stores and updates."""
    return model.dense_parameters / (plan.tp * plan.pp) + expert_parameters(model, plan)


def tensors_of(model: ModelShape, plan: ModelPlan) -> int:
    """Parameters' tensors of a stage, which the host's optimizer updates one after another."""
    of_layer, others = TENSORS["megatron" if model.moe_first else "fairseq"]
    return of_layer * model.fullest(plan.pp)[0] + others


def doubts(model: ModelShape, made: Estimate, network: MeasuredNetwork | None, processor: Processor,
           found: Mapping[str, Residuals]) -> list[str]:
    """Why the prediction of a plan should not be trusted; empty: nothing speaks against it.

    Each names the value and its bound.
    """
    return [*_of_fits(network, processor), *_of_checks(model, made, found),
            *_of_sizes(model, made.cost.plan, network, found)]


def _of_fits(network: MeasuredNetwork | None, processor: Processor) -> list[str]:
    lines, cluster = [], network.cluster if network else Cluster()
    for what, timings in (
            ("network", [t for t in network.timings if t.name in COSTS] if network else []),
            ("processor", [t for t in processor.timings if t.name == MATMUL])):
        error = mean_error(timings, cluster, processor) if timings else 0.0
        if error > MEAN_ERROR:
            lines.append(f"the fit of the {what} is off by {error:.0%} on average, more than "
                         f"{MEAN_ERROR:.0%}")
    return lines


def _of_checks(model: ModelShape, made: Estimate,
               found: Mapping[str, Residuals]) -> list[str]:
    """A spread that is too wide, and what makes it; parts that take far longer than predicted, or
    far less.
    """
    lines = []
    if made.high > WIDTH * made.low:
        widest = max(made.parts, key=lambda name: made.parts[name][2] - made.parts[name][0])
        lines.append(f"the step's spread is from {show_time(made.low)} to {show_time(made.high)}, "
                     f"a factor of more than {WIDTH:g}, mostly because of: {widest}")
    for name, (_, seconds, _) in made.parts.items():
        check = check_of(name, model, made.cost.plan, found)
        if check and seconds > COUNTS * made.seconds and not (
                1 / FACTOR <= check.center <= FACTOR):
            lines.append(f"{name}: measured over predicted time is {check.center:.2f}, not within "
                         f"{1 / FACTOR:g} to {FACTOR:g}")
    return lines


def _of_sizes(model: ModelShape, plan: ModelPlan, network: MeasuredNetwork | None,
              found: Mapping[str, Residuals]) -> list[str]:
    """Sizes of the plan far outside what was measured."""
    ranks = plan.tp * plan.pp * plan.dp
    measured = network.cluster.ranks if network else 1
    lines = []
    if ranks > measured:
        lines.append(f"the plan is for {ranks} ranks, and {measured} were measured")
    other = DENSE if plan.tp > 1 and TENSOR in found else TENSOR
    for kind, wanted in sizes_of(model, plan).items():
        check = found.get(kind)
        if check and kind not in (HEAD, other) and not (
                check.sizes[0] / REACH <= wanted <= check.sizes[1] * REACH):
            show = show_size if kind in BYTES else "{:,.0f} tokens".format
            lines.append(f"{kind}: the plan needs {show(wanted)}, and {show(check.sizes[0])} to "
                         f"{show(check.sizes[1])} were measured: more than a factor of {REACH:g} "
                         "away")
    return lines


def refuse(reasons: Sequence[str]) -> None:
    """`ValueError` with the doubts, if there are any, and what to do."""
    if reasons:
        raise ValueError("the prediction is not to be trusted: " + "; ".join(reasons)
                         + "; the plan is written all the same, and its files say so; measure "
                         "again on idle ranks with --fresh, on the ranks that will train, or "
                         "accept the plan with --trust-fit")


def rank(model: ModelShape, costs: Sequence[PlanCost], found: Mapping[str, Residuals],
         updates: Sequence[Timing] = (), host: HostShare | None = None) -> list[Estimate]:
    """All plans by corrected seconds, fastest first; see `estimate`."""
    return sorted((estimate(model, cost, found, updates, host) for cost in costs),
                  key=lambda e: (e.seconds, e.cost.plan))
