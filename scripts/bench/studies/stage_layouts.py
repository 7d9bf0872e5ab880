"""Activations between stages of unequal layout: slices that cross to a node once, against a message
to each receiver.

Takes a minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from moe_plugin.cli.figures import columns
from moe_plugin.comm import TorchComm
from moe_plugin.comm.resharding import Resharding
from moe_plugin.planner.resharding import CHUNKS, Hop, TensorLayout, relays, unique_slices
from scripts.bench.study import Option
from scripts.emulate import EmulatedCluster

TITLE = "Activations between stages of unequal layout"
PER_NODE = 2
SHAPE = (512, 4, 512)  # [sequence, batch, width] float32: 4 MiB
# name, nodes of the sending and of the receiving stage, (data, tensor) sizes of both
CASES = (("tp=2 to tp=1", 1, 1, (1, 2), (2, 1)), ("tp=1 to tp=2", 1, 1, (2, 1), (1, 2)),
         ("tp=2 to tp=2", 1, 1, (1, 2), (1, 2)),
         ("tp=2 to tp=4 on two nodes", 1, 2, (1, 2), (1, 4)),
         ("tp=1 to tp=4 on two nodes", 1, 2, (2, 1), (1, 4)))


def layouts(case: Sequence[Any]) -> tuple[TensorLayout, TensorLayout]:
    """Activations at both stages; tensor parallelism copies them."""
    _, first, second, before, after = case
    spec: list[list[str]] = [[], ["data"], []]

    def at(ranks: range, sizes: tuple[int, int]) -> TensorLayout:
        return TensorLayout.on_mesh(SHAPE, dict(zip(("data", "tensor"), sizes, strict=True)), spec,
                                    ranks)

    start = first * PER_NODE
    return at(range(start), before), at(range(start, start + second * PER_NODE), after)


def _case(name: str) -> Sequence[Any]:
    return next(case for case in CASES if case[0] == name)


def nodes_of(case: Sequence[Any], once: bool) -> list[int]:
    """By rank, the node; all on one where every receiver gets a message of its own."""
    ranks = (case[1] + case[2]) * PER_NODE
    return [rank // PER_NODE if once else 0 for rank in range(ranks)]


def moved(case: Sequence[Any], once: bool) -> tuple[int, int]:
    """Bytes between nodes: all, and of the busiest link in one direction."""
    hops: list[Hop] = relays(unique_slices(*layouts(case)), nodes_of(case, once))
    load: Counter[tuple[str, int]] = Counter()
    for hop in hops:
        ends = hop.sender // PER_NODE, hop.receiver // PER_NODE
        if ends[0] != ends[1]:
            for key in (("out", ends[0]), ("in", ends[1])):
                load[key] += 4 * (hop.part[1] - hop.part[0])
    return sum(size for (way, _), size in load.items() if way == "out"), max(load.values())


def predicted_s(case: Sequence[Any], once: bool, bytes_per_s: float) -> float:
    """What the busiest link carries in one direction, and the first chunk's further nodes."""
    chained = once and case[2] > 1
    return moved(case, once)[1] / bytes_per_s * (1 + (case[2] - 1) / CHUNKS if chained else 1)


def measure_case(number: int, rounds: int) -> list[list[float]]:
    """On each rank: seconds of a move, with a message to each receiver and with slices that cross
    once, alternately.
    """
    comm, case = TorchComm(), CASES[number]
    source, target = layouts(case)
    plans = [Resharding(comm, source, target, nodes_of(case, once)) for once in (False, True)]
    box = source.boxes.get(comm.rank)
    x = None if box is None else torch.randn([stop - start for start, stop in box])
    seconds: list[list[float]] = [[], []]
    for _ in range(1 + rounds):
        for plan, each in zip(plans, seconds, strict=True):
            comm.barrier()
            start = time.monotonic()
            plan(x, torch.float32)
            comm.barrier()
            each.append(time.monotonic() - start)
    return [each[1:] for each in seconds]


def row(number: int, rate_mbit_s: float, rounds: int) -> dict[str, Any]:
    """A case, measured and predicted."""
    case = CASES[number]
    with EmulatedCluster(case[1] + case[2], PER_NODE, rate_mbit_s * 1e6) as cluster:
        ranks = cluster.run(measure_case, number, rounds, timeout_s=300)
    each_s, once_s = (statistics.median(times) for times in ranks[0])
    wanted = [predicted_s(case, once, rate_mbit_s * 1e6 / 8) for once in (False, True)]
    return {"case": case[0], "each_s": each_s, "once_s": once_s, "each_predicted_s": wanted[0],
            "once_predicted_s": wanted[1]}


def body(found: dict[str, Any]) -> list[str]:
    return [
        "A micro-batch's activations [512, 4, 512] (4 MiB) go from one stage to the next "
        f"(`comm/resharding.py`), on emulated nodes of {PER_NODE} ranks with links of "
        f"{found['rate_mbit_s']:g} Mbit/s. A message each: every receiver gets all it needs from "
        "the stage before. Once: what several ranks of a node need crosses to it once, in parts "
        "that they exchange, and goes on from node to node in chunks. Predicted: the bytes over "
        "the busiest link. Moved: the bytes between nodes, a message each and once. Difference: "
        "measured against predicted. Median of "
        f"{found['rounds']} moves of each kind, measured alternately.",
        columns(found["rows"], {
            "stages": "{case}", "moved, MiB": lambda r: " / ".join(
                f"{moved(_case(r['case']), once)[0] / 2**20:g}" for once in (False, True)),
            "each ms": lambda r: f"{1e3 * r['each_s']:.0f}",
            "once ms": lambda r: f"{1e3 * r['once_s']:.0f}",
            "each / once": lambda r: f"{r['each_s'] / r['once_s']:.2f}",
            "predicted": lambda r: f"{r['each_predicted_s'] / r['once_predicted_s']:.2f}",
            **{f"difference, {way}": lambda r, way=way: (
                f"{r[f'{way}_s'] / r[f'{way}_predicted_s'] - 1:+.0%}")
               for way in ("each", "once")}})]


OPTIONS = {"rate": Option(200.0, "of the links, Mbit/s", quick=1000.0),
           "rounds": Option(5, "moves of each kind", quick=1)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return {"rate_mbit_s": args.rate, "rounds": args.rounds,
            "rows": [row(number, args.rate, args.rounds) for number in range(len(CASES))]}
