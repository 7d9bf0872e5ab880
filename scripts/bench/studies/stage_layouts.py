"""Measure the transfer of activations between pipeline stages with different layouts. The study
compares separate messages to each receiver with sending each slice to a node only once.

The study takes about a minute.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from moe_plugin.comm import TorchComm
from moe_plugin.comm.resharding import Resharding
from moe_plugin.planner.resharding import Hop, TensorLayout, hops_s, relays, unique_slices
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.sweep import Ranks, Sweep, alternate, medians, timed
from scripts.emulate import EmulatedCluster

TITLE = "Activations between stages of unequal layout"
PER_NODE = 2
SHAPE = (512, 4, 512)  # [sequence, batch, width] in float32, which is 4 MiB
# numbers of nodes of the sending and of the receiving stage, (data, tensor) sizes of both, and
# whether the tensor-parallel ranks share the sequence instead of having copies
CASES = {"tp=2 to tp=1": (1, 1, (1, 2), (2, 1), False),
         "tp=1 to tp=2": (1, 1, (2, 1), (1, 2), False),
         "tp=2 to tp=2": (1, 1, (1, 2), (1, 2), False),
         "tp=2 to tp=4 on two nodes": (1, 2, (1, 2), (1, 4), False),
         "tp=1 to tp=4 on two nodes": (1, 2, (2, 1), (1, 4), False),
         "tp=2 to tp=4, two nodes each, sequence-parallel": (2, 2, (2, 2), (1, 4), True),
         "tp=4 to tp=1, two nodes each, sequence-parallel": (2, 2, (1, 4), (4, 1), True)}

# by name: whether data are sent to a node once, and whether the order of the slices is searched
WAYS = {"each": (False, False), "largest": (True, False), "once": (True, True)}


def layouts(case: Sequence[Any]) -> tuple[TensorLayout, TensorLayout]:
    """Return the layouts of the activations on both stages. With tensor parallelism, every rank of
    a stage has a copy of the activations, or a part of the sequence.
    """
    first, second, before, after, shares = case
    spec: list[list[str]] = [["tensor"] if shares else [], ["data"], []]

    def at(ranks: range, sizes: tuple[int, int]) -> TensorLayout:
        return TensorLayout.on_mesh(SHAPE, dict(zip(("data", "tensor"), sizes, strict=True)), spec,
                                    ranks)

    start = first * PER_NODE
    return at(range(start), before), at(range(start, start + second * PER_NODE), after)


def nodes_of(case: Sequence[Any], once: bool) -> list[int]:
    """Return the node of each rank. If the receivers get separate messages, all ranks count as one
    node.
    """
    ranks = (case[0] + case[1]) * PER_NODE
    return [rank // PER_NODE if once else 0 for rank in range(ranks)]


def hops_of(case: Sequence[Any], once: bool, searched: bool) -> list[Hop]:
    """Return the messages of a transfer; see `planner.resharding.relays`."""
    return relays(unique_slices(*layouts(case)), nodes_of(case, once), searched=searched)


def moved(case: Sequence[Any], once: bool, searched: bool) -> tuple[int, int]:
    """Return the total number of bytes sent between nodes, and the number of bytes sent over the
    busiest link in one direction.
    """
    load: Counter[tuple[str, int]] = Counter()
    for hop in hops_of(case, once, searched):
        ends = hop.sender // PER_NODE, hop.receiver // PER_NODE
        if ends[0] != ends[1]:
            for key in (("out", ends[0]), ("in", ends[1])):
                load[key] += 4 * (hop.part[1] - hop.part[0])
    return sum(size for (way, _), size in load.items() if way == "out"), max(load.values())


def predicted_s(case: Sequence[Any], once: bool, searched: bool, bytes_per_s: float) -> float:
    """Predict the duration of a transfer in seconds by simulating its messages between nodes. Every
    node sends one message and receives one message at a time.
    """
    nodes = [rank // PER_NODE for rank in range((case[0] + case[1]) * PER_NODE)]
    return 4 * hops_s(hops_of(case, once, searched), nodes) / bytes_per_s


def measure_case(at: argparse.Namespace) -> dict[str, Any]:
    """On each rank, measure the transfers of all `WAYS`, which alternate."""
    comm, case = TorchComm(), CASES[at.case]
    source, target = layouts(case)
    box = source.boxes.get(comm.rank)
    x = None if box is None else torch.randn([stop - start for start, stop in box])

    def move(plan: Resharding) -> None:
        plan(x, torch.float32)
        comm.barrier()

    return {"seconds": alternate({name: partial(timed, comm, partial(
        move, Resharding(comm, source, target, nodes_of(case, once), searched)))
        for name, (once, searched) in WAYS.items()}, at.rounds)}


def row(at: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    measured = medians(ranks[:1])  # ends with a barrier, so all ranks need the same time
    return {f"{name}_s": measured[name] for name in WAYS} | {
        f"{name}_predicted_s": predicted_s(CASES[at.case], *way, at.rate * 1e6 / 8)
        for name, way in WAYS.items()}


SWEEP = Sweep(
    axes=lambda args: {"case": CASES},
    cluster=lambda at: EmulatedCluster(sum(CASES[at.case][:2]), PER_NODE, at.rate * 1e6),
    rank=measure_case, row=row, timeout_s=300)


def body(found: dict[str, Any]) -> list[str]:
    return page(__name__, found, cases=[{**row, "moved": " / ".join(
        f"{moved(CASES[row['case']], *WAYS[name])[0] / 2**20:g}" for name in ("each", "once"))}
        for row in found["rows"]])


OPTIONS = {"rate": Option(200.0, "bandwidth of the links in Mbit/s", quick=1000.0),
           "rounds": Option(5, "timed moves of each kind", quick=1)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return {"rate_mbit_s": args.rate, "rounds": args.rounds, "rows": SWEEP.measure(args)}
