"""Compare sending a token once to each rank, or once to each node, with sending it once to each of
its
experts, on emulated nodes: the exchange alone, and whole steps in Megatron and fairseq. The study
also predicts the bytes on larger clusters.

Needs Linux and root. Without --parts it takes about 15 minutes on an idle machine with two
processors. The parts with 8x4 nodes and with slower links take about half an hour more, and are
measured only if --parts names them.
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
from scripts.bench.report import layout_in_words
from scripts.bench.study import Option
from scripts.bench.train import host_steps
from scripts.bench.train import run as runs
from scripts.bench.train.host_sides import Settings, TrainShape
from scripts.bench.train.results import HOSTS
from scripts.bench.train.shapes import parse_shapes
from scripts.emulate import EmulatedCluster

TITLE = "A token once to each rank or node"
EXPERTS, RATE = 64, 200e6  # RATE: rate of a node's link in bit/s
GRIDS = ("2x2", "4x2", "8x4")
AUTO, TODAY = "auto", "rows, auto"
IN_PIECES = {f"{send}, d=2": LayoutChoice(r=1, d=2, send=send) for send in SENDS[1:]}
SLOWER = 4.0  # factor with which 32 ranks wait for the links and not for the emulating processors
LONGEST_WARM_UP = 40  # number of calls in which a tuner can choose


class IdentityExpert(nn.Module):
    """An expert that returns its input. It has a parameter, so that backward reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + self.nothing


# -- the exchange alone


def make_layer(width: int, k: int, mode: str) -> MoELayer:
    """Return a layer whose experts compute nothing.

    Args:
        width: width of a token.
        k: number of experts per token.
        mode: value of `parallel.mode`. With `auto`, `dispatch.send` is chosen too.
    """
    return MoELayer(from_dict({
        "model_dim": width, "num_experts": EXPERTS, "router": {"top_k": k}, "losses": {},
        "comm": {"all_to_all": "linear"}, "parallel": {"mode": mode, "r": 1},
        **({"dispatch": {"send": "auto"}, "tuner": {"max_d": 2}} if mode == "auto" else {}),
    }), TorchComm(), experts=lambda index: IdentityExpert())


