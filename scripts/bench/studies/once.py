"""A token once to each rank, or to each node, against once to each of its experts, on emulated
nodes: the exchange alone, and whole steps in Megatron and fairseq, forward and backward; and the
bytes that the planner predicts for larger clusters.

Needs Linux and root. Without `--parts` about 15 minutes on an idle machine with two processors; the
parts of 8x4 nodes and of slower links, about half an hour more, are measured where they are named.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin import MoELayer, TorchComm
from moe_plugin.cli.figures import columns
from moe_plugin.config import from_dict
from moe_plugin.planner.choice import SENDS, LayoutChoice
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.once import Limits, TokenBytes, bytes_of_token, rows_of_token
from moe_plugin.planner.units import parse_grid
from scripts.bench.layouts import slowest, timed_step
from scripts.bench.study import Option
from scripts.bench.train import host_steps
from scripts.bench.train import run as runs
from scripts.bench.train.host_sides import Settings, TrainShape
from scripts.bench.train.shapes import parse_shapes
from scripts.emulate import EmulatedCluster

TITLE = "A token once to each rank or node"
EXPERTS, RATE = 64, 200e6  # bit/s of a node's link
GRIDS = ("2x2", "4x2", "8x4")
AUTO, TODAY = "auto", "rows, auto"
IN_PIECES = {f"{send}, d=2": LayoutChoice(r=1, d=2, send=send) for send in SENDS[1:]}
SLOWER = 4.0  # so that links, not the processors that emulate them, are what 32 ranks wait for
LONGEST_WARM_UP = 40  # calls in which a tuner may settle


class Same(nn.Module):
    """An expert that gives what it gets; with a parameter, so that backward comes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + self.nothing


# -- the exchange alone


def make_layer(width: int, k: int, mode: str) -> MoELayer:
    """Of experts that compute nothing. mode: of `parallel`; `auto` leaves `dispatch.send` open."""
    return MoELayer(from_dict({
        "model_dim": width, "num_experts": EXPERTS, "router": {"top_k": k}, "losses": {},
        "comm": {"all_to_all": "linear"}, "parallel": {"mode": mode, "r": 1},
        **({"dispatch": {"send": "auto"}, "tuner": {"max_d": 2}} if mode == "auto" else {}),
    }), TorchComm(), experts=lambda index: Same())


