"""Training steps of a model with 64 experts with Adam as each host has it and by --moe-fused-adam.

One process with one thread, on CPU; two models with equal weights and data, steps in turn: the
median processor time of a step, of the optimizer in it, and the largest difference between the
losses. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from moe_plugin.lab.bench.ranks import on_processes
from moe_plugin.lab.bench.report import columns
from moe_plugin.lab.bench.study import Option
from moe_plugin.lab.bench.train.run import TrainPlan, measure_rank, write_text
from moe_plugin.lab.bench.train.shapes import TrainShape
from moe_plugin.lab.bench.train.sides import FUSED_ADAM
from moe_plugin.lab.bench.train.steps import SideTimes

SHAPE = TrainShape(name="adam", width=256, inner=512, experts=64, top_k=2, tokens=2048)
OURS = {"as the host has it": {}, FUSED_ADAM: {FUSED_ADAM: True}}
TITLE, WARM_UP = "The optimizer's share of a step", 2
OPTIONS = {"host": Option("megatron", "the trainer", choices=("fairseq", "megatron")),
           "steps": Option(10, "timed steps of each model", quick=2)}


def result(side: SideTimes) -> dict[str, float]:
    """Medians."""
    whole, adam = (1e3 * statistics.median(times) for times in (side.seconds, side.optimizer_s))
    return {"step_ms": round(whole, 1), "optimizer_ms": round(adam, 1),
            "share": round(adam / whole, 3), "tokens_per_s": round(SHAPE.tokens / whole * 1e3)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plan = TrainPlan(args.host, SHAPE, write_text(Path(folder)), args.steps, WARM_UP, OURS,
                         others=False, processor=True)
        sides = on_processes(1, measure_rank, plan)
    curves = [side.losses for side in sides]
    return {"host": args.host,
            "parameters": 2 * SHAPE.layers * SHAPE.experts * SHAPE.width * SHAPE.inner,
            "sides": {side.name: result(side) for side in sides},
            "loss_difference": max(abs(a - b) for a, b in zip(*curves, strict=True))}


def body(found: dict[str, Any]) -> list[str]:
    return [
        f"In {found['host']}: a model with {found['parameters']:,} parameters of experts; "
        "processor time, medians; the losses of the two differ by at most "
        f"{found['loss_difference']:.1g}.",
        columns([{"name": name, **side} for name, side in found["sides"].items()], {
            "Adam": "{name}", "step, ms": "{step_ms:.1f}", "optimizer, ms": "{optimizer_ms:.1f}",
            "share": "{share:.1%}", "tokens/s": "{tokens_per_s:,}"})]