def run_rank(width: int, k: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure one rank: seconds of a call with backward by column and round, without the first
    round.

    The result also has the rows per token, and the layout that `auto` chose.
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
    """Return the median seconds of the slowest rank, by column."""
    return {name: statistics.median(slowest(ranks, name)) for name in ranks[0]["seconds"]}


def formula(grid: str, k: int) -> tuple[float, float]:
    """Return the rows between nodes that `ranks` and `nodes` send, relative to those of `rows`."""
    nodes, per_node = parse_grid(grid)
    rows = rows_of_token(Cluster(nodes=nodes, ranks_per_node=per_node), k)
    return rows.ranks / k, rows.nodes / k


def floor(grid: str, cell: dict[str, Any]) -> float:
    """Return the bytes that must be sent between nodes, including pairs, relative to those of
    `rows`.
    """
    nodes, per_node = parse_grid(grid)
    cluster = Cluster(nodes=nodes, ranks_per_node=per_node)
    rows, *once = (bytes_of_token(cluster, send, cell["k"], 4 * cell["width"]).between
                   for send in SENDS)
    return min(once) / rows


def measure_exchange(grid: str, args: argparse.Namespace, slower: float = 1.0) -> dict[str, Any]:
    """Measure the exchange alone.

    Args:
        grid: nodes x ranks per node.
        args: options of the study.
        slower: factor by which the links are slower than in the other parts. If it is not 1, only
            the
            first width is measured, because the result depends on the number of bytes.
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
    """Return a function that shows a column's milliseconds, and in parentheses its ratio to another
    one.
    """
    def text(cell: dict[str, Any]) -> str:
        seconds = cell["seconds"]
        return f"{1e3 * seconds[name]:.0f} ({seconds[name] / seconds[base]:.2f})"

    return text


def exchange_part(found: dict[str, Any]) -> Iterator[str]:
    grid = found["grid"]
    slow = f", links of {found['rate'] / 1e6:.0f} Mbit/s" * (found["rate"] < RATE)
    yield f"## The exchange alone, {grid} nodes x ranks{slow}"
    yield (f"The layer has {EXPERTS} experts. Each rank has {found['tokens']:,} tokens in float32 "
           f"and one thread. The links have {found['rate'] / 1e6:.0f} Mbit/s. Times are medians of "
           f"{found['rounds']} rounds.")
    fixed = [name for name in found["cells"][0]["seconds"] if name != AUTO]
    whole = set(fixed) >= set(IN_PIECES)  # older numbers were measured only with d = 1
    if whole:
        yield ("Columns with d=2 send the rows in two pieces, which `auto` may choose too. *Floor* "
               "is the number of bytes that must be sent between nodes, including the (token, "
               "expert) pairs, relative to that of `rows`, as computed by the planner.")
    yield columns(found["cells"], {
        "width": "{width}", "k": "{k}",
        **{f"`{name}`": over(name, "rows") for name in (*fixed, AUTO)},
        "`auto` / best": lambda cell: f"{best_ratio(cell, fixed):.2f}",
        "layout of `auto`": lambda cell: layout_in_words(cell["layout"]),
        "formula, `ranks`": lambda cell: f"{formula(grid, cell['k'])[0]:.2f}",
        "formula, `nodes`": lambda cell: f"{formula(grid, cell['k'])[1]:.2f}",
        **({"floor": lambda cell: f"{floor(grid, cell):.2f}"} if whole else {})})


def best_ratio(cell: dict[str, Any], names: Sequence[str]) -> float:
    """Return the time of `auto` divided by that of the best of these columns."""
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
    """Return the plan of all sides.

    In fairseq, k is a setting of our layer, and the ragged dispatcher creates no slots.
    """
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
    yield f"## Whole steps in {HOSTS[found['host']]}, {found['grid']} nodes x ranks"
    yield (
        "Times are milliseconds of a training step (forward, backward, reduction of gradients and "
        f"optimizer) on the slowest rank, medians of {found['steps']} steps. The models have two "
        "layers, equal weights and equal data. They train in the same processes, one step of each "
        f"model after the other. The links have {found['rate'] / 1e6:.0f} Mbit/s. `{TODAY}` "
        "chooses layout and all-to-all during training, including layouts that gather weights or "
        "tokens, and sends each choice as a row. The number in parentheses is the time relative to "
        f"`{TODAY}`. `rows`, `ranks` and `nodes` use r = 1 and the all-to-all `linear`. `auto` "
        "chooses everything.")
    for cell in found["cells"]:
        yield f"### {cell['shape'][0].upper()}{cell['shape'][1:]}"
        sides = [(name, cell) for name in cell["seconds"]]
        yield columns(sides, {
            "side": "`{0[0]}`",
            f"ms (relative to `{TODAY}`)": lambda side: over(side[0], TODAY)(side[1]),
            "layout": lambda side: layout_in_words(side[1]["layouts"][side[0]]),
            "loss of the last step": lambda side: f"{side[1]['losses'][side[0]]:.4f}"})


# -- predicted

MODEL_DIM, TOKENS, CHOICES, GROUPS = 7168, 4096, 8, 4  # as DeepSeek-V3, in bfloat16
ROW_BYTES = 2 * MODEL_DIM
NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# by number of GPUs: GB/s over RDMA of dispatch and combine, from DeepEP's README (V1, H800)
PUBLISHED = {16: (43, 43), 32: (58, 57), 64: (51, 50)}


def predict(nodes: int) -> dict[str, TokenBytes]:
    """Return the bytes of a token by how it is sent, on nodes of eight GPUs."""
    cluster = Cluster(nodes=nodes, ranks_per_node=8)
    free = {send: bytes_of_token(cluster, send, CHOICES, ROW_BYTES) for send in SENDS}
    four = bytes_of_token(cluster, "nodes", CHOICES, ROW_BYTES,
                          Limits(nodes, min(nodes, GROUPS)))
    return {**free, "nodes, four groups": four}


def predicted_part(found: list[int]) -> Iterator[str]:
    yield "## Predicted: DeepSeek-V3's routing on nodes of eight GPUs"
    yield (
        "These numbers are computed by `moe_plugin.planner.once.bytes_of_token`, not measured. "
        "They are KiB that one token sends between nodes on the way to its experts, for even "
        f"routing to {CHOICES} of 256 experts. A row has {MODEL_DIM:,} numbers in bfloat16, and "
        "its (token, expert) pairs are included. On the way back only rows are sent. With four "
        "groups, the experts of a token are on at most four nodes. The last columns show the "
        "milliseconds that these bytes would need at DeepEP's published bandwidth over RDMA. "
        "DeepEP's README (V1) measured this bandwidth on H800 GPUs in dispatch, with "
        f"{TOKENS:,} tokens per GPU, eight experts in four groups and fp8 rows, which have half "
        "the size.")
    kib = {name: lambda row, name=name: f"{row[1][name].between / 1024:.1f}"
           for name in predict(2)}
    yield columns([(nodes, predict(nodes)) for nodes in found], {
        "nodes": "{0[0]}", **{f"`{name}`": cell for name, cell in kib.items()},
        "`nodes, four groups` / `rows`":
            lambda row: f"{row[1]['nodes, four groups'].between / row[1]['rows'].between:.2f}",
        "DeepEP, GB/s": lambda row: str(PUBLISHED.get(8 * row[0], ("",))[0]),
        "`rows`, ms": lambda row: published_ms(row, "rows"),
        "`nodes, four groups`, ms": lambda row: published_ms(row, "nodes, four groups")})


def published_ms(row: tuple[int, dict[str, TokenBytes]], name: str) -> str:
    """Return the milliseconds of all tokens of a GPU at DeepEP's published bandwidth."""
    if 8 * row[0] not in PUBLISHED:
        return ""
    return f"{1e3 * TOKENS * row[1][name].between / (1e9 * PUBLISHED[8 * row[0]][0]):.1f}"


def first_part(found: list[str]) -> Iterator[str]:
    yield ("This page compares the values of `dispatch.send`: a token's row is sent once per "
           "selected expert (`rows`), once per rank (`ranks`) or once per node (`nodes`). `auto` "
           "chooses one of them. The page about [sending a token once](../once.md) explains the "
           "setting.")
    yield ("In the tables of the exchange alone, times are milliseconds of one layer call and its "
           "backward pass on the slowest rank. All columns are measured alternately in the same "
           "processes. The experts return their input unchanged. The number in parentheses is the "
           "time relative to `rows`. *Formula* is the number of rows between nodes relative to "
           "that of `rows`, for even routing. It depends on the number of nodes: with k = 8 and "
           "`nodes`, it is 0.25 on two nodes, 0.45 on four and 0.66 on eight.")


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
    "parts": Option(COMMITTED, "parts of the page to measure; the other parts are kept",
                    quick=("about", "exchange-2x2", "megatron-2x2", "predicted"),
                    choices=tuple(PARTS)),
    "widths": Option((128, 512), "widths of a token in the exchange alone", quick=(16,)),
    "choices": Option((2, 4, 8), "experts per token in the exchange alone", quick=(4,)),
    "tokens": Option(1024, "tokens per rank in the exchange alone", quick=16),
    "rounds": Option(4, "timed rounds of the exchange alone", quick=1),
    "megatron": Option("fine,128x512x64x2x2048,128x512x64x8x2048",
                       "shapes of Megatron's whole steps, as in `bench train --shapes`",
                       quick="16x16x8x4x128"),
    "fairseq": Option("128x512x64x8x2048", "shapes of fairseq's whole steps",
                      quick="16x16x8x4x128"),
    "steps": Option(5, "timed steps of each side", quick=1),
    "warm-up": Option(2, "untimed steps before the timed ones; tuners that have not chosen by "
                      "then get more", quick=1),
    "rate": Option(RATE, "rate of a node's link in bit/s", quick=1e9),
}
