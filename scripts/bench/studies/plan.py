"""Compare the planner's layout with the best measured layout on an emulated cluster.

Needs Linux and root, and takes about five minutes on an idle machine. For each grid, expert size
and
load, the study measures every layout and asks the planner. The planner uses only the cluster file
(configs/clusters/emulated.yaml, fitted to all-to-alls) and a profile of one rank's processor,
measured while all ranks are busy. The exit status is 1 if the planner's layout is slower than the
best layout by more than --most.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import statistics
from typing import Any

from moe_plugin import MoELayer, TorchComm
from moe_plugin.cli.figures import columns
from moe_plugin.cli.measure.device import measure_device
from moe_plugin.config import from_dict
from moe_plugin.planner import Cluster, load_cluster
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.planner.cluster import Device
from moe_plugin.planner.layer_cost import LayerShape, rank_choices
from scripts.bench.layouts import one_step, slowest
from scripts.bench.report import layout_in_words
from scripts.bench.study import ROOT, Option
from scripts.emulate import EmulatedCluster

log = logging.getLogger(__name__)
TITLE = "The planner against the measured best"
WIDTH, HIDDEN, TOKENS, TOP_K, WARM_UP = 256, (64, 512, 2048), (64, 512, 2048), 1, 2
# (nodes, ranks per node): (experts, algorithms)
GRIDS = {(4, 1): (2, ("linear",)), (2, 2): (8, ("linear", "2dh", "leader"))}


def choices_of(grid: tuple[int, int]) -> list[LayoutChoice]:
    experts, algorithms = GRIDS[grid]
    return list(legal_choices(experts, grid[0] * grid[1], degrees=(1, 2), algorithms=algorithms))


def profile_rank() -> Device:
    """Profile one rank's processor while all ranks measure theirs."""
    TorchComm().barrier()
    return measure_device(width=WIDTH, inner=512, repeats=15)


def measure_rank(experts: int, hidden: int, tokens: int, steps: int,
                 choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Measure one rank: every layout runs in every step, so that all run under the same conditions.
    """
    tree = {
        "model_dim": WIDTH, "num_experts": experts, "router": {"top_k": TOP_K},
        "experts": {"hidden_dim": hidden}
    }
    layer = MoELayer(from_dict(tree), TorchComm())
    seconds: dict[str, list[float]] = {}
    for _ in range(WARM_UP + steps):
        for values in choices:
            choice = LayoutChoice.from_dict(values)
            seconds.setdefault(choice.label, []).append(one_step(layer, tokens, choice)[0])
    return {"seconds": {label: times[WARM_UP:] for label, times in seconds.items()}}


def measure_grid(grid: tuple[int, int], args: argparse.Namespace,
                 links: Cluster) -> list[dict[str, Any]]:
    experts, choices = GRIDS[grid][0], choices_of(grid)
    with EmulatedCluster(*grid) as cluster:
        profiles = cluster.run(profile_rank)
    medians = {
        name: statistics.median(getattr(p, name) for p in profiles)
        for name in ("flops", "half_rows", "memory_bytes_s", "launch_s")
    }
    device = dataclasses.replace(profiles[0], **medians)
    cells = []
    for hidden, tokens in itertools.product(args.hidden, args.tokens):
        with EmulatedCluster(*grid) as cluster:
            ranks = cluster.run(measure_rank, experts, hidden, tokens, args.steps,
                                [c.as_dict() for c in choices], timeout_s=900)
        times = {c.label: statistics.median(slowest(ranks, c.label)) for c in choices}
        shape = LayerShape(tokens=tokens, model_dim=WIDTH, hidden_dim=hidden, experts=experts,
                           top_k=TOP_K, element_bytes=4)
        costs = rank_choices(shape, links.resized(*grid), device, choices)
        cells.append(cell(grid, hidden, tokens, times, {c.choice.label: c.seconds for c in costs}))
        log.info("{grid}, inner width {hidden}, {tokens} tokens: planned {planned}, best {best}, "
                 "ratio {ratio:.2f}".format(**cells[-1]))
    return cells


def cell(grid: tuple[int, int], hidden: int, tokens: int, times: dict[str, float],
         planned: dict[str, float]) -> dict[str, Any]:
    """Return one row: the planned layout, the best layout, and their ratio."""
    chosen, best = min(planned, key=planned.get), min(times, key=times.get)
    return {
        "grid": f"{grid[0]}x{grid[1]}", "hidden": hidden, "tokens": tokens, "planned": chosen,
        "best": best, "ratio": times[chosen] / times[best], "measured_ms": {
            k: round(1e3 * v, 3) for k, v in times.items()
        }, "predicted_ms": {k: round(1e3 * v, 3) for k, v in planned.items()},
        "worst_ratio": max(times.values()) / times[best]
    }


def body(found: dict[str, Any]) -> list[str]:
    cells, steps, most = found["cells"], found["steps"], found["most"]
    within = sum(c["ratio"] <= 1 + most for c in cells)
    return [
        "This page compares the layout that the planner chooses for a layer with the fastest "
        "measured layout. The machine emulates clusters with links of 200 Mbit/s and 1 ms. The "
        f"layer has width {WIDTH} and selects {TOP_K} expert per token. It has 2 experts on the "
        "grid of 4x1 nodes x ranks, and 8 experts on 2x2. All layouts run alternately in the same "
        f"processes, forward and backward. A time is the median of {steps} steps on the slowest "
        "rank. The planner uses `configs/clusters/emulated.yaml`, which was fitted to all-to-alls, "
        "and a profile of one rank's processor (matmuls and copies). The planner measured none of "
        "these layers.",
        f"The planned layout is within {most:.0%} of the measured best in {within} of {len(cells)} "
        "rows. All measured and predicted times are in `data/plan.json`.",
        columns(cells, {
            "grid": "{grid}", "inner width": "{hidden}", "tokens per rank": "{tokens}",
            "planned layout": lambda c: layout_in_words(c["planned"]),
            "its ms": lambda c: f"{c['measured_ms'][c['planned']]:.1f}",
            "fastest layout": lambda c: layout_in_words(c["best"]),
            "ms": lambda c: f"{c['measured_ms'][c['best']]:.1f}",
            "planned / fastest": "{ratio:.2f}", "slowest / fastest": "{worst_ratio:.1f}"})]


OPTIONS = {
    "steps": Option(15, "timed steps of each layout", quick=2),
    "most": Option(0.1, "largest accepted slowdown relative to the fastest layout", quick=100.0),
    "hidden": Option(HIDDEN, "inner widths of an expert", quick=HIDDEN[:1]),
    "tokens": Option(TOKENS, "tokens per rank", quick=TOKENS[:1]),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    links = load_cluster(ROOT / "configs" / "clusters" / "emulated.yaml")
    return {"steps": args.steps, "most": args.most,
            "cells": [cell for grid in GRIDS for cell in measure_grid(grid, args, links)]}


def failures(found: dict[str, Any]) -> list[str]:
    return [("The planned layout takes {ratio:.2f} times as long as the fastest one: grid {grid}, "
             "inner width {hidden}, {tokens} tokens").format(**c)
            for c in found["cells"] if c["ratio"] > 1 + found["most"]]
