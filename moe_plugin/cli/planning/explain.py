"""Functions that format the results of a search: the best plan, its time and memory, and the
alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from moe_plugin.cli.figures import columns, log_scale, log_ticks, pyplot, save_figure
from moe_plugin.planner.cluster import HEAD_ROOM, Cluster, Device
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.model_search import Found, Space, alternatives, value_of
from moe_plugin.planner.offload.activation_problem import RECOMPUTE
from moe_plugin.planner.plan_cost import PlanCost
from moe_plugin.planner.units import show_change, show_size, show_time


# Predicted all-to-all times as tables and a plot.
def sent(size: int) -> str:
    """Format the number of bytes sent by each rank for a table."""
    return f"{show_size(size)} by each rank"


def _time_of(name: str, item: tuple[int, dict[str, float]]) -> str:
    return show_time(item[1][name] / 1e3)


def predicted_parts(rows: list[dict[str, Any]]) -> list[str]:
    """Return the sections of a page of predicted times. The page has a title and one table per
    message size.
    """
    parts = []
    for size in dict.fromkeys(row["bytes"] for row in rows):
        by_ranks: dict[int, dict[str, float]] = {}
        for row in rows:
            if row["bytes"] == size:
                by_ranks.setdefault(row["ranks"], {})[row["algorithm"]] = row["ms"]
        parts += [f"{sent(size)}, predicted time:", columns(by_ranks.items(), {
            "ranks": "{0[0]:,} ranks",
            **{name: partial(_time_of, name) for name in next(iter(by_ranks.values()))},
            "linear / 2dh": lambda item: (
                f"{item[1]['linear'] / item[1]['2dh'] if item[1]['2dh'] else 1:.2f}x"),
            "best": lambda item: min(item[1], key=item[1].get)})]
    return parts


def plot_model(rows: list[dict[str, Any]], path: str) -> None:
    """Plot the time against the number of ranks, with one panel per message size."""
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    figure, axes = pyplot().subplots(1, len(sizes), figsize=(3.6 * len(sizes), 3.6),
                                     squeeze=False, layout="constrained")
    for axis, size in zip(axes[0], sizes, strict=True):
        for name in dict.fromkeys(row["algorithm"] for row in rows):
            line = [row for row in rows if row["bytes"] == size and row["algorithm"] == name]
            axis.plot([r["ranks"] for r in line], [r["ms"] for r in line], marker=".", label=name)
        axis.set(xlabel="ranks", title=f"{show_size(size)} per rank")
        ranks = sorted({row["ranks"] for row in rows})
        log_ticks(axis, ranks[:: max(1, len(ranks) // 4)])
        log_scale(axis)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("predicted ms")
    axes[0][0].legend()
    save_figure(figure, path)


NAMES = {
    "tp": "tensor parallel", "pp": "pipeline stages", "expert_ranks": "expert group",
    "micro_batch": "micro-batch", "r": "parallel.r", "d": "pieces", "algorithm": "all-to-all",
    "send": "dispatch.send"
}


def breakdown(cost: PlanCost) -> dict[str, Any]:
    """Convert a plan to plain values for JSON."""
    return {
        "plan": cost.plan.as_dict(), "label": cost.plan.label, "seconds": cost.seconds,
        "time": cost.time, "memory_bytes": cost.memory_bytes, "memory": cost.memory, "moe_layer": {
            "seconds": cost.layer.seconds, "phases": cost.layer.phases(),
            "hidden": cost.layer.hidden
        }
    }


def predicted(cost: PlanCost, cluster: Cluster, device: Device) -> str:
    """Return the predicted step time of a plan and the fitting errors of the models used for the
    prediction.
    """
    inputs: dict[str, Device | Cluster] = {"device": device}
    if cluster.ranks > 1:
        inputs["cluster"] = cluster
    errors = (f"{label} {fitted.name}: " + (
        "not fitted to measurements" if fitted.fit_error is None else
        f"the fit is off by {fitted.fit_error:.0%} on average") for label, fitted in inputs.items())
    return f"predicted step: {show_time(cost.seconds)} ({'; '.join(errors)})"


def explain(model: ModelShape, cluster: Cluster, device: Device, found: Found, space: Space) -> str:
    """Return a text that ranks the plans, breaks down the time and memory of the best plan, and
    shows how much slower each alternative setting would be.
    """
    best = found.plans[0]
    lines = [
        f"{cluster.ranks} ranks ({cluster.nodes} nodes of {cluster.ranks_per_node}) of "
        f"{device.name} on {cluster.name}; "
        f"{(model.dense_parameters + model.expert_parameters) / 1e9:.2f}B parameters, "
        f"{model.global_batch} x {model.sequence} tokens per step",
        f"computed the cost of {found.tried} layouts; {found.skipped} plans excluded by a bound, "
        f"{found.too_big} by memory",
        head_room(device),
        "", *plan_lines(found.plans)
    ]
    lines += ["", "alternatives: the best plan with a different value of one setting",
              *_why_not(model, cluster, device, best, space)]
    return "\n".join(lines)


def plan_lines(plans: Sequence[PlanCost]) -> list[str]:
    """Return lines that list the plans from fastest to slowest. The lines also show the time and
    memory of the fastest plan.
    """
    best = plans[0]
    again, layers = best.activations.count(RECOMPUTE), len(best.activations)
    return [
        "plans, fastest first:",
        *(f"  {show_time(cost.seconds):>10} {show_size(cost.memory_bytes):>10}  {cost.plan.label}"
          for cost in plans),
        "", f"{best.plan.label}: time per step"
        + (f", {again} of {layers} layers recomputed" if again else ""), *_time_and_memory(best)]


def head_room(device: Device) -> str:
    """Return a line that states how much memory plans may use, and why the rest of the memory is
    reserved.
    """
    usable, whole = show_size(device.usable_bytes), show_size(device.memory_bytes)
    return (f"plans use at most {usable} of {whole} per rank: {100 * HEAD_ROOM:.0f} % stay free "
            "for fragmentation and libraries")


def _time_and_memory(best: PlanCost) -> list[str]:
    phases = ", ".join(f"{name} {show_time(s)}" for name, s in best.layer.phases().items() if s)
    return [
        *(f"  {name:24}{show_time(s):>10} {100 * s / best.seconds:5.1f} %"
          for name, s in best.time.items() if s),
        f"  one MoE layer: {show_time(best.layer.seconds)}, consisting of {phases}; overlap hides "
        f"{show_time(best.layer.hidden)}",
        "memory of the fullest rank",
        *(f"  {name:24}{show_size(size):>10}" for name, size in best.memory.items())
    ]


def _why_not(model: ModelShape, cluster: Cluster, device: Device, best: PlanCost,
             space: Space) -> list[str]:
    """For each setting of the best plan, describe the best alternative plan in which that setting
    has a different value.
    """
    lines = []
    for axis, other in alternatives(model, cluster, device, best, space).items():
        if other.memory_bytes > device.usable_bytes:
            why = (f"needs at least {show_size(other.memory_bytes)}, but only "
                   f"{show_size(device.usable_bytes)} is usable")
        else:
            worse = max(best.time, key=lambda part: other.time[part] - best.time[part])
            change = other.time[worse] - best.time[worse]
            why = (f"{100 * (other.seconds / best.seconds - 1):+.1f} %, mostly {worse} "
                   f"({show_change(change)})")
        lines.append(f"  {NAMES[axis]} {value_of(other.plan, axis)}: {why}; {other.plan.label}")
    return lines or ["  no other values divide evenly"]
