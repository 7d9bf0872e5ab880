"""Measure all-to-all algorithms on an emulated cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from moe_plugin.cli.figures import links_of
from moe_plugin.cli.measure.all_to_all import ExchangeRow, Plan, measure_rank, row_of
from moe_plugin.comm import Topology
from moe_plugin.planner.units import parse_grid
from scripts.emulate import EmulatedCluster


def emulated(args: argparse.Namespace, plan: Plan) -> tuple[list[ExchangeRow], dict[str, Any]]:
    """Measure like `measure_rows`, on emulated clusters."""
    links, rows = links_of(args), []
    for grid in args.emulate.split(","):
        with EmulatedCluster(*parse_grid(grid), **links) as cluster:
            rows += measure_emulated(cluster, plan)
    return rows, {"emulated": args.emulate, **links, "cores": os.cpu_count()}


def measure_emulated(cluster: EmulatedCluster, plan: Plan) -> list[ExchangeRow]:
    """Measure on a running emulated cluster."""
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
    """Return the rows as plain values, with milliseconds rounded to three digits."""
    return [{k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(row).items()}
            for row in rows]


def wire_floor_s(nodes: int, ranks_per_node: int, size: float, rate_bit_s: float, delay_s: float,
                 mtu: int = 1500) -> float:
    """Return the least seconds of an exchange on one node's link, with TCP/IP and Ethernet framing.

    Every node sends P S (N-1)/N bytes. A frame of `mtu` bytes carries mtu - 52 bytes of data and
    occupies
    mtu + 38 bytes on the wire.

    Args:
        nodes: number of nodes, N.
        ranks_per_node: number of ranks per node, P.
        size: bytes that a rank sends, S.
        rate_bit_s: rate of a node's link in bit/s.
        delay_s: delay of the link in seconds.
        mtu: maximum transmission unit in bytes.
    """
    if nodes == 1:
        return 0.0
    out = ranks_per_node * size * (nodes - 1) / nodes
    return out * (mtu + 38) / (mtu - 52) * 8 / rate_bit_s + delay_s
