"""A plan's corrected step by the parts that a run measures, too (`planner.prediction`)."""

from __future__ import annotations

from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.device import Device
from moe_plugin.planner.model import ModelPlan, ModelShape
from moe_plugin.planner.plan_cost import PlanCost
from moe_plugin.planner.prediction import Prediction
from moe_plugin.planner.trust import INSIDE, WAITS, Estimate, by_part, parts_of

BASIS = f"{INSIDE:.0%} of the repeats that `moe-plugin recommend` measured on these ranks"


def task_of(model: ModelShape, plan: ModelPlan, host: str) -> str:
    """What plans that can be compared have in common."""
    sizes = " ".join(f"{name}={value}" for name, value in vars(model).items()
                     if name not in ("moe_first", "skew", "state_bytes"))
    return f"{host}, {plan.tp * plan.pp * plan.dp} ranks, {sizes}"


def predicted_step(model: ModelShape, estimate: Estimate, host: str, machine: str,
                   basis: str) -> Prediction:
    """The prediction of a plan for a run's `observe.prediction`.

    Args:
        machine: that the constants are of.
        basis: how the interval was made.
    """
    return Prediction(task=task_of(model, estimate.cost.plan, host), machine=machine, basis=basis,
                      plan=estimate.cost.plan.label, parts=by_part(estimate),
                      memory_bytes=estimate.cost.memory_bytes, skew=model.skew)


# by how much, up and down, constants after a data sheet may be off; not measured
DATA_SHEET = 2.0


def unmeasured(cost: PlanCost, cluster: Cluster, device: Device) -> Estimate:
    """A plan's step by the files alone. A part is off by as much as the fit of its file is on
    average, or by `DATA_SHEET` times where the file was fitted to nothing; parts of hosts and of
    layers that are neither products nor exchanges are not in it.
    """
    def factor(name: str) -> float:
        off = (cluster if name in WAITS else device).fit_error
        return DATA_SHEET if off is None else 1 + off

    return Estimate(cost, {name: (seconds / factor(name), seconds, seconds * factor(name))
                           for name, seconds in parts_of(cost).items() if seconds})


def basis(cluster: Cluster, device: Device) -> str:
    """How `unmeasured` made its interval."""
    return "; ".join(
        f"{what} {one.name}: " + (
            f"not fitted to measurements, taken to be off by a factor of {DATA_SHEET:g}"
            if one.fit_error is None else f"the fit is off by {one.fit_error:.0%} on average")
        for what, one in (("device", device), ("cluster", cluster)))