def run_rank(width: int, k: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One rank: seconds of a call and its backward pass by column and round, of which the first
    does not count; rows of a token; the layout that `auto` took.
    """
    torch.manual_seed(0)
    fixed, tuned = make_layer(width, k, "fixed"), make_layer(width, k, "auto")
    tuned.load_state_dict(fixed.state_dict(), strict=False)
    torch.manual_seed(1 + fixed.comm.rank)
    x_TD = torch.randn(tokens, width, requires_grad=True)
    grad_TD = torch.randn_like(x_TD)

    def step(layer: MoELayer, choice: LayoutChoice | None) -> tuple[float, Any]:
        found = timed_step(layer, x_TD, choice, grad_TD)
        layer.zero_grad(set_to_none=True)
        x_TD.grad = None
        return found

    fixed_ = {send: LayoutChoice(r=1, send=send) for send in SENDS} | IN_PIECES
    columns_ = {**{name: (fixed, choice) for name, choice in fixed_.items()}, AUTO: (tuned, None)}
    for number in range(LONGEST_WARM_UP):
        step(tuned, None)
        if number and not tuned.routed_experts.tuner.exploring:
            break
    seconds: dict[str, list[float]] = {name: [] for name in columns_}
    rows: dict[str, float] = {}
    for _ in range(1 + rounds):
        for name, (layer, choice) in columns_.items():
            taken, stats = step(layer, choice)
            seconds[name].append(taken)
            rows[name] = stats.rows_sent / tokens
    return {"seconds": {name: found[1:] for name, found in seconds.items()}, "rows": rows,
            "layout": tuned.routed_experts.tuner.current.label}


def medians(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of the slowest rank, by column."""
    return {name: statistics.median(slowest(ranks, name)) for name in ranks[0]["seconds"]}


def formula(grid: str, k: int) -> tuple[float, float]:
    """Of rows between nodes, those that `ranks` and `nodes` send of what `rows` sends."""
    nodes, per_node = parse_grid(grid)
    rows = rows_of_token(Cluster(nodes=nodes, ranks_per_node=per_node), k)
    return rows.ranks / k, rows.nodes / k


def floor(grid: str, cell: dict[str, Any]) -> float:
    """Of the bytes between nodes those that must cross, pairs included, over those of `rows`."""
    nodes, per_node = parse_grid(grid)
    cluster = Cluster(nodes=nodes, ranks_per_node=per_node)
    rows, *once = (bytes_of_token(cluster, send, cell["k"], 4 * cell["width"]).between
                   for send in SENDS)
    return min(once) / rows


def measure_exchange(grid: str, args: argparse.Namespace, slower: float = 1.0) -> dict[str, Any]:
    """slower: links than those of the other parts; then only the first width, as bytes are what
    counts.
    """
    cells, rate = [], args.rate / slower
    widths = args.widths if slower == 1 else args.widths[:1]
    with EmulatedCluster(*parse_grid(grid), rate_bit_s=rate) as cluster:
        for width, k in itertools.product(widths, args.choices):
            ranks = cluster.run(run_rank, width, k, args.tokens, args.rounds, timeout_s=900)
            cells.append({"width": width, "k": k, "seconds": medians(ranks),
                          "rows": ranks[0]["rows"], "layout": ranks[0]["layout"]})
    return {"grid": grid, "tokens": args.tokens, "rounds": args.rounds, "rate": rate,
            "cells": cells}


def over(name: str, base: str) -> Callable[[dict[str, Any]], str]:
    """A cell's milliseconds of a column, and in brackets over another's."""
    def text(cell: dict[str, Any]) -> str:
        seconds = cell["seconds"]
        return f"{1e3 * seconds[name]:.0f} ({seconds[name] / seconds[base]:.2f})"

    return text


def exchange_part(found: dict[str, Any]) -> Iterator[str]:
    grid = found["grid"]
    slow = f", links of {found['rate'] / 1e6:.0f} Mbit/s" * (found["rate"] < RATE)
    yield f"## The exchange alone, {grid}{slow}"
    yield (f"{EXPERTS} experts, {found['tokens']} tokens of each rank, fp32, links of "
           f"{found['rate'] / 1e6:.0f} Mbit/s, one thread a rank, {found['rounds']} rounds.")
    fixed = [name for name in found["cells"][0]["seconds"] if name != AUTO]
    whole = set(fixed) >= set(IN_PIECES)  # older numbers have d = 1 alone
    if whole:
        yield ("d=2: in two pieces; `auto` may take two, too. Floor: bytes between nodes that must "
               "cross, pairs included, over those of `rows`, by the planner.")
    yield columns(found["cells"], {
        "D": "{width}", "k": "{k}",
        **{f"`{name}`": over(name, "rows") for name in (*fixed, AUTO)},
        "`auto` / best": lambda cell: f"{best_ratio(cell, fixed):.2f}", "`auto` took": "{layout}",
        "formula, `ranks`": lambda cell: f"{formula(grid, cell['k'])[0]:.2f}",
        "formula, `nodes`": lambda cell: f"{formula(grid, cell['k'])[1]:.2f}",
        **({"floor": lambda cell: f"{floor(grid, cell):.2f}"} if whole else {})})


def best_ratio(cell: dict[str, Any], names: Sequence[str]) -> float:
    """`auto` over the best of these columns."""
    return cell["seconds"][AUTO] / min(cell["seconds"][name] for name in names)


# -- whole steps

_FIXED = {"parallel.mode": "fixed", "comm.all_to_all": "linear"}
_TUNED = {"parallel.mode": "auto", "comm.all_to_all": "auto"}
SIDES: dict[str, Settings] = {
    TODAY: {**_TUNED, "dispatch.send": "rows"},
    **{send: {**_FIXED, "dispatch.send": send} for send in SENDS},
    AUTO: {**_TUNED, "dispatch.send": "auto"},
}


def plan_of(host: str, shape: TrainShape, text: str, args: argparse.Namespace) -> runs.TrainPlan:
    """Every side of ours; in fairseq k is a setting of our layer, and its slots are not made."""
    more = {"router.top_k": shape.top_k, "dispatch.name": "ragged"} if host == "fairseq" else {}
    return runs.TrainPlan(host, shape, text, args.steps, args.warm_up,
                          {name: {**side, **more} for name, side in SIDES.items()}, others=False)


def measure_steps(host: str, grid: str, args: argparse.Namespace) -> dict[str, Any]:
    cells = []
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(
            *parse_grid(grid), rate_bit_s=args.rate) as cluster:
        text = host_steps.write_text(Path(folder))
        for shape in parse_shapes(getattr(args, host)):
            sides = runs.sides_on_emulated(plan_of(host, shape, text, args), cluster)
            cells.append({
                "shape": shape.label(), "layouts": {side.name: side.layout for side in sides},
                "seconds": {side.name: statistics.median(side.seconds) for side in sides},
                "losses": {side.name: side.losses[-1] for side in sides}})
    return {"host": host, "grid": grid, "steps": args.steps, "rate": args.rate, "cells": cells}


def steps_part(found: dict[str, Any]) -> Iterator[str]:
    yield f"## Whole steps in {found['host'].capitalize()}, {found['grid']}"
    yield (
        "Milliseconds of a training step of a model of two layers (forward, backward, reduction, "
        f"optimizer), of the slowest rank, medians of {found['steps']} steps; models with equal "
        "weights and data train in the same processes, one step of each in turn, links of "
        f"{found['rate'] / 1e6:.0f} Mbit/s. `{TODAY}`: layout and all-to-all chosen while "
        "training, gathered weights and tokens among them, and each choice sent as a row; it is "
        "what the others are compared with in brackets. `rows`, `ranks`, `nodes`: r = 1, "
        "all-to-all `linear`. `auto`: everything is chosen.")
    for cell in found["cells"]:
        yield f"### {cell['shape'][0].upper()}{cell['shape'][1:]}"
        sides = [(name, cell) for name in cell["seconds"]]
        yield columns(sides, {
            "side": "`{0[0]}`", f"ms (over `{TODAY}`)": lambda side: over(side[0], TODAY)(side[1]),
            "layout": lambda side: side[1]["layouts"][side[0]],
            "loss of the last step": lambda side: f"{side[1]['losses'][side[0]]:.4f}"})


# -- predicted

MODEL_DIM, TOKENS, CHOICES, GROUPS = 7168, 4096, 8, 4  # as DeepSeek-V3, in bfloat16
ROW_BYTES = 2 * MODEL_DIM
NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# GB/s over RDMA, dispatch and combine, by GPUs: DeepEP's README (V1, H800)
PUBLISHED = {16: (43, 43), 32: (58, 57), 64: (51, 50)}


def predict(nodes: int) -> dict[str, TokenBytes]:
    """Bytes of a token by how it is sent, on nodes of eight GPUs."""
    cluster = Cluster(nodes=nodes, ranks_per_node=8)
    free = {send: bytes_of_token(cluster, send, CHOICES, ROW_BYTES) for send in SENDS}
    four = bytes_of_token(cluster, "nodes", CHOICES, ROW_BYTES,
                          Limits(nodes, min(nodes, GROUPS)))
    return {**free, "nodes, four groups": four}


def predicted_part(found: list[int]) -> Iterator[str]:
    yield "## Predicted: DeepSeek-V3's routing on nodes of eight GPUs"
    yield (
        "Computed by `moe_plugin.planner.once.bytes_of_token`, not measured: KiB of a token that "
        f"cross between nodes on the way to its experts, for even routing of {CHOICES} of 256 "
        f"experts, rows of {MODEL_DIM:,} numbers in bfloat16, their pairs included; back travel "
        "the rows alone. Four groups: a token's experts are on at most four nodes. In the last "
        "columns the milliseconds in which DeepEP's published bandwidth over RDMA (its README, V1 "
        f"on H800, {TOKENS:,} tokens of a GPU, eight experts in four groups, dispatch) would move "
        "these bytes; it was measured with fp8 rows, of half the size.")
    kib = {name: lambda row, name=name: f"{row[1][name].between / 1024:.1f}"
           for name in predict(2)}
    yield columns([(nodes, predict(nodes)) for nodes in found], {
        "nodes": "{0[0]}", **{f"`{name}`": cell for name, cell in kib.items()},
        "`nodes, four groups` / `rows`":
            lambda row: f"{row[1]['nodes, four groups'].between / row[1]['rows'].between:.2f}",
        "DeepEP, GB/s": lambda row: str(PUBLISHED.get(8 * row[0], ("",))[0]),
        "`rows` at it": lambda row: published_ms(row, "rows"),
        "`nodes, four groups` at it": lambda row: published_ms(row, "nodes, four groups")})


def published_ms(row: tuple[int, dict[str, TokenBytes]], name: str) -> str:
    """Milliseconds of all tokens of a GPU at the bandwidth that DeepEP has published."""
    if 8 * row[0] not in PUBLISHED:
        return ""
    return f"{1e3 * TOKENS * row[1][name].between / (1e9 * PUBLISHED[8 * row[0]][0]):.1f}"


def first_part(found: list[str]) -> Iterator[str]:
    yield ("How `dispatch.send` compares ([what it does](../once.md)): `rows`, `ranks`, `nodes`, "
           "and `auto`, which chooses.")
    yield ("The exchange alone: milliseconds of one call of a layer and its backward pass, of the "
           "slowest rank, medians; all columns are measured alternately in the same processes. "
           "Experts give what they get. In brackets: over `rows`. Formula: rows between nodes, "
           "over those of `rows`, for even routing; it depends on the nodes: with k = 8 it is 0.25 "
           "on two, 0.45 on four, 0.66 on eight.")


PARTS = {
    "about": (lambda args: list(SENDS), first_part),
    **{f"exchange-{grid}": (partial(measure_exchange, grid), exchange_part) for grid in GRIDS},
    **{f"exchange-{grid}-slow": (partial(measure_exchange, grid, slower=SLOWER), exchange_part)
       for grid in ("2x2", "8x4")},
    **{f"{host}-{grid}": (partial(measure_steps, host, grid), steps_part)
       for host in ("megatron", "fairseq") for grid in GRIDS},
    "predicted": (lambda args: list(NODES), predicted_part),
}
COMMITTED = ("about", "exchange-2x2", "exchange-4x2", "megatron-2x2", "megatron-4x2",
             "fairseq-2x2", "predicted")
OPTIONS = {
    "parts": Option(COMMITTED, "of the page; the others stay",
                    quick=("about", "exchange-2x2", "megatron-2x2", "predicted"),
                    choices=tuple(PARTS)),
    "widths": Option((128, 512), "D of the exchange alone", quick=(16,)),
    "choices": Option((2, 4, 8), "experts of a token, of the exchange alone", quick=(4,)),
    "tokens": Option(1024, "of a rank, of the exchange alone", quick=16),
    "rounds": Option(4, "measurements of each column of the exchange alone", quick=1),
    "megatron": Option("fine,128x512x64x2x2048,128x512x64x8x2048",
                       "shapes of whole steps, as `bench train --shapes`",
                       quick="16x16x8x4x128"),
    "fairseq": Option("128x512x64x8x2048", "the same", quick="16x16x8x4x128"),
    "steps": Option(5, "timed steps of each side", quick=1),
    "warm-up": Option(2, "steps before; tuners that have not chosen get more", quick=1),
    "rate": Option(RATE, "bit/s of a node's link", quick=1e9),
}
