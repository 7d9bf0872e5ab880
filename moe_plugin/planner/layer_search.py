"""Which layout for one layer, and why."""

from __future__ import annotations

from collections.abc import Iterable

from moe_plugin.planner.all_to_all import COSTS
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.device import Device
from moe_plugin.planner.layer_cost import PHASES, LayerCost, LayerShape, layer_cost

DEGREES = (1, 2, 4, 8)


def rank_choices(shape: LayerShape, cluster: Cluster, device: Device,
                 choices: Iterable[LayoutChoice] | None = None,
                 memory_bytes: float | None = None) -> list[LayerCost]:
    """All choices by predicted seconds, fastest first; equal ones in the order of the record. What
    exceeds `memory_bytes` is left out.

    Raises: ValueError: nothing fits the memory; it names the least that is needed.
    """
    if choices is None:
        choices = legal_choices(shape.experts, cluster.ranks, degrees=DEGREES,
                                algorithms=tuple(COSTS))
    costs = [layer_cost(shape, cluster, device, choice) for choice in choices]
    fitting = [c for c in costs if memory_bytes is None or c.memory_bytes <= memory_bytes]
    if not fitting:
        least = min((c.memory_bytes for c in costs), default=0.0)
        raise ValueError(
            f"no layout fits {memory_bytes:.3g} bytes a rank: the smallest needs {least:.3g}; "
            "lower tokens or hidden_dim, or use "
            "more ranks")
    return sorted(fitting, key=lambda c: (c.seconds, c.choice))


def explain_layer(costs: list[LayerCost], top: int = 6) -> str:
    """A table: milliseconds by phase, what overlap hides, the total, and what the best gains over
    the second best.
    """
    head = f"{'layout':28}" + "".join(f"{p:>11}"
                                      for p in PHASES) + f"{'hidden':>9}{'total ms':>10}{'MiB':>9}"
    lines = [head]
    for cost in costs[:top]:
        cells = "".join(f"{1e3 * s:11.3f}" for s in cost.phases().values())
        lines.append(
            f"{cost.choice.label:28}{cells}{1e3 * cost.hidden:9.3f}{1e3 * cost.seconds:10.3f}{cost.memory_bytes / 2**20:9.0f}"
        )
    if len(costs) > 1:
        best, second = costs[0], costs[1]
        mine, theirs = best.phases(), second.phases()
        gain = max(PHASES, key=lambda p: theirs[p] - mine[p])
        what = "overlap" if best.hidden - second.hidden > theirs[gain] - mine[gain] else gain
        lines.append(
            f"{best.choice.label} is {100 * (second.seconds / best.seconds - 1):.1f} % faster than "
            f"{second.choice.label}, "
            f"mostly by less time in {what}" if what != "overlap" else
            f"{best.choice.label} is {100 * (second.seconds / best.seconds - 1):.1f} % faster than "
            f"{second.choice.label}, "
            "mostly because more of its exchange is hidden")
    return "\n".join(lines)
