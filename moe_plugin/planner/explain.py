"""A search's result in words: which plan, where its time and memory go, and what each alternative
would cost.
"""

from __future__ import annotations

from typing import Any

from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.device import Device
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.model_cost import PlanCost
from moe_plugin.planner.model_search import Found, Space, neighbours

NAMES = {
    "tp": "tensor parallel", "pp": "pipeline stages", "expert_ranks": "expert group",
    "micro_batch": "micro-batch", "r": "r", "d": "pieces d", "algorithm": "all-to-all"
}


def breakdown(cost: PlanCost) -> dict[str, Any]:
    """Plain values of one plan, for JSON."""
    return {
        "plan": cost.plan.as_dict(), "label": cost.plan.label, "seconds": cost.seconds,
        "time": cost.time, "memory_bytes": cost.memory_bytes, "memory": cost.memory, "moe_layer": {
            "seconds": cost.layer.seconds, "phases": cost.layer.phases(),
            "hidden": cost.layer.hidden
        }
    }


def explain(model: ModelShape, cluster: Cluster, device: Device, found: Found, space: Space) -> str:
    """Text: the ranking, the winner's time and memory, and why not otherwise."""
    best = found.plans[0]
    lines = [
        f"{cluster.ranks} ranks ({cluster.nodes} nodes of {cluster.ranks_per_node}) of "
        f"{device.name} on {cluster.name}; "
        f"{(model.dense_parameters + model.expert_parameters) / 1e9:.2f}B parameters, "
        f"{model.global_batch} x {model.sequence} tokens a step",
        f"costed {found.tried} layouts; {found.skipped} plans ruled out by a bound, "
        f"{found.too_big} by memory",
        "", "plans, fastest first:"
    ]
    for cost in found.plans:
        lines.append(
            f"  {1e3 * cost.seconds:10.1f} ms {cost.memory_bytes / 2**30:7.1f} GiB  "
            f"{cost.plan.label}"
        )
    lines += ["", f"{best.plan.label}: time of a step"]
    lines += [
        f"  {name:24}{1e3 * s:10.1f} ms {100 * s / best.seconds:5.1f} %"
        for name, s in best.time.items() if s
    ]
    lines += [
        f"  one MoE layer: {1e3 * best.layer.seconds:.3f} ms, of which " +
        ", ".join(f"{name} {1e3 * s:.3f}" for name, s in best.layer.phases().items() if s) +
        f"; overlap hides {1e3 * best.layer.hidden:.3f}"
    ]
    lines += ["memory of the fullest rank"]
    lines += [f"  {name:24}{size / 2**30:10.2f} GiB" for name, size in best.memory.items()]
    lines += ["", "why not otherwise"] + _why_not(model, cluster, device, best, space)
    return "\n".join(lines)


def _why_not(model: ModelShape, cluster: Cluster, device: Device, best: PlanCost,
             space: Space) -> list[str]:
    lines = []
    for what, other in neighbours(model, cluster, device, best, space).items():
        value = getattr(other.plan, what, None) if hasattr(other.plan, what) else getattr(
            other.plan.layout, what)
        if other.memory_bytes > device.memory_bytes:
            why = f"needs {other.memory_bytes / 2**30:.1f} GiB of {device.memory_bytes / 2**30:.1f}"
        else:
            worse = max(best.time, key=lambda part: other.time[part] - best.time[part])
            change = other.time[worse] - best.time[worse]
            why = (f"{100 * (other.seconds / best.seconds - 1):+.1f} %, mostly {worse} "
                   f"({1e3 * change:+.1f} ms)")
        lines.append(f"  {NAMES[what]} {value}: {why}")
    return lines or ["  nothing else divides"]
