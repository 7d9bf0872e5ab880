"""What `parallel: predicted` assumes of the ranks of one machine, against whole steps.

Reads docs/benchmarks/data/train.json (`moe-plugin bench train`), measures nothing and takes a
second. Fits, by least squares over all layouts of all shapes in both hosts, what it costs ranks to
meet in a collective, a byte on its way, and a byte in and out of a buffer for rows; these belong
into `moe_plugin/tuning/default_hardware.py` by hand. Exit status 1 if a predicted layout is
certainly more than 3 % behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import numpy as np
import torch

from moe_plugin.cli.figures import columns
from moe_plugin.comm import run_simulated
from moe_plugin.config import MoEConfig
from moe_plugin.planner import Cluster
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Link
from moe_plugin.planner.device import Device
from moe_plugin.planner.fit import nonnegative_least_squares
from moe_plugin.planner.layer_cost import LayerShape, layer_cost, rank_choices
from moe_plugin.tuning.default_hardware import default_cluster, default_device
from moe_plugin.tuning.predicted import SKEW, worth_taking
from scripts.bench.paired import paired
from scripts.bench.study import DATA, ROOT, read_numbers
from scripts.bench.train.results import newest, reports

STEPS = ROOT / "docs" / "benchmarks" / DATA / "train.json"
TITLE = "Predicted layouts against measured ones"
RANKS, MOST_BEHIND = 2, 0.03
GATHERED = LayoutChoice(r=0)
# the sides of `moe-plugin bench train` by layout; all of them are compared with gathered parameters
SIDES = {LayoutChoice(r=1): "linear", GATHERED: "r=0",
         LayoutChoice(r=1, gather_tokens=True): "all_gather"}
# constants that are fitted: in units of which each is about one
UNITS = {"phase_s": 1e-3, "beta_s": 1e-9, "copy_s": 1e-10}


@dataclasses.dataclass(frozen=True)
class ShapeCell:
    """One host and shape.

    Attributes:
        slower_s: by layout, median over the steps of what a layer took longer than with
            gathered parameters in the same round.
        spread_s: the middle half of that.
        seconds: of the steps, by layout; those of one round are next to each other.
        step_s: median step with gathered parameters.
        layers: of the model.
    """

    host: str
    name: str
    shape: LayerShape
    slower_s: dict[LayoutChoice, float]
    spread_s: dict[LayoutChoice, float]
    seconds: dict[LayoutChoice, list[float]]
    step_s: float
    layers: int

    def behind(self, taken: LayoutChoice) -> float:
        """How much longer a step takes than with the best layout, as a part of it."""
        best = min(self.slower_s.values())
        return self.layers * (self.slower_s[taken] - best) / (self.step_s + self.layers * best)

    def certain(self, taken: LayoutChoice) -> tuple[float, float]:
        """The 95 % interval of the same, from the differences of each round's steps."""
        best = self.seconds[min(self.slower_s, key=lambda choice: self.slower_s[choice])]
        found, step_s = paired(self.seconds[taken], best), statistics.median(best)
        return (found.mean - found.half) / step_s, (found.mean + found.half) / step_s


