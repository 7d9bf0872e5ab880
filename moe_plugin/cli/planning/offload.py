"""Functions that format memory plans as text and as plain values. For each block, the output also
shows the cost of the alternatives to its keep, recompute or swap decision.
"""

from __future__ import annotations

import math
from typing import Any

from moe_plugin.planner.offload.activation_plan import SwapPlan, uniform
from moe_plugin.planner.offload.activation_problem import DECISIONS, KEEP
from moe_plugin.planner.offload.weight_streaming import StreamPlan
from moe_plugin.planner.units import show_change, show_size, show_time


def keep_all_bytes(plan: SwapPlan) -> int:
    """Return the device memory, in bytes, needed to keep all activations."""
    held = most = 0
    for block in plan.problem.blocks:
        held += block.activation_bytes
        most = max(most, held + block.workspace_bytes)
    return plan.base + most


def alternatives(plan: SwapPlan) -> list[dict[str, float]]:
    """For each block, return how many seconds each alternative decision (keep, recompute or swap)
    would add to the step.

    The value is inf if the alternative would exceed the memory.
    """
    by_block = []
    for j, (block, taken) in enumerate(zip(plan.problem.blocks, plan.decisions, strict=True)):
        costs = {}
        for decision in block.choices:
            if decision != taken:
                changed = (*plan.decisions[:j], decision, *plan.decisions[j + 1:])
                costs[decision] = plan.problem.seconds(changed) - plan.seconds
        by_block.append(costs)
    return by_block


def as_dict(plan: SwapPlan) -> dict[str, Any]:
    """Convert a memory plan to plain values for JSON. Alternatives that would exceed the memory
    have the value None.
    """
    return {
        "seconds": plan.seconds, "bound_s": plan.bound_s, "proved": plan.proved,
        "compute_s": plan.problem.compute_s, "peak_bytes": plan.outcome.peak,
        "limit_bytes": plan.limit, "keep_all_bytes": keep_all_bytes(plan),
        "stall_s": plan.outcome.stall_s, "uniform": {k: _finite(v)
                                                      for k, v in uniform(plan).items()},
        "blocks": [{
            "name": block.name, "decision": decision, "activation_bytes": block.activation_bytes,
            "others": {k: _finite(v) for k, v in costs.items()}
        } for block, decision, costs in zip(plan.problem.blocks, plan.decisions,
                                            alternatives(plan), strict=True)]
    }


def _finite(value: float) -> float | None:
    return value if value < math.inf else None


def explain(plan: SwapPlan, name: str = "model") -> str:
    """Describe a memory plan: the decision for each block and its reason, the memory, and the step
    time if all blocks used the same decision.
    """
    blocks, counts = plan.problem.blocks, {d: plan.decisions.count(d) for d in DECISIONS}
    width = max(5, *(len(block.name) for block in blocks))
    lines = [
        f"{name}: {len(blocks)} blocks; keeping everything needs "
        f"{show_size(keep_all_bytes(plan))}, the limit is {show_size(plan.limit)}",
        ", ".join(f"{count} {decision}" for decision, count in counts.items()),
        "", f"{'block':{width}}  decision   activations     forward     copies  otherwise"
    ]
    for block, decision, costs in zip(blocks, plan.decisions, alternatives(plan), strict=True):
        copies = block.swap_out_s + block.swap_in_s
        lines.append(
            f"{block.name:{width}}  {decision:9} {show_size(block.activation_bytes):>12}"
            f"{show_time(block.forward_s):>12}{show_time(copies):>11}  "
            + ", ".join(f"{k} {_change(v)}" for k, v in costs.items()))
    lines += ["", "step time (predicted)", *_times(plan)]
    outcome = plan.outcome
    lines.append(
        f"peak {show_size(outcome.peak)}; computing is busy {100 * outcome.occupancy:.1f} % of the "
        f"time and waits {show_time(outcome.stall_s)}; {show_size(outcome.moved_out)} copied out, "
        f"{show_size(outcome.moved_in)} copied in")
    return "\n".join(lines)


def _times(plan: SwapPlan) -> list[str]:
    rows = [("this plan", f"{show_time(plan.seconds):>10}")]
    for decision, seconds in uniform(plan).items():
        if seconds < math.inf:
            rows.append((f"{decision} all", f"{show_time(seconds):>10}"))
        else:
            need = f" ({show_size(keep_all_bytes(plan))})" if decision == KEEP else ""
            rows.append((f"{decision} all", f"does not fit{need}"))
    proof = ("no other decisions are faster" if plan.proved else
             f"no decisions are faster than {show_time(plan.bound_s)}; these are the best found")
    return [*(f"  {label:16}{value}" for label, value in rows), f"  {proof}"]


def _change(seconds: float) -> str:
    return show_change(seconds) if seconds < math.inf else "does not fit"


def stream_as_dict(plan: StreamPlan) -> dict[str, Any]:
    """Convert a plan for streamed weights to plain values for JSON."""
    return {
        "seconds": plan.seconds, "micro_batches": plan.model.batches, "segments": list(plan.counts),
        "hides": plan.hides, "fill_s": plan.fill_s, "stall_s": plan.stall_s,
        "peak_bytes": plan.outcome.peak, "limit_bytes": plan.model.limit,
        "edge_bytes": plan.edge_bytes
    }


def explain_stream(plan: StreamPlan, name: str = "model") -> str:
    """Describe a plan for streamed weights: the segments, whether their copies are hidden, the step
    time, and the memory.
    """
    model = plan.model
    whole = model.base + sum(layer.weight_bytes for layer in model.layers)
    lines = [
        f"{name}: {len(model.layers)} layers; with all weights {show_size(whole)}, the limit is "
        f"{show_size(model.limit)}; {plan.model.batches} accumulated micro-batches",
        "", "segment         layers     weights     forward     backward       load     gradients"
    ]
    for part in model.segments(plan.ends):
        lines.append(
            f"{model.label(part):14}{part.end - part.begin:8}{show_size(part.weights):>12}"
            f"{show_time(part.forward_s):>12}{show_time(part.backward_s):>13}"
            f"{show_time(part.load_s):>11}{show_time(part.out_s):>14}")
    stalls = ("computing hides all copies but the first load" if plan.hides else
              f"computing waits {show_time(plan.stall_s)}; accumulate more micro-batches")
    lines += ["", f"step time (predicted) {show_time(plan.seconds)}, first load "
              f"{show_time(plan.fill_s)}; {stalls}",
              f"peak {show_size(plan.outcome.peak)}; {show_size(plan.outcome.moved_in)} copied in, "
              f"{show_size(plan.outcome.moved_out)} copied out"]
    return "\n".join(lines)
