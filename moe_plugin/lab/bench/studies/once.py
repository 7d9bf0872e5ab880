"""A token once to each rank, or to each node, against once to each of its experts, on emulated
nodes: the exchange alone, and a layer with its experts, forward and backward.

Needs Linux and root, and about twenty minutes on an idle machine with two processors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin import MoELayer, TorchComm
from moe_plugin.config import from_dict
from moe_plugin.lab.bench.layouts import slowest
from moe_plugin.lab.bench.report import columns
from moe_plugin.lab.bench.study import Option
from moe_plugin.lab.emulate import EmulatedCluster
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.once import rows_of_token
from moe_plugin.planner.units import parse_grid

TITLE = "A token once to each rank or node"
EXPERTS, RATE = 64, 200e6  # bit/s of a node's link
ALL = {"rows": LayoutChoice(r=1), "ranks": LayoutChoice(r=1, send="ranks"),
       "nodes": LayoutChoice(r=1, send="nodes"), "r=0": LayoutChoice(r=0),
       "tokens": LayoutChoice(r=1, gather_tokens=True)}


class Same(nn.Module):
    """An expert that gives what it gets; with a parameter, so that backward comes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + self.nothing


def run_rank(width: int, hidden: int, k: int, tokens: int,
             rounds: int) -> dict[str, list[float]]:
    """One rank: seconds of a call and its backward pass, by layout and round; the first round does
    not count. hidden: inner width of an expert; 0: the exchange alone.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = from_dict({
        "model_dim": width, "num_experts": EXPERTS, "router": {"top_k": k}, "losses": {},
        "experts": {"hidden_dim": hidden} if hidden else {}, "comm": {"all_to_all": "linear"},
        "parallel": {"mode": "fixed", "r": 1}})
    layer = MoELayer(config, TorchComm(), experts=None if hidden else lambda index: Same())
    torch.manual_seed(1 + layer.comm.rank)
    x_TD = torch.randn(tokens, width, requires_grad=True)
    grad_TD, seconds = torch.randn_like(x_TD), {}
    choices = {name: choice for name, choice in ALL.items() if hidden or choice.exchanges}
    for _ in range(1 + rounds):
        for name, choice in choices.items():
            layer.comm.barrier()
            start = time.perf_counter()
            layer(x_TD, choice=choice).output.backward(grad_TD)
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            layer.zero_grad(set_to_none=True)
            x_TD.grad = None
    return {name: found[1:] for name, found in seconds.items()}


def summary(ranks: list[dict[str, list[float]]]) -> dict[str, float]:
    """Medians in seconds of the slowest rank, by layout."""
    return {name: statistics.median(slowest([{"seconds": rank} for rank in ranks], name))
            for name in ranks[0]}


def formula(grid: str, k: int) -> tuple[float, float]:
    """Of rows between nodes, those that `ranks` and `nodes` send of what `rows` sends."""
    nodes, per_node = parse_grid(grid)
    rows = rows_of_token(Cluster(nodes=nodes, ranks_per_node=per_node), k)
    return rows.ranks / k, rows.nodes / k


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cells = []
    for grid in args.grids:
        with EmulatedCluster(*parse_grid(grid), rate_bit_s=args.rate) as cluster:
            for hidden in args.hidden:
                for width in args.widths:
                    for k in args.choices:
                        ranks = cluster.run(run_rank, width, hidden, k, args.tokens, args.rounds,
                                            timeout_s=900)
                        cells.append({"grid": grid, "width": width, "hidden": hidden, "k": k,
                                      "seconds": summary(ranks)})
    return {"tokens": args.tokens, "rounds": args.rounds, "rate": args.rate, "cells": cells}


def body(report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Milliseconds of one call of a layer and its backward pass, of the slowest rank, medians "
        f"of {report['rounds']} rounds; all columns are measured alternately in the same "
        f"processes. {EXPERTS} experts, {report['tokens']} tokens of each rank, fp32, links of "
        f"{report['rate'] / 1e6:.0f} Mbit/s, one thread a rank. In brackets: over `rows`. Formula: "
        "rows between nodes, over those of `rows`, for even routing.")
    for hidden in dict.fromkeys(cell["hidden"] for cell in report["cells"]):
        cells = [cell for cell in report["cells"] if cell["hidden"] == hidden]
        yield f"## Experts of inner width {hidden}" if hidden else "## The exchange alone"
        names = list(cells[0]["seconds"])
        yield columns(cells, {
            "nodes": "{grid}", "D": "{width}", "k": "{k}",
            **{f"`{name}`": lambda cell, name=name: (
                f"{1e3 * cell['seconds'][name]:.0f} "
                f"({cell['seconds'][name] / cell['seconds']['rows']:.2f})") for name in names},
            "formula, `ranks`": lambda cell: f"{formula(cell['grid'], cell['k'])[0]:.2f}",
            "formula, `nodes`": lambda cell: f"{formula(cell['grid'], cell['k'])[1]:.2f}"})
    yield ("`r=0`: experts' weights are gathered; `tokens`: all ranks get all tokens "
           "(`gather_tokens`).")


OPTIONS = {
    "grids": Option(("2x2", "4x2", "8x4"), "nodes by ranks", quick=("2x2",)),
    "widths": Option((128, 512), "D", quick=(16,)),
    "choices": Option((2, 4, 8), "experts of a token", quick=(4,)),
    "hidden": Option((0, 128, 512), "inner width of an expert; 0: the exchange alone",
                     quick=(0, 16)),
    "tokens": Option(1024, "of a rank", quick=16),
    "rounds": Option(5, "measurements of each column", quick=1),
    "rate": Option(RATE, "bit/s of a node's link", quick=1e9),
}