def cells() -> list[ShapeCell]:
    """What was measured on one machine."""
    found = []
    for report in newest(reports(read_numbers(STEPS))):
        if report.place != f"one machine, {RANKS} ranks":
            continue
        sides = {side.name: side.seconds for side in report.sides}
        size, base = report.shape, sides["moe-plugin, r=0"]
        # a layout that the defaults took may have no side of its own
        named = {choice: name if (name := f"moe-plugin, {side}") in sides else "moe-plugin"
                 for choice, side in SIDES.items()}
        differences = {
            choice: sorted((mine - theirs) / size.layers for mine, theirs in
                           zip(sides[name], base, strict=True))
            for choice, name in named.items()}
        shape = LayerShape(tokens=size.tokens // RANKS, model_dim=size.width,
                           hidden_dim=size.inner, experts=size.experts, top_k=size.top_k,
                           gated=size.gated, element_bytes=4, skew=SKEW)
        found.append(ShapeCell(report.host, size.name, shape,
                          {c: statistics.median(d) for c, d in differences.items()},
                          {c: d[3 * len(d) // 4] - d[len(d) // 4] for c, d in differences.items()},
                          {choice: sides[name] for choice, name in named.items()},
                          statistics.median(base), size.layers))
    return found


def hardware() -> tuple[Cluster, Device]:
    cpu = torch.device("cpu")
    cluster = run_simulated(RANKS, lambda comm: default_cluster(comm, cpu))[0]
    return cluster, default_device(MoEConfig(), cpu)


def fitted(measured: list[ShapeCell]) -> dict[str, float]:
    """The constants of `UNITS` by least squares, each difference weighted by its spread."""
    now, device = hardware()
    rows, rest = [], []
    for cell in measured:
        for choice, seconds in cell.slower_s.items():
            if choice == GATHERED:
                continue
            weight = 1 / max(1e-3, cell.spread_s[choice])
            free = _slower(cell.shape, _with(now, {}), device, choice)
            rows.append([weight * (_slower(cell.shape, _with(now, {name: unit}), device, choice)
                                   - free) for name, unit in UNITS.items()])
            rest.append(weight * (seconds - free))
    values = nonnegative_least_squares(np.array(rows), np.array(rest))
    return {name: float(value) * unit
            for (name, unit), value in zip(UNITS.items(), values, strict=True)}


def _with(cluster: Cluster, values: dict[str, float]) -> Cluster:
    """The cluster with these constants, all others zero; one node's links cost nothing else."""
    link = Link(beta_s=values.get("beta_s", 0.0))
    return dataclasses.replace(cluster, intra=link, phase_s=values.get("phase_s", 0.0),
                               copy_s=values.get("copy_s", 0.0))


def _slower(shape: LayerShape, cluster: Cluster, device: Device, choice: LayoutChoice) -> float:
    """Predicted seconds of a layer beyond those with gathered parameters."""
    return (layer_cost(shape, cluster, device, choice).seconds
            - layer_cost(shape, cluster, device, GATHERED).seconds)


def predicted(shape: LayerShape) -> tuple[dict[LayoutChoice, float], LayoutChoice]:
    """(predicted seconds of a layer by layout, the layout that is taken)."""
    cluster, device = hardware()
    costs = rank_choices(shape, cluster, device, SIDES)
    _, taken = worth_taking(costs, next(iter(SIDES)), device.memory_bytes)
    return {cost.choice: cost.seconds for cost in costs}, taken.choice


def compare(measured: list[ShapeCell]) -> dict[str, Any]:
    rows = []
    for cell in measured:
        seconds, taken = predicted(cell.shape)
        rows.append({
            "host": cell.host, "shape": cell.name, "k": cell.shape.top_k,
            "step_ms": 1e3 * cell.step_s, "taken": taken.label, "behind": cell.behind(taken),
            "certain": list(cell.certain(taken)),
            "slower_ms": {c.label: [1e3 * s, 1e3 * cell.spread_s[c],
                                    1e3 * (seconds[c] - seconds[GATHERED])]
                          for c, s in cell.slower_s.items() if c != GATHERED}})
    cluster, _ = hardware()
    # a message's own time is part of what is fitted
    now = {"phase_s": cluster.phase_s + cluster.intra.alpha_s, "beta_s": cluster.intra.beta_s,
           "copy_s": cluster.copy_s}
    return {"constants": now, "fitted": fitted(measured), "cells": rows}


def body(found: dict[str, Any]) -> list[str]:
    others = [choice.label for choice in SIDES if choice != GATHERED]
    return [
        f"From [whole steps](../train.md) on {RANKS} ranks of one machine. A layer with gathered "
        f"parameters ({GATHERED.label}) is compared with the others, step by step in the same "
        "round: how many milliseconds longer forward and backward of one layer take, measured (in "
        "brackets the middle half of the steps) and as predicted by the constants for CPUs in "
        "`moe_plugin/tuning/default_hardware.py`. *Behind*: how much longer a whole step takes "
        "with the layout that is taken than with the best one; in brackets the 95 % interval of "
        "the mean difference of steps in one round.",
        columns(found["cells"], {
            "host": "{host}", "shape": "{shape}", "k": "{k}", "step, ms": "{step_ms:.0f}",
            **{head: text.replace("LABEL", label) for label in others for head, text in (
                (f"{label}, ms", "{slower_ms[LABEL][0]:.1f} ({slower_ms[LABEL][1]:.1f})"),
                (f"{label}, predicted", "{slower_ms[LABEL][2]:.1f}"))},
            "taken": "{taken}", "behind": lambda cell: (
                f"{cell['behind']:.0%} ({cell['certain'][0]:.0%} to {cell['certain'][1]:.0%})")}),
        "The constants and what a least-squares fit over all lines gives: seconds for ranks to "
        "meet in a collective, of a byte on its way, and of a byte in or out of a buffer for rows "
        "that travel.",
        columns(UNITS, {"constant": str, "used": lambda name: f"{found['constants'][name]:.2g}",
                        "fitted": lambda name: f"{found['fitted'][name]:.2g}"})]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return compare(cells())


def failures(found: dict[str, Any]) -> list[str]:
    """Where the interval lies above what is allowed: a difference that noise may be is none."""
    return [f"{cell['host']}, {cell['shape']}: {cell['behind']:.1%} behind, certainly more than "
            f"{cell['certain'][0]:.1%}" for cell in found["cells"]
            if cell["certain"][0] > MOST_BEHIND]
