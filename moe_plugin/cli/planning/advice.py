"""A recommendation as text and as plain values: what was measured, the plans, the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.measured import MATMUL, MeasuredNetwork, Processor, Timing
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.offload.activation_problem import RECOMPUTE
from moe_plugin.planner.trust import BYTES, INSIDE, Estimate, Residuals, mean_error
from moe_plugin.planner.units import show_size, show_time

LEFT_OUT = (
    "in no prediction: data loading, logging, evaluation, checkpoints",
    "not searched: pipeline schedules (1f1b is predicted; --pipeline-schedule auto measures) and",
    "swapped activations (they are kept, or recomputed where memory is short)",
)


def measured_lines(network: MeasuredNetwork | None, processor: Processor,
                   found: Mapping[str, Residuals]) -> list[str]:
    """What was measured, how far the fits are off, and what was measured over what they predict."""
    device, cluster = processor.device, network.cluster if network else Cluster()
    products = [t for t in processor.timings if t.name == MATMUL]
    lines = [f"processor: {device.name}, {device.flops / 1e9:,.1f} GFLOP/s, half of it at "
             f"{device.half_rows:.0f} rows;\n{_error(products, cluster, processor)}"]
    if network:
        exchanges = [t for t in network.timings if t.name in COSTS]
        lines.append(
            f"network: {cluster.nodes} x {cluster.ranks_per_node} ranks, "
            f"{network.about.get('backend', '')}, {len(exchanges)} exchanges; "
            f"{_error(exchanges, cluster, processor)}")
    lines += ["", f"{'measured / predicted':22}{'median':>8}   {INSIDE:.0%} of the repeats"]
    lines += [f"  {kind:20}{check.center:8.2f}   {check.low:.2f} to {check.high:.2f}, "
              f"{_sizes(kind, check)}" for kind, check in found.items()]
    return lines


def _error(timings: Sequence[Timing], cluster: Cluster, processor: Processor) -> str:
    if not timings:  # a file that was edited by hand
        return "nothing that was measured checks the fit"
    return f"the fit is off by {mean_error(timings, cluster, processor):.0%} on average"


def _sizes(kind: str, check: Residuals) -> str:
    low, high = check.sizes
    if kind in BYTES:
        return f"{show_size(low)} to {show_size(high)} per rank"
    return f"{low:,.0f} to {high:,.0f} {'rows' if kind == MATMUL else 'tokens'}"


def plan_lines(estimates: Sequence[Estimate]) -> list[str]:
    """The plans by corrected time, and the best one's step by part."""
    best = estimates[0]
    lines = ["plans, fastest first, after correction:"]
    lines += [f"  {show_time(e.seconds):>8}, {show_time(e.low)} to {show_time(e.high)}; "
              f"{show_size(e.cost.memory_bytes)}  {e.cost.plan.label}" for e in estimates]
    lines += ["", f"{best.cost.plan.label}: one step{_recomputes(best)}"]
    return lines + [
        f"  {name:22}{show_time(middle):>10}   {show_time(low)} to {show_time(high)}"
        for name, (low, middle, high) in best.parts.items()
    ]


def _recomputes(best: Estimate) -> str:
    policies = best.cost.activations
    again = policies.count(RECOMPUTE)
    return f", {again} of {len(policies)} layers recomputed" if again else ""


def verdict_lines(best: Estimate, doubts: Sequence[str]) -> list[str]:
    """The prediction with its spread and confidence, and why it should not be trusted."""
    return [
        f"predicted step: {show_time(best.seconds)}, {show_time(best.low)} to "
        f"{show_time(best.high)}; confidence: {best.confidence(bool(doubts))}",
        *(f"warning: {doubt}" for doubt in doubts),
    ]


def as_dict(model: ModelShape, estimates: Sequence[Estimate], found: Mapping[str, Residuals],
            doubts: Sequence[str]) -> dict[str, Any]:
    """The same as plain values, for JSON. Seconds and bytes."""
    best = estimates[0]
    return {
        "seconds": best.seconds, "low": best.low, "high": best.high,
        "confidence": best.confidence(bool(doubts)), "doubts": list(doubts),
        "tokens_per_step": model.global_batch * model.sequence, "plans": [{
            "plan": e.cost.plan.as_dict(), "label": e.cost.plan.label, "seconds": e.seconds,
            "low": e.low, "high": e.high, "memory_bytes": e.cost.memory_bytes,
            "activations": list(e.cost.activations),
            "parts": {name: list(part) for name, part in e.parts.items()}
        } for e in estimates], "measured_over_predicted": {
            kind: {"median": c.center, "low": c.low, "high": c.high, "sizes": list(c.sizes)}
            for kind, c in found.items()
        }
    }
