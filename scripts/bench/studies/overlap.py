"""What overlap gains: emulated nodes of one rank, exchange and products alone and together.

With products on the processor, and with products that only take their time, as on an accelerator:
there the host's processors are free to carry the packets, as two busy cores are not. Then many
small experts, whose products suffer from being cut by rows, and Parm's S2, in which ranks that hold
the same tokens gather each piece while the next one travels.

Needs Linux and root, and about nine minutes on an idle machine with two processors or more.
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
RATES = (25e6, 50e6, 100e6)  # bit/s of a node's link
AIM = 1.10  # times the larger of exchange and products
ROW_S = 100e-6  # forward matmuls of a row, where they only take their time; backward twice that


class Kind(NamedTuple):
    """What one table is of.

    Attributes:
        nodes: of one rank.
        hidden: inner width of an expert.
        waits: products only take time.
        cuts: ways to cut the rows.
        replicas: ranks with the same tokens, under Parm's S2.
    """

    title: str
    nodes: int = 2
    experts: int = 4
    hidden: int = 2048
    waits: bool = False
    cuts: tuple[str, ...] = ("rows", "peers")
    replicas: int = 1


KINDS = {
    "cpu": Kind("Products on the processor"),
    "wait": Kind("Products that take only time", waits=True),
    "many": Kind("Many small experts, products on the processor", experts=32, hidden=512,
                 cuts=CUTS),
    "s2": Kind("Parm's S2 with two replicas, products that take only time", nodes=4, experts=8,
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
    """An expert whose matmuls take `ROW_S` per row, and no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x_ND: Tensor) -> Tensor:
        return _Wait.apply(x_ND * self.scale)


def layouts(degrees: Iterable[int], cuts: Iterable[str]) -> dict[str, LayoutChoice]:
    """The layouts measured, by their column's name, without overlap first."""
    found = {"d=1": LayoutChoice(r=1)}
    for cut in cuts:
        found |= {f"d={d} {cut}": LayoutChoice(r=1, d=d, piece_axis=cut) for d in degrees}
    return found


class Alone:
    """Exchange and matmuls of one call of a layer, each alone.

    Args:
        layer: runs with r = 1 in one piece.
        x_TD: [T, D] tokens of this rank.
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
        """Rows there and back, and gathered by replicas; backward sends as many."""
        algorithm = self.place.placement.algorithm
        there_RD = algorithm(self.layer.comm, self.rows_ND, self.piece.send, self.piece.recv)
        back_ND = algorithm(self.layer.comm, there_RD, self.piece.recv, self.piece.send)
        replicas = self.place.placement.replicas
        if replicas is not None:
            gather(back_ND, replicas)

    def products(self) -> None:
        """The experts on the rows that reach this rank."""
        self.y_RD = self.layer.experts(ExpertRows(self.here_RD, self.piece.counts))

    def products_backward(self) -> None:
        """Gradients of the rows and of the weights."""
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
    """One rank: seconds of each measurement by name and round; the first round does not count."""
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
            # bound, or it would look at the next choice
            y_TD = timed(f"{name} forward", lambda choice=choice: layer(x_TD, choice=choice)).output
            timed(f"{name} backward", lambda y_TD=y_TD: y_TD.backward(grad_TD))
            layer.zero_grad(set_to_none=True)
            x_TD.grad = None  # or the next choice would add to it
    return {name: found[1:] for name, found in seconds.items()}


def summary(ranks: list[dict[str, list[float]]], names: Iterable[str]) -> dict[str, Any]:
    """Medians in seconds of the slowest rank, by direction."""
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
        "Milliseconds of the slowest rank, "
        f"medians of {report['rounds']} rounds; all columns are measured alternately in the "
        "same processes. In brackets: over the larger of exchange and products, below which no "
        "overlap can go. Totals are of whole layer calls, with routing and copies. Nodes of "
        f"one rank and one thread, {report['tokens']} tokens per rank, width {WIDTH}, k = 1, fp32.")
    for name, cells in report["cells"].items():
        kind = KINDS[name]
        yield f"## {kind.title}"
        yield f"{kind.nodes} nodes, {kind.experts} experts" + (
            "" if kind.waits else f" of inner width {kind.hidden}") + (
            "; the exchange is all-to-all and all-gather." if kind.replicas > 1 else ".")
        yield from _table(cells)


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
        **{of: lambda row, of=of: f"{1e3 * row[of]:.0f}" for of in ("exchange", "products")},
        **{name: lambda row, name=name: (
            f"{1e3 * row['total'][name]:.0f} ({row['ratios'][name]:.2f})")
           for name in rows[0]["total"]},
        "best": lambda row: f"{row['ratios'][row['best']]:.2f} ({row['best']})"}),
        f"Within {AIM:.2f} of the larger one: {kept} of {len(rows)} lines."]


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
    "kinds": Option(tuple(KINDS), "tables to make", choices=KINDS),
    "rounds": Option(9, "measurements of each column", quick=1),
    "rates": Option(RATES, "bit/s of a node's link", quick=(1e9,)),
    "degrees": Option((2, 4, 8), "values of d, besides 1", quick=(2,)),
    "tokens": Option(TOKENS, "of a rank", quick=16),
}
