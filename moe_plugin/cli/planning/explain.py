"""Search results as text: which layout or plan, its time and memory, and the alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_plugin.planner.cluster import HEAD_ROOM, Cluster, Device
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.model_search import Found, Space, alternatives, value_of
from moe_plugin.planner.offload.activation_problem import RECOMPUTE
from moe_plugin.planner.plan_cost import PlanCost
from moe_plugin.planner.units import show_change, show_size, show_time

NAMES = {
    "tp": "tensor parallel", "pp": "pipeline stages", "expert_ranks": "expert group",
    "micro_batch": "micro-batch", "r": "r", "d": "pieces d", "algorithm": "all-to-all",
    "send": "a token sent as"
}


def breakdown(cost: PlanCost) -> dict[str, Any]:
    """One plan as plain values, for JSON."""
    return {
        "plan": cost.plan.as_dict(), "label": cost.plan.label, "seconds": cost.seconds,
        "time": cost.time, "memory_bytes": cost.memory_bytes, "memory": cost.memory, "moe_layer": {
            "seconds": cost.layer.seconds, "phases": cost.layer.phases(),
            "hidden": cost.layer.hidden
        }
    }


def predicted(cost: PlanCost, cluster: Cluster, device: Device) -> str:
    """The predicted step of a plan, with the errors of the fits that it is made from."""
    inputs: dict[str, Device | Cluster] = {"device": device}
    if cluster.ranks > 1:
        inputs["cluster"] = cluster
    errors = (f"{what} {one.name}: " + (
        "not fitted to measurements" if one.fit_error is None else
        f"the fit is off by {one.fit_error:.0%} on average") for what, one in inputs.items())
    return f"predicted step: {show_time(cost.seconds)} ({'; '.join(errors)})"


def explain(model: ModelShape, cluster: Cluster, device: Device, found: Found, space: Space) -> str:
    """The ranking, the best plan's time and memory, and what each change would cost."""
    best = found.plans[0]
    lines = [
        f"{cluster.ranks} ranks ({cluster.nodes} nodes of {cluster.ranks_per_node}) of "
        f"{device.name} on {cluster.name}; "
        f"{(model.dense_parameters + model.expert_parameters) / 1e9:.2f}B parameters, "
        f"{model.global_batch} x {model.sequence} tokens per step",
        f"costed {found.tried} layouts; {found.skipped} plans ruled out by a bound, "
        f"{found.too_big} by memory",
        head_room(device),
        "", *plan_lines(found.plans)
    ]
    lines += ["", "why not otherwise: the best plan with another value",
              *_why_not(model, cluster, device, best, space)]
    return "\n".join(lines)


def plan_lines(plans: Sequence[PlanCost]) -> list[str]:
    """The plans, fastest first, and the first one's time and memory."""
    best = plans[0]
    again, layers = best.activations.count(RECOMPUTE), len(best.activations)
    return [
        "plans, fastest first:",
        *(f"  {show_time(cost.seconds):>10} {show_size(cost.memory_bytes):>10}  {cost.plan.label}"
          for cost in plans),
        "", f"{best.plan.label}: time per step"
        + (f", {again} of {layers} layers recomputed" if again else ""), *_time_and_memory(best)]


def head_room(device: Device) -> str:
    """How much memory plans may use, and why not all of it."""
    usable, whole = show_size(device.usable_bytes), show_size(device.memory_bytes)
    return (f"plans use at most {usable} of {whole} per rank: {100 * HEAD_ROOM:.0f} % stay free "
            "for fragmentation and libraries")


def _time_and_memory(best: PlanCost) -> list[str]:
    phases = ", ".join(f"{name} {show_time(s)}" for name, s in best.layer.phases().items() if s)
    return [
        *(f"  {name:24}{show_time(s):>10} {100 * s / best.seconds:5.1f} %"
          for name, s in best.time.items() if s),
        f"  one MoE layer: {show_time(best.layer.seconds)}, of which {phases}; overlap hides "
        f"{show_time(best.layer.hidden)}",
        "memory of the fullest rank",
        *(f"  {name:24}{show_size(size):>10}" for name, size in best.memory.items())
    ]


def _why_not(model: ModelShape, cluster: Cluster, device: Device, best: PlanCost,
             space: Space) -> list[str]:
    """For each number of the best plan, the best plan with another one in its place."""
    lines = []
    for axis, other in alternatives(model, cluster, device, best, space).items():
        if other.memory_bytes > device.usable_bytes:
            why = (f"needs {show_size(other.memory_bytes)} of {show_size(device.usable_bytes)} at "
                   "least")
        else:
            worse = max(best.time, key=lambda part: other.time[part] - best.time[part])
            change = other.time[worse] - best.time[worse]
            why = (f"{100 * (other.seconds / best.seconds - 1):+.1f} %, mostly {worse} "
                   f"({show_change(change)})")
        lines.append(f"  {NAMES[axis]} {value_of(other.plan, axis)}: {why}; {other.plan.label}")
    return lines or ["  nothing else divides"]
