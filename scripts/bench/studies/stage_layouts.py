"""Measure the transfer of activations between pipeline stages of different layout: slices that are
sent to a node once, compared with a separate message to each receiver.

Takes about a minute.
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
from scripts.bench.report import bullets
from scripts.bench.study import Option
from scripts.emulate import EmulatedCluster

TITLE = "Activations between stages of unequal layout"
PER_NODE = 2
SHAPE = (512, 4, 512)  # [sequence, batch, width] in float32, which is 4 MiB
# name, numbers of nodes of the sending and of the receiving stage, (data, tensor) sizes of both
CASES = (("tp=2 to tp=1", 1, 1, (1, 2), (2, 1)), ("tp=1 to tp=2", 1, 1, (2, 1), (1, 2)),
         ("tp=2 to tp=2", 1, 1, (1, 2), (1, 2)),
         ("tp=2 to tp=4 on two nodes", 1, 2, (1, 2), (1, 4)),
         ("tp=1 to tp=4 on two nodes", 1, 2, (2, 1), (1, 4)))


def layouts(case: Sequence[Any]) -> tuple[TensorLayout, TensorLayout]:
    """Return the layouts of the activations at both stages. Tensor parallelism copies activations.
    """
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
    """Return the node of each rank. With separate messages, all ranks count as one node."""
    ranks = (case[1] + case[2]) * PER_NODE
    return [rank // PER_NODE if once else 0 for rank in range(ranks)]


def moved(case: Sequence[Any], once: bool) -> tuple[int, int]:
    """Return the bytes sent between nodes: in total, and over the busiest link in one direction."""
    hops: list[Hop] = relays(unique_slices(*layouts(case)), nodes_of(case, once))
    load: Counter[tuple[str, int]] = Counter()
    for hop in hops:
        ends = hop.sender // PER_NODE, hop.receiver // PER_NODE
        if ends[0] != ends[1]:
            for key in (("out", ends[0]), ("in", ends[1])):
                load[key] += 4 * (hop.part[1] - hop.part[0])
    return sum(size for (way, _), size in load.items() if way == "out"), max(load.values())


def predicted_s(case: Sequence[Any], once: bool, bytes_per_s: float) -> float:
    """Predict the seconds of a move: bytes over the busiest link, and the first chunk's further
    hops.
    """
    chained = once and case[2] > 1
    return moved(case, once)[1] / bytes_per_s * (1 + (case[2] - 1) / CHUNKS if chained else 1)


def measure_case(number: int, rounds: int) -> list[list[float]]:
    """Measure a move on each rank alternately with separate messages and with slices that are sent
    once.
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
    """Measure and predict one case."""
    case = CASES[number]
    with EmulatedCluster(case[1] + case[2], PER_NODE, rate_mbit_s * 1e6) as cluster:
        ranks = cluster.run(measure_case, number, rounds, timeout_s=300)
    each_s, once_s = (statistics.median(times) for times in ranks[0])
    wanted = [predicted_s(case, once, rate_mbit_s * 1e6 / 8) for once in (False, True)]
    return {"case": case[0], "each_s": each_s, "once_s": once_s, "each_predicted_s": wanted[0],
            "once_predicted_s": wanted[1]}


def body(found: dict[str, Any]) -> list[str]:
    return [
        "This page compares two ways to send the activations of a micro-batch from one pipeline "
        "stage to the next, if the stages have different layouts (`comm/resharding.py`). The "
        "activations are [512, 4, 512] in float32, which is 4 MiB. The machine emulates nodes of "
        f"{PER_NODE} ranks with links of {found['rate_mbit_s']:g} Mbit/s. Times are medians of "
        f"{found['rounds']} moves of each kind, measured alternately.",
        bullets(
            "*each*: every receiver gets all of its data in separate messages.",
            """*once*: data that several ranks of a node need are sent to the node once, in parts
            that the ranks exchange. The data are forwarded from node to node in chunks.""",
            """*moved*: the bytes sent between nodes with separate messages, and those sent
            once.""",
            "*predicted*: the ratio predicted from the bytes over the busiest link.",
            "*difference*: the measured time relative to the predicted time."),
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


OPTIONS = {"rate": Option(200.0, "rate of the links in Mbit/s", quick=1000.0),
           "rounds": Option(5, "timed moves of each kind", quick=1)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return {"rate_mbit_s": args.rate, "rounds": args.rounds,
            "rows": [row(number, args.rate, args.rounds) for number in range(len(CASES))]}
