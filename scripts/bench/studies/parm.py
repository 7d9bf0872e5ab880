"""Compare Parm's schedules S1 and S2 with the choice of `parallel.schedule: auto`, for 12 shapes of
a
layer in which pairs of ranks have the same tokens, on emulated nodes.

Needs Linux and root, and takes about six minutes on an idle machine with two processors.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.cli.figures import columns
from moe_plugin.config import from_dict
from moe_plugin.planner.units import parse_grid
from scripts.bench.layouts import slowest, timed_step
from scripts.bench.studies.train import hardware
from scripts.bench.study import Option
from scripts.emulate import EmulatedCluster

TITLE = "Schedules of ranks with the same tokens"
AUTO, NAMES = "auto", ("s1", "s2")
AIM = 1.05  # largest acceptable time of auto, relative to the better schedule
EXPERTS, REPLICAS = 8, 2


class Shape(NamedTuple):
    """A layer in which pairs of ranks have the same tokens.

    Attributes:
        grid: nodes x ranks per node.
        k: number of experts per token.
        f: capacity factor.
        d: number of pieces.
        tokens: number of tokens of a pair of ranks.
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


def settings(shape: Shape, schedule: str, width: int, links: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a layer.

    Args:
        shape: sizes of the layer.
        schedule: value of `parallel.schedule`.
        width: width of a token.
        links: `cluster`, the file of the links that `auto` may use, or an empty dictionary.
    """
    return {
        "model_dim": width, "num_experts": EXPERTS, "experts": {"hidden_dim": 8},
        "router": {"top_k": shape.k},
        "dispatch": {"name": "padded", "capacity_factor": shape.f, "equal_tokens": True},
        "comm": {"all_to_all": "linear", **links},
        "parallel": {"mode": "fixed", "replicas": REPLICAS, "schedule": schedule, "d": shape.d}}


def run_rank(shape: Shape, width: int, links: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Measure one rank: seconds of a step by schedule and round, without the first round, and the
    schedule that `auto` chose.
    """
    comm = TorchComm()
    layers = {}
    for name in (*NAMES, AUTO):
        torch.manual_seed(0)
        layers[name] = MoELayer(from_dict(settings(shape, name, width, links)), comm)
    torch.manual_seed(1 + comm.rank // REPLICAS)  # both ranks of a pair have the same tokens
    x_TD = torch.randn(shape.tokens, width, requires_grad=True)
    grad_TD = torch.randn_like(x_TD)
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(1 + rounds):
        for name, layer in layers.items():
            seconds[name].append(timed_step(layer, x_TD, None, grad_TD)[0])
            layer.zero_grad(set_to_none=True)
            x_TD.grad = None  # otherwise the next layer would add to this gradient
    return {"seconds": {name: found[1:] for name, found in seconds.items()},
            "took": "s2" if layers[AUTO].config.dispatch.name == "parm_s2" else "s1"}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return {"rate": args.rate, "width": args.width, "rounds": args.rounds,
            "calibrated": args.calibrated, "cells": [_cell(name, args) for name in args.shapes]}


def _cell(name: str, args: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(
            *parse_grid(shape.grid), rate_bit_s=args.rate) as cluster:
        known = {"cluster": hardware(cluster, Path(folder))["comm.cluster"]}
        ranks = cluster.run(run_rank, shape, args.width, known if args.calibrated else {},
                            args.rounds, timeout_s=600)
    return {"shape": name, "took": ranks[0]["took"], "seconds": {
        side: statistics.median(slowest(ranks, side)) for side in (*NAMES, AUTO)}}


def over_best(cell: dict[str, Any]) -> float:
    """Return the time of `auto` divided by that of the better schedule."""
    return cell["seconds"][AUTO] / min(cell["seconds"][name] for name in NAMES)


def body(found: dict[str, Any]) -> Iterator[str]:
    cells = found["cells"]
    good = sum(over_best(cell) <= AIM for cell in cells)
    taken = sorted({cell["took"] for cell in cells})
    yield (
        "If several ranks have the same tokens, a layer can use one of Parm's schedules. S1 "
        "gathers tokens. S2 gathers k f times as much data, but with several pieces (d) it gathers "
        "one piece during the exchange of the next one. This page compares both schedules with the "
        "choice of `parallel.schedule: auto`. Times are milliseconds of a layer call and its "
        f"backward pass on the slowest rank, medians of {found['rounds']} rounds. The three layers "
        "run alternately in the same processes. Pairs of ranks have the same tokens. A pair is on "
        f"one node (near) or on two nodes (far). The emulated links have {found['rate'] / 1e6:.0f} "
        "Mbit/s. " + ("`auto` knows the times of the links from a file (`comm.cluster`)."
                      if found["calibrated"] else "`auto` knows nothing about the links.")
        + f" The layer has {EXPERTS} experts and width {found['width']} in float32.")
    yield (f"In {good} of {len(cells)} shapes, the time of `auto` is at most {AIM:.2f} times that "
           f"of the better schedule. `auto` chose {' and '.join(taken)}.")
    yield columns(cells, {
        "shape": "{shape}", **{field: lambda cell, field=field: str(
            getattr(SHAPES[cell["shape"]], field)) for field in Shape._fields},
        **{name: lambda cell, name=name: f"{1e3 * cell['seconds'][name]:.0f}"
           for name in (*NAMES, AUTO)},
        "choice of `auto`": "{took}", "`auto` / better": lambda cell: f"{over_best(cell):.2f}"})


OPTIONS = {
    "shapes": Option(tuple(SHAPES), "shapes of the layer", quick=("a half, near", "one, far"),
                     choices=tuple(SHAPES)),
    "rounds": Option(9, "timed rounds of each schedule", quick=1),
    "rate": Option(50e6, "rate of a node's link in bit/s", quick=1e9),
    "width": Option(256, "width of a token", quick=16),
    "calibrated": Option(False, "let auto read the links' times from a cluster file"),
}
