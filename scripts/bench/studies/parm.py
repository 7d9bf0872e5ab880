"""Compare Parm's schedules S1 and S2 with the schedule chosen by `parallel.schedule: auto`. The
study measures 12 layer shapes on emulated nodes. In all shapes, the ranks form pairs, and both
ranks of a pair have the same tokens.

The study requires Linux and root, and takes about six minutes on an idle machine with two CPU
cores.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.config import from_dict
from moe_plugin.planner.units import parse_grid
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.sweep import Sweep, alternate, clean_step, medians
from scripts.emulate import EmulatedCluster

TITLE = "Schedules of ranks with the same tokens"
AUTO, NAMES = "auto", ("s1", "s2")
AIM = 1.05  # largest acceptable time of auto, relative to the better schedule
EXPERTS, REPLICAS = 8, 2


class Shape(NamedTuple):
    """The sizes of a layer in which pairs of ranks have the same tokens.

    Attributes:
        grid: number of nodes and of ranks per node.
        k: number of experts per token.
        f: capacity factor.
        d: number of pieces.
        tokens: number of tokens of each pair of ranks.
    """

    grid: str
    k: int
    f: float
    d: int
    tokens: int


# near: both ranks of a pair are on one node and gather through memory. far: the ranks are on two
# nodes and gather over the slow links.
SHAPES = {
    "a quarter, near": Shape("2x2", 1, 0.25, 1, 2048),
    "a half, near": Shape("2x2", 1, 0.5, 1, 1024),
    "one, near": Shape("2x2", 1, 1.0, 1, 1024), "four, near": Shape("2x2", 4, 1.0, 1, 512),
    "two in pieces, near": Shape("2x2", 2, 1.0, 4, 1024),
    "few tokens in pieces, near": Shape("2x2", 2, 1.0, 4, 16),
    "a quarter, far": Shape("4x1", 1, 0.25, 1, 1024), "a half, far": Shape("4x1", 1, 0.5, 1, 1024),
    "one, far": Shape("4x1", 1, 1.0, 1, 1024), "two, far": Shape("4x1", 2, 1.0, 1, 512),
    "four, far": Shape("4x1", 4, 1.0, 1, 512),
    "a half in pieces, far": Shape("4x1", 1, 0.5, 2, 1024),
}


def settings(shape: Shape, schedule: str, width: int, **comm: str) -> dict[str, Any]:
    return {
        "model_dim": width, "num_experts": EXPERTS, "experts": {"hidden_dim": 8},
        "router": {"top_k": shape.k},
        "dispatch": {"name": "padded", "capacity_factor": shape.f, "equal_tokens": True},
        "comm": {"all_to_all": "linear", **comm},
        "parallel": {"mode": "fixed", "replicas": REPLICAS, "schedule": schedule, "d": shape.d}}


def run_rank(at: argparse.Namespace) -> dict[str, Any]:
    """Measure all schedules on one rank. The result also contains the schedule that was chosen by
    `auto`.
    """
    comm, shape, layers = TorchComm(), SHAPES[at.shape], {}
    for name in (*NAMES, AUTO):
        torch.manual_seed(0)
        layers[name] = MoELayer(from_dict(settings(shape, name, at.width)), comm)
    torch.manual_seed(1 + comm.rank // REPLICAS)  # both ranks of a pair have the same tokens
    x_TD = torch.randn(shape.tokens, at.width, requires_grad=True)
    grad_TD = torch.randn_like(x_TD)
    seconds = alternate({name: lambda layer=layer: clean_step(layer, x_TD, grad_TD=grad_TD)[0]
                         for name, layer in layers.items()}, at.rounds)
    return {"seconds": seconds,
            "took": "s2" if layers[AUTO].config.dispatch.name == "parm_s2" else "s1"}


SWEEP = Sweep(
    axes=lambda args: {"shape": args.shapes},
    cluster=lambda at: EmulatedCluster(*parse_grid(SHAPES[at.shape].grid), rate_bit_s=at.rate),
    rank=run_rank,
    row=lambda at, ranks: {"took": ranks[0]["took"], "seconds": medians(ranks)})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return {"rate": args.rate, "width": args.width, "rounds": args.rounds,
            "cells": SWEEP.measure(args)}


def over_best(cell: dict[str, Any]) -> float:
    """Return the time of `auto` divided by the time of the faster schedule."""
    return cell["seconds"][AUTO] / min(cell["seconds"][name] for name in NAMES)


def body(found: dict[str, Any]) -> list[str]:
    cells = found["cells"]
    return page(
        __name__, found, good=sum(over_best(cell) <= AIM for cell in cells),
        taken=" and ".join(sorted({cell["took"] for cell in cells})),
        rows=[{**SHAPES[cell["shape"]]._asdict(), **cell, "over_best": over_best(cell)}
              for cell in cells])


OPTIONS = {
    "shapes": Option(tuple(SHAPES), "shapes of the layer", quick=("a half, near", "one, far"),
                     choices=tuple(SHAPES)),
    "rounds": Option(9, "timed rounds of each schedule", quick=1),
    "rate": Option(50e6, "bandwidth of a node's link in bit/s", quick=1e9),
    "width": Option(256, "width of a token", quick=16),
}
