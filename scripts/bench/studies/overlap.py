"""Measure the gain of overlap on emulated nodes with one rank each: exchange and matmuls are timed
separately and together.

The matmuls run on the processor, or only wait for their time, as on an accelerator. While they
wait, the host's processors are free to transfer the packets, which two busy cores are not. Two
further cases are many small experts, whose matmuls become slower when rows are divided, and Parm's
S2, in which ranks with the same tokens gather each piece while the next piece is sent.

Needs Linux and root, and takes about nine minutes on an idle machine with two processors or more.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_plugin import MoELayer, TorchComm
from moe_plugin.cli.figures import columns
from moe_plugin.comm.functional import gather
from moe_plugin.config import from_dict
from moe_plugin.config.parallel import CUTS
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import ExpertRows
from scripts.bench.layouts import slowest
from scripts.bench.study import Option
from scripts.emulate import EmulatedCluster

TITLE = "Overlap on emulated nodes"
WIDTH = 256
TOKENS = 1024
RATES = (25e6, 50e6, 100e6)  # rates of a node's link in bit/s
AIM = 1.10  # largest acceptable time, relative to the longer one of exchange and matmuls
ROW_S = 100e-6  # time of a row's forward matmuls if they only wait; backward waits twice as long


class Kind(NamedTuple):
    """The setup of one table.

    Attributes:
        title: title of the section.
        nodes: number of nodes, each with one rank.
        experts: number of experts.
        hidden: inner width of an expert.
        waits: whether the matmuls only wait for their time.
        cuts: ways to divide the rows into pieces.
        replicas: number of ranks with the same tokens, under Parm's S2.
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


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(ROW_S * x.shape[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * ROW_S * grad.shape[0])
        return grad.clone()


class WaitingExpert(nn.Module):
    """An expert whose matmuls wait `ROW_S` per row and use no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x_ND: Tensor) -> Tensor:
        return _Wait.apply(x_ND * self.scale)


def layouts(degrees: Iterable[int], cuts: Iterable[str]) -> dict[str, LayoutChoice]:
    """Return the measured layouts by name. The first one has no overlap."""
    found = {"d=1": LayoutChoice(r=1)}
    for cut in cuts:
        found |= {f"d={d} {cut}": LayoutChoice(r=1, d=d, piece_axis=cut) for d in degrees}
    return found


class Alone:
    """The exchange and the matmuls of one layer call, which can be run separately.

    Args:
        layer: the layer, which runs with r = 1 in one piece.
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
        """Send rows to the experts and back, and gather them on replicas. Backward sends as many
        rows.
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
        """Compute the gradients of the rows and of the weights."""
        self.y_RD.backward(torch.ones_like(self.y_RD))


def settings(kind: Kind) -> dict[str, Any]:
    shared = {"parallel": {"replicas": kind.replicas, "schedule": "s2"},
              "dispatch": {"name": "padded", "capacity_factor": 1.0}}
    return {
        "model_dim": WIDTH, "num_experts": kind.experts, "router": {"top_k": 1},
        "experts": {"hidden_dim": kind.hidden}, "comm": {"all_to_all": "linear"},
        **(shared if kind.replicas > 1 else {})
    }


def run_rank(kind: Kind, tokens: int, choices: dict[str, LayoutChoice],
             rounds: int) -> dict[str, list[float]]:
    """Measure on one rank; return the seconds by name and round, without the first round."""
    torch.manual_seed(0)
    layer = MoELayer(from_dict(settings(kind)), TorchComm(),
                     experts=(lambda index: WaitingExpert()) if kind.waits else None)
    torch.manual_seed(1 + layer.comm.rank // kind.replicas)
    x_TD = torch.randn(tokens, WIDTH, requires_grad=True)
    grad_TD, alone = torch.randn_like(x_TD), Alone(layer, x_TD)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        layer.comm.barrier()
        start = time.perf_counter()
        made = work()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return made

    for _ in range(1 + rounds):
        timed("exchange", alone.exchange)
        timed("products forward", alone.products)
        timed("products backward", alone.products_backward)
        layer.zero_grad(set_to_none=True)
        for name, choice in choices.items():
            # default arguments bind the current values; a plain closure would use later ones
            y_TD = timed(f"{name} forward", lambda choice=choice: layer(x_TD, choice=choice)).output
            timed(f"{name} backward", lambda y_TD=y_TD: y_TD.backward(grad_TD))
            layer.zero_grad(set_to_none=True)
            x_TD.grad = None  # otherwise the next choice would add to this gradient
    return {name: found[1:] for name, found in seconds.items()}


def summary(ranks: list[dict[str, list[float]]], names: Iterable[str]) -> dict[str, Any]:
    """Return the median seconds of the slowest rank for each direction."""
    def median(name: str) -> float:
        return statistics.median(slowest([{"seconds": rank} for rank in ranks], name))

    return {
        direction: {
            "exchange": median("exchange"), "products": median(f"products {direction}"),
            "total": {name: median(f"{name} {direction}") for name in names}
        } for direction in ("forward", "backward")
    }


def body(report: dict[str, Any]) -> Iterator[str]:
    yield (
        "A layer can send one piece of its rows while it computes another one. This page compares "
        "the time of whole layer calls, including routing and copies, with the time of the "
        "exchange alone and of the experts' matmuls alone. Overlap cannot make a call faster than "
        "the longer one of the two. The number in parentheses is the time of the call divided by "
        "this limit. Times are milliseconds of the slowest rank, medians of "
        f"{report['rounds']} rounds. All columns are measured alternately in the same processes. "
        "The machine emulates nodes with one rank and one thread each. Every rank has "
        f"{report['tokens']:,} tokens of width {WIDTH} in float32 and selects one expert per "
        "token.")
    yield ("A call is divided into 2, 4 or 8 pieces along rows, along experts or along peers (the "
           "ranks that exchange rows); see `parallel.piece_axis`. Matmuls that only wait imitate "
           "an accelerator: the host's processors are then free to transfer packets.")
    for name, cells in report["cells"].items():
        kind = KINDS[name]
        yield f"## {kind.title}"
        yield f"{kind.nodes} nodes and {kind.experts} experts" + (
            "." if kind.waits else f" of inner width {kind.hidden:,}.") + (
            " The exchange consists of an all-to-all and an all-gather."
            if kind.replicas > 1 else "")
        yield from _table(cells)


def _pieces_in_words(name: str) -> str:
    d, _, cut = name.removeprefix("d=").partition(" ")
    return f"{d} pieces, {cut}" if cut else "one piece"


def _table(cells: list[dict[str, Any]]) -> list[str]:
    rows = []
    for cell, direction in itertools.product(cells, ("forward", "backward")):
        found = cell[direction]
        best = min(found["total"], key=found["total"].get)
        least = max(found["exchange"], found["products"])
        rows.append({"rate": cell["rate"], "direction": direction, **found, "best": best,
                     "ratios": {name: s / least for name, s in found["total"].items()}})
    kept = sum(row["ratios"][row["best"]] <= AIM for row in rows)
    return [columns(rows, {
        "Mbit/s": lambda row: f"{row['rate'] / 1e6:.0f}", "direction": "{direction}",
        **{head: lambda row, part=part: f"{1e3 * row[part]:.0f}"
           for head, part in (("exchange", "exchange"), ("matmuls", "products"))},
        **{_pieces_in_words(name): lambda row, name=name: (
            f"{1e3 * row['total'][name]:.0f} ({row['ratios'][name]:.2f})")
           for name in rows[0]["total"]},
        "best ratio": lambda row: (
            f"{row['ratios'][row['best']]:.2f} ({_pieces_in_words(row['best'])})")}),
        f"The best time is at most {AIM:.2f} times the limit in {kept} of {len(rows)} rows."]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cells: dict[str, list[Any]] = {name: [] for name in args.kinds}
    for name, found in cells.items():
        kind = KINDS[name]
        choices = layouts(args.degrees, kind.cuts)
        for rate in args.rates:
            with EmulatedCluster(kind.nodes, 1, rate_bit_s=rate) as cluster:
                ranks = cluster.run(run_rank, kind, args.tokens, choices, args.rounds,
                                    timeout_s=600)
            found.append({"rate": rate, **summary(ranks, choices)})
    return {"tokens": args.tokens, "rounds": args.rounds, "cells": cells}


OPTIONS = {
    "kinds": Option(tuple(KINDS), "tables to measure", choices=KINDS),
    "rounds": Option(9, "number of timed rounds", quick=1),
    "rates": Option(RATES, "rates of a node's link in bit/s", quick=(1e9,)),
    "degrees": Option((2, 4, 8), "numbers of pieces, in addition to one", quick=(2,)),
    "tokens": Option(TOKENS, "tokens per rank", quick=16),
}
