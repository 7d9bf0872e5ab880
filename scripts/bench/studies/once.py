"""Compare three ways to send tokens: once to each rank, once to each node, and once to each of
their experts. All nodes are emulated on one machine. The study measures the exchange alone, and
whole training steps in Megatron and fairseq. The study also predicts how many bytes are sent on
larger clusters.

The study requires Linux and root. Without --parts, it takes about 15 minutes on an idle machine
with two CPU cores. The parts with 8x4 nodes and with slower links take about half an hour more and
run only if --parts lists them.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.config import from_dict
from moe_plugin.planner.choice import SENDS, LayoutChoice
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.once import Limits, bytes_of_token, rows_of_token
from moe_plugin.planner.units import parse_grid
from scripts.bench.report import columns, page
from scripts.bench.study import Option
from scripts.bench.sweep import Sweep, alternate, clean_step, medians
from scripts.bench.toy import SleepingExpert
from scripts.bench.train.results import HOSTS
from scripts.bench.train.run import settings_on_emulated
from scripts.bench.train.sides import Settings, parse_shapes, write_text
from scripts.emulate import EmulatedCluster

TITLE = "A token once to each rank or node"
EXPERTS, RATE = 64, 200e6  # RATE: bandwidth of a node's link in bit/s
GRIDS = ("2x2", "4x2", "8x4")
AUTO, TODAY = "auto", "rows, auto"
IN_PIECES = {f"{send}, d=2": LayoutChoice(r=1, d=2, send=send) for send in SENDS[1:]}
SLOWER = 4.0  # factor with which 32 ranks wait for the links and not for the emulating processors
LONGEST_WARM_UP = 40  # number of calls in which a tuner can choose


# -- the exchange alone


def make_layer(width: int, k: int, mode: str) -> MoELayer:
    """Return a layer whose experts do not compute anything.

    Args:
        width: width of a token.
        k: number of experts per token.
        mode: value of `parallel.mode`. With `auto`, the layer also chooses the value of
            `dispatch.send`.
    """
    return MoELayer(from_dict({
        "model_dim": width, "num_experts": EXPERTS, "router": {"top_k": k}, "losses": {},
        "comm": {"all_to_all": "linear"}, "parallel": {"mode": mode, "r": 1},
        **({"dispatch": {"send": "auto"}, "tuner": {"max_d": 2}} if mode == "auto" else {}),
    }), TorchComm(), experts=lambda index: SleepingExpert())


def run_rank(at: argparse.Namespace) -> dict[str, Any]:
    """Measure all modes of sending tokens on one rank. The result also contains the number of rows
    per token, and the layout that `auto` chose.
    """
    torch.manual_seed(0)
    fixed, tuned = make_layer(at.width, at.k, "fixed"), make_layer(at.width, at.k, "auto")
    tuned.load_state_dict(fixed.state_dict(), strict=False)
    torch.manual_seed(1 + fixed.comm.rank)
    x_TD = torch.randn(at.tokens, at.width, requires_grad=True)
    grad_TD = torch.randn_like(x_TD)

    def step(layer: MoELayer, choice: LayoutChoice | None) -> tuple[float, float]:
        seconds, stats = clean_step(layer, x_TD, choice, grad_TD)
        return seconds, stats.rows_sent / at.tokens

    fixed_ = {send: LayoutChoice(r=1, send=send) for send in SENDS} | IN_PIECES
    columns_ = {**{name: (fixed, choice) for name, choice in fixed_.items()}, AUTO: (tuned, None)}
    for number in range(LONGEST_WARM_UP):
        step(tuned, None)
        if number and not tuned.routed_experts.tuner.exploring:
            break
    found = alternate({name: partial(step, *side) for name, side in columns_.items()}, at.rounds)
    return {"seconds": {name: [one[0] for one in steps] for name, steps in found.items()},
            "rows": {name: steps[-1][1] for name, steps in found.items()},
            "layout": tuned.routed_experts.tuner.current.label}


EXCHANGE = Sweep(
    axes=lambda args: {"width": args.widths, "k": args.choices},
    cluster=lambda at: EmulatedCluster(*parse_grid(at.grid), rate_bit_s=at.rate),
    rank=run_rank, timeout_s=900, row=lambda at, ranks: {
        "seconds": medians(ranks), "rows": ranks[0]["rows"], "layout": ranks[0]["layout"]})


def computed(grid: str, cell: dict[str, Any]) -> dict[str, Any]:
    """Return numbers that are computed from the sizes of a cell, divided by those of `rows`.

    `formula` contains the numbers of rows sent between nodes by `ranks` and `nodes`. `floor` is the
    minimum number of bytes that must be sent between nodes, including (token, expert) pairs.
    """
    nodes, per_node = parse_grid(grid)
    cluster, k = Cluster(nodes=nodes, ranks_per_node=per_node), cell["k"]
    sent = rows_of_token(cluster, k)
    rows, *once = (bytes_of_token(cluster, send, k, 4 * cell["width"]).between for send in SENDS)
    return {"formula": (sent.ranks / k, sent.nodes / k), "floor": min(once) / rows}


def measure_exchange(grid: str, args: argparse.Namespace, slower: float = 1.0) -> dict[str, Any]:
    """Measure the exchange of tokens alone.

    Args:
        grid: number of nodes and of ranks per node.
        slower: factor by which the links are slower than in the other parts of the study. If the
            factor is not 1, only the first width is measured, because the times mostly depend on
            the number of bytes.
    """
    rate, widths = args.rate / slower, args.widths if slower == 1 else args.widths[:1]
    at = argparse.Namespace(**{**vars(args), "grid": grid, "rate": rate, "widths": widths})
    return {"grid": grid, "tokens": args.tokens, "rounds": args.rounds, "rate": rate,
            "cells": EXCHANGE.measure(at)}


def exchange_part(found: dict[str, Any]) -> list[str]:
    grid = found["grid"]
    fixed = [name for name in found["cells"][0]["seconds"] if name != AUTO]
    whole = set(fixed) >= set(IN_PIECES)  # older numbers were measured only with d = 1
    rows = [{**cell, **computed(grid, cell),
             "best_s": min(cell["seconds"][name] for name in fixed)} for cell in found["cells"]]
    table = columns(rows, {
        "width": "{width}", "k": "{k}",
        **{f"`{name}`": f"{{seconds[{name}]:ms}} ({{seconds[{name}]/seconds[rows]:.2f}})"
           for name in (*fixed, AUTO)},
        "`auto` / best": "{seconds[auto]/best_s:.2f}", "layout of `auto`": "{layout:layout}",
        "formula, `ranks`": "{formula[0]:.2f}", "formula, `nodes`": "{formula[1]:.2f}",
        **({"floor": "{floor:.2f}"} if whole else {})})
    return page(__name__, found, "exchange", table=table,
                pieces=page(__name__, {}, "pieces") if whole else [],
                slow=f", links of {found['rate'] / 1e6:.0f} Mbit/s" * (found["rate"] < RATE))


# -- whole steps

_FIXED = {"parallel.mode": "fixed", "comm.all_to_all": "linear"}
_TUNED = {"parallel.mode": "auto", "comm.all_to_all": "auto"}
SIDES: dict[str, Settings] = {
    TODAY: {**_TUNED, "dispatch.send": "rows"},
    **{send: {**_FIXED, "dispatch.send": send} for send in SENDS},
    AUTO: {**_TUNED, "dispatch.send": "auto"},
}


def measure_steps(host: str, grid: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(
            *parse_grid(grid), rate_bit_s=args.rate) as cluster:
        text = write_text(Path(folder))
        cells = [settings_on_emulated(host, shape, text, SIDES, args, cluster)
                 for shape in parse_shapes(getattr(args, host))]
    return {"host": host, "grid": grid, "steps": args.steps, "rate": args.rate, "cells": cells}


def steps_part(found: dict[str, Any]) -> list[str]:
    return page(
        __name__, found, "steps", host_name=HOSTS[found["host"]],
        shapes=[part for cell in found["cells"] for part in page(
            __name__, cell, "shape", sides=[
                {"name": name, "seconds": seconds, "base": cell["seconds"][TODAY],
                 "layout": cell["layouts"][name], "loss": cell["losses"][name]}
                for name, seconds in cell["seconds"].items()])])


# -- predicted

MODEL_DIM, TOKENS, CHOICES, GROUPS = 7168, 4096, 8, 4  # as DeepSeek-V3, in bfloat16
ROW_BYTES = 2 * MODEL_DIM
NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# by number of GPUs: GB/s over RDMA of dispatch and combine, from DeepEP's README (V1, H800)
PUBLISHED = {16: (43, 43), 32: (58, 57), 64: (51, 50)}


def predict(nodes: int) -> dict[str, float]:
    """For each mode, return the number of bytes sent between nodes per token, on nodes with eight
    GPUs.
    """
    cluster = Cluster(nodes=nodes, ranks_per_node=8)
    found = {send: bytes_of_token(cluster, send, CHOICES, ROW_BYTES) for send in SENDS}
    found["nodes, four groups"] = bytes_of_token(cluster, "nodes", CHOICES, ROW_BYTES,
                                                 Limits(nodes, min(nodes, GROUPS)))
    return {name: one.between for name, one in found.items()}


def predicted_part(found: list[int]) -> list[str]:
    def row(nodes: int) -> dict[str, Any]:
        sent, rate = predict(nodes), PUBLISHED.get(8 * nodes, ("",))[0]

        def published_ms(name: str) -> str:  # of all tokens of a GPU
            return f"{1e3 * TOKENS * sent[name] / (1e9 * rate):.1f}" if rate else ""

        return {"nodes": nodes, "sent": sent, "rate": rate, "rows_ms": published_ms("rows"),
                "groups_ms": published_ms("nodes, four groups")}

    return page(__name__, {}, "predicted", rows=map(row, found))


PARTS = {
    "about": (lambda args: list(SENDS), lambda found: page(__name__, {})),
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
    "rate": Option(RATE, "bandwidth of a node's link in bit/s", quick=1e9),
}
