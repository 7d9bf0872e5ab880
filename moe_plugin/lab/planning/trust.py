"""How far a plan's prediction can be trusted: corrections, spread, confidence, and doubts.

Every repeat of every measurement is divided by what the fitted constants predict for it. The
median of these ratios corrects the predicted time of the part of a step that the measurement stands
for; the ratios between which nine of ten repeats are give its spread. The spread of a step counts
the errors of all parts as if they came together, which is never too small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_plugin.lab.planning.measured import (
    ALL_REDUCE,
    DENSE,
    HEAD,
    MATMUL,
    MOE,
    TENSOR,
    MeasuredNetwork,
    Processor,
    Timing,
)
from moe_plugin.lab.planning.model import ModelPlan, ModelShape
from moe_plugin.lab.planning.model_cost import PlanCost, dense_layer_s, dense_s, expert_parameters
from moe_plugin.lab.planning.recompute import RECOMPUTED
from moe_plugin.planner.all_to_all import COSTS, predict
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.collectives import GroupShape, all_reduce_s
from moe_plugin.planner.layer_cost import layer_cost
from moe_plugin.planner.units import show_size, show_time

EXCHANGES = "all-to-all"
# which measurement stands for a part of a step
CHECKS = {
    "attention": DENSE, "dense FFN": DENSE, "output head": HEAD, "MoE layers": MOE,
    "gradient reduction": ALL_REDUCE, "tensor parallel": ALL_REDUCE, "stage to stage": EXCHANGES
}
# and in plans with tensor-parallel ranks, for all parts of a dense layer together
CUT = dict.fromkeys(("attention", "dense FFN", "tensor parallel"), TENSOR)
LAYERS = ("attention", "dense FFN", "tensor parallel", "MoE layers")
STAGE = (*LAYERS, "output head", "stage to stage")
# parts that are other parts once more, and are corrected as these are
FOLLOWING = {"pipeline bubble": STAGE, RECOMPUTED: LAYERS}
OPTIMIZER = "optimizer"
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
        ratios: of every repeat.
        sizes: smallest and largest size that was measured.
    """

    ratios: tuple[float, ...]
    sizes: tuple[float, float]

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
    tokens = int(timing.size)
    if timing.name == MATMUL:
        return device.matmul_s(tokens, 2.0 * tokens * model.model_dim * model.expert_dim)
    if timing.name == MOE:
        return layer_cost(model.layer(tokens), cluster, device, LayoutChoice(r=1)).seconds
    if timing.name == TENSOR:
        return sum(dense_layer_s(model, cluster, device, tokens,
                                 processor.tensor_ranks).values())
    parts = dense_s(model, device, tokens)
    if timing.name == DENSE:
        return parts["attention"] + parts["dense FFN"]
    return parts["output head"] if timing.name == HEAD else None


def residuals(network: MeasuredNetwork | None, processor: Processor) -> dict[str, Residuals]:
    """By kind of measurement: all-to-all (all algorithms together), all-reduce, matmul, parts.

    network: None on one rank.
    """
    cluster = network.cluster if network else Cluster()
    ratios: dict[str, list[float]] = {}
    sizes: dict[str, list[float]] = {}
    for timing in [*(network.timings if network else []), *processor.timings]:
        expected = predicted_s(timing, cluster, processor)
        if expected:
            kind = EXCHANGES if timing.name in COSTS else timing.name
            ratios.setdefault(kind, []).extend(s / expected for s in timing.seconds)
            sizes.setdefault(kind, []).append(timing.size)
    return {kind: Residuals(tuple(found), (min(sizes[kind]), max(sizes[kind])))
            for kind, found in ratios.items()}


