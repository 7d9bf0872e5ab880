"""Measure each all-to-all algorithm for different message sizes. To measure your own ranks, start
the command with torchrun (or Slurm) on each node. With --emulate, the command measures a cluster of
network namespaces on this machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from moe_plugin.cli.figures import (
    add_exchange_sizes,
    check_figure,
    links_of,
    log_scale,
    pyplot,
    save_figure,
)
from moe_plugin.cli.measure.all_to_all import (
    NAMES,
    ExchangeRow,
    Plan,
    measure_rank,
    measure_rows,
    row_of,
)
from moe_plugin.cli.planning.answer import sent
from moe_plugin.comm import Topology, algorithms
from moe_plugin.config import CommConfig
from moe_plugin.planner.units import parse_grid, parse_size, show_time
from scripts.bench.plots import OURS, size_ticks
from scripts.bench.report import columns, versions_in_words
from scripts.emulate import EmulatedCluster

TITLE = "All-to-all by size"
SIZES = "16KiB,64KiB,256KiB,1MiB,4MiB,8MiB"
TITLES = {"native": "gloo's own"}


def emulated(args: argparse.Namespace, plan: Plan) -> tuple[list[ExchangeRow], dict[str, Any]]:
    """Measure all-to-all algorithms on several emulated clusters, in the same format as
    `measure_rows`.
    """
    links, rows = links_of(args), []
    for grid in args.emulate.split(","):
        with EmulatedCluster(*parse_grid(grid), **links) as cluster:
            rows += measure_emulated(cluster, plan)
    return rows, {"emulated": args.emulate, **links, "cores": os.cpu_count()}


def measure_emulated(cluster: EmulatedCluster, plan: Plan) -> list[ExchangeRow]:
    """Measure the all-to-all algorithms on a running emulated cluster."""
    plan = replace(plan, helper=cluster.switch_pid)
    answers = cluster.run(measure_rank, plan, timeout_s=1800.0, group_timeout_s=120.0)
    cells = answers[0][1]
    cores = os.cpu_count() or 1
    rows = []
    for index, cell in enumerate(cells):
        cpu_ms = 1e3 * sum(answer[1][index].cpu_s for answer in answers) / cores
        floor = wire_floor_s(cluster.nodes_wanted, cluster.ranks_per_node, cell.size,
                             cluster.rate_bit_s, cluster.delay_s, cluster.mtu)
        rows.append(row_of(Topology(answers[0][0]), cell, 1e3 * floor, cpu_ms))
    return rows


def as_dicts(rows: Sequence[ExchangeRow]) -> list[dict]:
    """Convert the rows to plain values. Milliseconds are rounded to three digits."""
    return [{k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(row).items()}
            for row in rows]


def wire_floor_s(nodes: int, ranks_per_node: int, size: float, rate_bit_s: float, delay_s: float,
                 mtu: int = 1500) -> float:
    """Return the minimum time in seconds to transfer an exchange over one node's link, including
    TCP/IP and Ethernet headers.

    Every node sends P S (N-1)/N bytes to other nodes. A frame with an MTU of `mtu` bytes carries
    mtu - 52 bytes of data and takes up mtu + 38 bytes on the wire.

    Args:
        nodes: number of nodes, N.
        ranks_per_node: number of ranks per node, P.
        size: number of bytes that each rank sends, S.
        rate_bit_s: bandwidth of a node's link in bit/s.
        delay_s: latency of the link in seconds.
        mtu: maximum transmission unit in bytes.
    """
    if nodes == 1:
        return 0.0
    out = ranks_per_node * size * (nodes - 1) / nodes
    return out * (mtu + 38) / (mtu - 52) * 8 / rate_bit_s + delay_s


def grids(rows: Sequence[ExchangeRow]) -> list[tuple[int, int]]:
    """Return the distinct grids (nodes, ranks per node) in order of first occurrence."""
    return list(dict.fromkeys((row.nodes, row.ranks_per_node) for row in rows))


def parts(rows: Sequence[ExchangeRow]) -> list[str]:
    """Return one table per grid of nodes and ranks. For each message size, the table contains the
    time of each algorithm, the lower bound given by the link, and the CPU time.
    """
    found = []
    for grid in grids(rows):
        mine = [row for row in rows if (row.nodes, row.ranks_per_node) == grid]
        by_size: dict[int, dict[str, ExchangeRow]] = {}
        for row in mine:
            by_size.setdefault(row.bytes, {})[row.algorithm] = row
        names = list(dict.fromkeys(row.algorithm for row in mine))
        own = [name for name in names if name != "auto"]  # auto runs one of these algorithms
        found += [
            f"Median time of one exchange on {grid[0]} nodes with {grid[1]} ranks each:",
            columns(by_size.values(), {
                "sent by each rank": lambda cells: sent(next(iter(cells.values())).bytes),
                "wire floor": lambda cells: _time(next(iter(cells.values())).floor_ms),
                **{TITLES.get(name, name): lambda cells, name=name: (
                    _time(cells[name].median_ms) if name in cells else "") for name in names},
                "auto chose": lambda cells: (
                    cells["auto"].chosen or "" if "auto" in cells else ""),
                f"CPU time: {' / '.join(own)}": lambda cells, own=own: " / ".join(
                    _time(cells[name].cpu_ms) for name in own)})]
    return found


def _time(value: float | None) -> str:
    return "" if value is None else show_time(value / 1e3)


def plot(rows: Sequence[ExchangeRow], path: str) -> None:
    """Plot the time against the message size, with one panel per grid and logarithmic axes."""
    found = grids(rows)
    figure, axes = pyplot().subplots(1, len(found), figsize=(5.5 * len(found), 4.5), squeeze=False,
                                     sharey=True, layout="constrained")
    for axis, grid in zip(axes[0], found, strict=True):
        mine = [row for row in rows if (row.nodes, row.ranks_per_node) == grid]
        for name in dict.fromkeys(row.algorithm for row in mine):
            line = [row for row in mine if row.algorithm == name]
            own = {"linestyle": "--", "color": OURS, "linewidth": 2.5, "zorder": 3} if (
                name == "auto") else {}
            axis.plot([r.bytes for r in line], [r.median_ms for r in line], marker="o",
                      label=TITLES.get(name, name), **own)
        floor = {row.bytes: row.floor_ms for row in mine if row.floor_ms is not None}
        if floor:
            axis.plot(list(floor), list(floor.values()), color="black", linestyle=":",
                      label="wire floor")
        axis.set(xlabel="sent by each rank", ylabel="ms of one exchange",
                 title=f"{grid[0]} nodes x {grid[1]} ranks")
        size_ticks(axis, [row.bytes for row in mine])
        log_scale(axis)
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    save_figure(figure, path)


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_exchange_sizes(p, SIZES)
    p.add_argument("--algorithms", default=NAMES, metavar="LIST",
                   help="registered names, separated by commas (default: %(default)s)")
    p.add_argument("--topology", default="detect",
                   help="detect, a number of ranks per node, or a YAML file (default: %(default)s)")
    p.add_argument("--cluster", metavar="FILE",
                   help="cluster file from which auto predicts the fastest algorithm. Without this "
                        "file, auto measures")
    p.add_argument("--plot", metavar="FILE",
                   help="also draw time by size to this .png or .svg file")


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.plot:
        check_figure(args.plot)
    names = tuple(args.algorithms.split(","))
    for name in names:
        algorithms.get(name)
    plan = Plan(names, tuple(map(parse_size, args.sizes.split(","))), args.repeats,
                CommConfig(topology=args.topology, cluster=args.cluster))
    rows, about = measure_rows(args, plan, "bench all-to-all")
    if rows and args.plot:
        plot(rows, args.plot)
    return {**about, "rows": as_dicts(rows)} if rows else None


def body(found: dict[str, Any]) -> list[str]:
    about = {name: str(value) for name, value in found.items() if name not in ("rows", "load")}
    return [versions_in_words(about), *parts([ExchangeRow(**row) for row in found["rows"]])]
