"""Compare the layout chosen by the planner with the fastest measured layout on an emulated cluster.

The study requires Linux and root, and takes about five minutes on an idle machine. For each grid,
expert size and load, the study measures every layout and runs the planner. The planner uses only
the cluster file (configs/clusters/emulated.yaml, fitted to measured all-to-alls) and a profile of
one rank's CPU, which is measured while all ranks are busy. The exit status is 1 if the planner's
layout is slower than the fastest layout by more than --most.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import statistics
from typing import Any

from moe_plugin import MoELayer, TorchComm
from moe_plugin.cli.measure.own_cluster import measure_device
from moe_plugin.config import from_dict
from moe_plugin.planner import load_cluster
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.planner.cluster import Device
from moe_plugin.planner.layer_cost import LayerShape, rank_choices
from scripts.bench.report import page
from scripts.bench.study import ROOT, Option
from scripts.bench.sweep import Ranks, Sweep, alternate, medians, one_step
from scripts.emulate import EmulatedCluster

log = logging.getLogger(__name__)
TITLE = "The planner against the measured best"
WIDTH, HIDDEN, TOKENS, TOP_K, WARM_UP = 256, (64, 512, 2048), (64, 512, 2048), 1, 2
# (nodes, ranks per node): (experts, algorithms)
GRIDS = {(4, 1): (2, ("linear",)), (2, 2): (8, ("linear", "2dh", "leader"))}


def choices_of(grid: tuple[int, int]) -> list[LayoutChoice]:
    experts, algorithms = GRIDS[grid]
    return list(legal_choices(experts, grid[0] * grid[1], degrees=(1, 2), algorithms=algorithms))


def measure_rank(at: argparse.Namespace) -> dict[str, Any]:
    """Measure all layouts on one rank. Every layout runs in every step, so that background noise
    affects all layouts equally.
    """
    layer = MoELayer(from_dict({
        "model_dim": WIDTH, "num_experts": GRIDS[at.grid][0], "router": {"top_k": TOP_K},
        "experts": {"hidden_dim": at.hidden}}), TorchComm())
    return {"seconds": alternate({
        choice.label: lambda choice=choice: one_step(layer, at.tokens, choice)[0]
        for choice in choices_of(at.grid)}, at.steps, WARM_UP)}


def profile(grid: tuple[int, int]) -> Device:
    """Return the median of the ranks' CPU profiles, which they measure at the same time."""
    def rank() -> Device:
        TorchComm().barrier()
        return measure_device(width=WIDTH, inner=512, repeats=15)

    with EmulatedCluster(*grid) as cluster:
        profiles = cluster.run(rank)
    return dataclasses.replace(profiles[0], **{
        name: statistics.median(getattr(p, name) for p in profiles)
        for name in ("flops", "half_rows", "memory_bytes_s", "launch_s")})


def row(at: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    shape = LayerShape(tokens=at.tokens, model_dim=WIDTH, hidden_dim=at.hidden,
                       experts=GRIDS[at.grid][0], top_k=TOP_K, element_bytes=4)
    costs = rank_choices(shape, at.links.resized(*at.grid), at.device, choices_of(at.grid))
    found = cell(medians(ranks), {c.choice.label: c.seconds for c in costs})
    log.info("%s, inner width %s, %s tokens: planned {planned}, best {best}, ratio {ratio:.2f}"
             .format(**found), at.grid, at.hidden, at.tokens)
    return {**found, "grid": f"{at.grid[0]}x{at.grid[1]}"}


SWEEP = Sweep(
    axes=lambda args: {"grid": [args.grid], "hidden": args.hidden, "tokens": args.tokens},
    cluster=lambda at: EmulatedCluster(*at.grid), rank=measure_rank, row=row, timeout_s=900)


def cell(times: dict[str, float], planned: dict[str, float]) -> dict[str, Any]:
    """Return the planned layout, the fastest layout, and the ratio of their times."""
    chosen, best = min(planned, key=planned.get), min(times, key=times.get)
    return {
        "planned": chosen, "best": best, "ratio": times[chosen] / times[best],
        "measured_ms": {k: round(1e3 * v, 3) for k, v in times.items()},
        "predicted_ms": {k: round(1e3 * v, 3) for k, v in planned.items()},
        "worst_ratio": max(times.values()) / times[best]
    }


def body(found: dict[str, Any]) -> list[str]:
    cells = found["cells"]
    return page(__name__, found, within=sum(c["ratio"] <= 1 + found["most"] for c in cells),
                rows=[{**c, **{f"{of}_ms": c["measured_ms"][c[of]] for of in ("planned", "best")}}
                      for c in cells])


OPTIONS = {
    "steps": Option(15, "timed steps of each layout", quick=2),
    "most": Option(0.1, "largest accepted slowdown relative to the fastest layout", quick=100.0),
    "hidden": Option(HIDDEN, "inner widths of an expert", quick=HIDDEN[:1]),
    "tokens": Option(TOKENS, "tokens per rank", quick=TOKENS[:1]),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    links = load_cluster(ROOT / "configs" / "clusters" / "emulated.yaml")
    return {"steps": args.steps, "most": args.most, "cells": [
        one for grid in GRIDS for one in SWEEP.measure(argparse.Namespace(
            **vars(args), grid=grid, links=links, device=profile(grid)))]}


def failures(found: dict[str, Any]) -> list[str]:
    return [("The planned layout takes {ratio:.2f} times as long as the fastest one: grid {grid}, "
             "inner width {hidden}, {tokens} tokens").format(**c)
            for c in found["cells"] if c["ratio"] > 1 + found["most"]]
