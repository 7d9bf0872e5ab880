"""Measure how much time is saved by overlapping communication and computation, on emulated nodes
with one rank each. Exchange and matmuls are timed separately, and together with overlap.

The matmuls either run on the CPU, or are replaced by waiting, which imitates an accelerator. While
a rank waits, the CPU cores are free to transfer packets. If both CPU cores compute matmuls, no core
is free to transfer packets. The study also measures two other cases: many small experts, whose
matmuls become slower if rows are split, and Parm's S2, in which ranks with the same tokens gather
each piece while the next piece is sent.

The study requires Linux and root, and takes about nine minutes on an idle machine with at least two
CPU cores.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm.functional import gather
from moe_plugin.config import from_dict
from moe_plugin.config.parallel import CUTS
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import ExpertRows
from scripts.bench.report import columns, page
from scripts.bench.study import Option
from scripts.bench.sweep import Ranks, Sweep, alternate, medians, timed
from scripts.bench.toy import SleepingExpert
from scripts.emulate import EmulatedCluster

TITLE = "Overlap on emulated nodes"
WIDTH = 256
TOKENS = 1024
RATES = (25e6, 50e6, 100e6)  # bandwidths of a node's link in bit/s
AIM = 1.10  # largest acceptable time, relative to the longer one of exchange and matmuls
ROW_S = 100e-6  # time of a row's forward matmuls if they only wait; backward waits twice as long


class Kind(NamedTuple):
    """The configuration of one table.

    Attributes:
        title: title of the section.
        nodes: number of nodes, each with one rank.
        hidden: inner width of an expert.
        waits: whether the matmuls are replaced by waiting.
        cuts: ways to split the rows into pieces.
        replicas: number of ranks with the same tokens, for Parm's S2.
    """

    title: str
    nodes: int = 2
    experts: int = 4
    hidden: int = 2048
    waits: bool = False
    cuts: tuple[str, ...] = ("rows", "peers")
    replicas: int = 1


KINDS = {
    "cpu": Kind("Matmuls on the processor"),
    "wait": Kind("Matmuls that only wait", waits=True),
    "many": Kind("Many small experts, matmuls on the processor", experts=32, hidden=512,
                 cuts=CUTS),
    "s2": Kind("Parm's S2 with two replicas, matmuls that only wait", nodes=4, experts=8,
               waits=True, cuts=("rows",), replicas=2),
}


def layouts(degrees: Iterable[int], cuts: Iterable[str]) -> dict[str, LayoutChoice]:
    """Return the measured layouts by name. The first layout does not use overlap."""
    found = {"d=1": LayoutChoice(r=1)}
    for cut in cuts:
        found |= {f"d={d} {cut}": LayoutChoice(r=1, d=d, piece_axis=cut) for d in degrees}
    return found


class Alone:
    """The exchange and the matmuls of one layer call, which can be run separately.

    Args:
        layer: the layer, which uses r = 1 and a single piece.
        x_TD: tokens of this rank, [T, D].
    """

    def __init__(self, layer: MoELayer, x_TD: Tensor) -> None:
        tokens = layer.token_entry.enter(x_TD, None, None, layer.experts.dtype)
        routing = layer.router(tokens.x_TD, tokens.mask_T, None, tokens.info)
        place = layer.routed_experts.layouts.at(LayoutChoice(r=1)).dispatcher
        plan = place.plan(layer.capacity(routing, True))
        self.layer, self.place, (self.piece,) = layer, place, plan.pieces
        self.rows_ND = torch.randn(sum(self.piece.send), WIDTH)
        self.here_RD = torch.randn(sum(self.piece.recv), WIDTH, requires_grad=True)
        self.y_RD = self.here_RD

    def exchange(self) -> None:
        """Send rows to the experts and back, and gather the rows on replicas. The backward pass
        sends the same number of rows as the forward pass.
        """
        algorithm = self.place.placement.algorithm
        there_RD = algorithm(self.layer.comm, self.rows_ND, self.piece.send, self.piece.recv)
        back_ND = algorithm(self.layer.comm, there_RD, self.piece.recv, self.piece.send)
        replicas = self.place.placement.replicas
        if replicas is not None:
            gather(back_ND, replicas)

    def products(self) -> None:
        """Run the experts on the rows that this rank receives."""
        self.y_RD = self.layer.experts(ExpertRows(self.here_RD, self.piece.counts))

    def products_backward(self) -> None:
        """Compute the gradients of the rows and of the expert weights."""
        self.y_RD.backward(torch.ones_like(self.y_RD))


def settings(kind: Kind) -> dict[str, Any]:
    shared = {"parallel": {"replicas": kind.replicas, "schedule": "s2"},
              "dispatch": {"name": "padded", "capacity_factor": 1.0}}
    return {
        "model_dim": WIDTH, "num_experts": kind.experts, "router": {"top_k": 1},
        "experts": {"hidden_dim": kind.hidden}, "comm": {"all_to_all": "linear"},
        **(shared if kind.replicas > 1 else {})
    }


def run_rank(at: argparse.Namespace) -> dict[str, Any]:
    """Measure all layouts on one rank. Each round measures the exchange alone, the matmuls alone,
    and each layout, in the forward and backward pass.
    """
    torch.manual_seed(0)
    kind, choices = KINDS[at.kind], layouts(at.degrees, KINDS[at.kind].cuts)
    layer = MoELayer(from_dict(settings(kind)), TorchComm(),
                     experts=(lambda index: SleepingExpert(ROW_S)) if kind.waits else None)
    torch.manual_seed(1 + layer.comm.rank // kind.replicas)
    x_TD = torch.randn(at.tokens, WIDTH, requires_grad=True)
    grad_TD, alone = torch.randn_like(x_TD), Alone(layer, x_TD)
    latest: dict[str, Tensor] = {}

    def forward(choice: LayoutChoice) -> None:
        latest["y_TD"] = layer(x_TD, choice=choice).output

    def backward(work: Callable[[], Any]) -> float:
        seconds = timed(layer.comm, work)
        layer.zero_grad(set_to_none=True)
        x_TD.grad = None  # otherwise the next choice would add to this gradient
        return seconds

    sides = {"exchange": partial(timed, layer.comm, alone.exchange),
             "products forward": partial(timed, layer.comm, alone.products),
             "products backward": partial(backward, alone.products_backward)}
    for name, choice in choices.items():
        sides |= {f"{name} forward": partial(timed, layer.comm, partial(forward, choice)),
                  f"{name} backward": partial(
                      backward, lambda: latest.pop("y_TD").backward(grad_TD))}
    return {"seconds": alternate(sides, at.rounds), "names": list(choices)}


def summary(ranks: Ranks) -> dict[str, Any]:
    """Return the median time in seconds on the slowest rank, for the forward and backward passes.
    """
    found = medians(ranks)
    return {direction: {
        "exchange": found["exchange"], "products": found[f"products {direction}"],
        "total": {name: found[f"{name} {direction}"] for name in ranks[0]["names"]}}
        for direction in ("forward", "backward")}


SWEEP = Sweep(
    axes=lambda args: {"rate": args.rates},
    cluster=lambda at: EmulatedCluster(KINDS[at.kind].nodes, 1, rate_bit_s=at.rate),
    rank=run_rank, row=lambda at, ranks: summary(ranks))


def body(report: dict[str, Any]) -> list[str]:
    return page(__name__, report, tables=[part for name, cells in report["cells"].items()
                                          for part in _table(KINDS[name], cells)])


def _pieces_in_words(name: str) -> str:
    d, _, cut = name.removeprefix("d=").partition(" ")
    return f"{d} pieces, {cut}" if cut else "one piece"


def _table(kind: Kind, cells: list[dict[str, Any]]) -> list[str]:
    rows = []
    for cell, direction in itertools.product(cells, ("forward", "backward")):
        found = cell[direction]
        best = min(found["total"], key=found["total"].get)
        least = max(found["exchange"], found["products"])
        rows.append({"rate": cell["rate"], "direction": direction, **found, "least": least,
                     "best": _pieces_in_words(best), "best_s": found["total"][best]})
    table = columns(rows, {
        "Mbit/s": "{rate:Mbit}", "direction": "{direction}", "exchange": "{exchange:ms}",
        "matmuls": "{products:ms}",
        **{_pieces_in_words(name): f"{{total[{name}]:ms}} ({{total[{name}]/least:.2f}})"
           for name in rows[0]["total"]},
        "best ratio": "{best_s/least:.2f} ({best})"})
    return page(
        __name__, {}, "table", kind=kind, cells=table, rows=rows,
        width="" if kind.waits else f" of inner width {kind.hidden:,}",
        gathers=" The exchange consists of an all-to-all and an all-gather." * (kind.replicas > 1),
        kept=sum(row["best_s"] / row["least"] <= AIM for row in rows))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cells = {kind: SWEEP.measure(argparse.Namespace(**vars(args), kind=kind))
             for kind in args.kinds}
    return {"tokens": args.tokens, "rounds": args.rounds, "cells": cells}


OPTIONS = {
    "kinds": Option(tuple(KINDS), "tables to measure", choices=KINDS),
    "rounds": Option(9, "number of timed rounds", quick=1),
    "rates": Option(RATES, "bandwidths of a node's link in bit/s", quick=(1e9,)),
    "degrees": Option((2, 4, 8), "numbers of pieces, in addition to one", quick=(2,)),
    "tokens": Option(TOKENS, "tokens per rank", quick=16),
}