def check_of(name: str, plan: ModelPlan, found: Mapping[str, Residuals]) -> Residuals | None:
    """The measurement that stands for a part of a plan's step; None: there is none."""
    cut = found.get(CUT.get(name, "")) if plan.tp > 1 else None
    return cut or found.get(CHECKS.get(name, ""))


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
             update: Timing | None = None) -> Estimate:
    """A plan's step, corrected part by part; what nothing was measured for stays as predicted.

    update: an optimizer step that was measured; the planner's own model has none.
    """
    parts: dict[str, tuple[float, float, float]] = {}
    for name, seconds in cost.time.items():
        check = check_of(name, cost.plan, found)
        low, center, high = (check.low, check.center, check.high) if check else (1.0, 1.0, 1.0)
        if seconds and name not in FOLLOWING:
            parts[name] = seconds * low, seconds * center, seconds * high
    for name, others in FOLLOWING.items():
        if cost.time.get(name):
            share = cost.time[name] / sum(cost.time[other] for other in others)
            low, center, high = (share * sum(parts[o][i] for o in others if o in parts)
                                 for i in range(3))
            parts[name] = low, center, high
    if update is not None:
        each = parameters_of(model, cost.plan) / update.size
        seconds = sorted(update.seconds)
        parts[OPTIMIZER] = each * seconds[0], each * update.median, each * seconds[-1]
    return Estimate(cost, parts)


def parameters_of(model: ModelShape, plan: ModelPlan) -> float:
    """Parameters that one rank of the fullest stage stores and updates."""
    return model.dense_parameters / (plan.tp * plan.pp) + expert_parameters(model, plan)


def doubts(model: ModelShape, made: Estimate, network: MeasuredNetwork | None, processor: Processor,
           found: Mapping[str, Residuals]) -> list[str]:
    """Why the prediction of a plan should not be trusted; empty: nothing speaks against it.

    Each names the value and its bound.
    """
    return [*_of_fits(network, processor), *_of_checks(made, found),
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


def _of_checks(made: Estimate, found: Mapping[str, Residuals]) -> list[str]:
    """A spread that is too wide, and what makes it; parts that take far longer than predicted, or
    far less.
    """
    lines = []
    if made.high > WIDTH * made.low:
        widest = max(made.parts, key=lambda name: made.parts[name][2] - made.parts[name][0])
        lines.append(f"the step's spread is from {show_time(made.low)} to {show_time(made.high)}, "
                     f"a factor of more than {WIDTH:g}, mostly because of: {widest}")
    for name, (_, seconds, _) in made.parts.items():
        check = check_of(name, made.cost.plan, found)
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
    tokens, size = plan.tokens(model), {}
    if plan.expert_ranks > 1:
        shape = model.layer(tokens)
        size[EXCHANGES] = (shape.rows * max(1, plan.layout.r) * shape.row_bytes / plan.layout.d
                           if plan.layout.exchanges else
                           model.experts * shape.expert_bytes / plan.expert_ranks)
    if plan.dp > 1:
        size[ALL_REDUCE] = 4 * model.dense_parameters / (plan.tp * plan.pp)
    dense = TENSOR if plan.tp > 1 and TENSOR in found else DENSE
    size |= {MOE: tokens, dense: plan.micro_batch * model.sequence}
    for kind, wanted in size.items():
        check = found.get(kind)
        if check and not check.sizes[0] / REACH <= wanted <= check.sizes[1] * REACH:
            show = show_size if kind in (EXCHANGES, ALL_REDUCE) else "{:,.0f} tokens".format
            lines.append(f"{kind}: the plan needs {show(wanted)}, and {show(check.sizes[0])} to "
                         f"{show(check.sizes[1])} were measured: more than a factor of {REACH:g} "
                         "away")
    return lines


def refuse(reasons: Sequence[str]) -> None:
    """`ValueError` with the doubts, if there are any, and what to do."""
    if reasons:
        raise ValueError("the prediction is not to be trusted: " + "; ".join(reasons)
                         + "; measure again on idle ranks with --fresh, on the ranks that will "
                         "train, or take it as it is with --trust-fit")


def rank(model: ModelShape, costs: Sequence[PlanCost], found: Mapping[str, Residuals],
         update: Timing | None = None) -> list[Estimate]:
    """All plans by corrected seconds, fastest first."""
    return sorted((estimate(model, cost, found, update) for cost in costs),
                  key=lambda e: (e.seconds, e.cost.plan))
