"""Time of each all-to-all algorithm by message size. On your own ranks: start it with torchrun (or
Slurm), on each node. With --emulate: on a cluster of network namespaces on this machine.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.comm import TorchComm, algorithms
from moe_plugin.config import CommConfig
from moe_plugin.lab.bench import report
from moe_plugin.lab.bench.all_to_all import (
    ExchangeRow,
    Plan,
    as_dicts,
    measure_emulated,
    measure_rank,
    row_of,
)
from moe_plugin.lab.bench.all_to_all_report import parts, plot
from moe_plugin.lab.bench.measure import said
from moe_plugin.lab.bench.options import add_exchange_sizes, links_of, refuse_links
from moe_plugin.lab.emulate import EmulatedCluster
from moe_plugin.machine import memory_bytes
from moe_plugin.messages import short
from moe_plugin.planner.units import parse_grid, parse_size

TITLE = "All-to-all by size"
NAMES = "native,linear,2dh,leader,auto"
SIZES = "16KiB,64KiB,256KiB,1MiB,4MiB,8MiB"


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_exchange_sizes(p, SIZES)
    p.add_argument("--algorithms", default=NAMES, metavar="LIST",
                   help="by registered name (default: %(default)s)")
    p.add_argument("--topology", default="detect",
                   help="detect, a number of ranks per node, or a YAML file (default: %(default)s)")
    p.add_argument("--cluster", metavar="FILE",
                   help="cluster file by which auto chooses; without, it measures")
    p.add_argument("--plot", metavar="FILE", help="also draw time by size into FILE (.png or .svg)")


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.plot:
        report.check_figure(args.plot)
    names = tuple(args.algorithms.split(","))
    for name in names:
        algorithms.get(name)
    plan = Plan(names, tuple(map(parse_size, args.sizes.split(","))), args.repeats,
                CommConfig(topology=args.topology, cluster=args.cluster))
    rows, about = measure_rows(args, plan)
    if rows and args.plot:
        plot(rows, args.plot)
    return {**about, "rows": as_dicts(rows)} if rows else None


def body(found: dict[str, Any]) -> list[str]:
    about = {name: str(value) for name, value in found.items() if name not in ("rows", "load")}
    return [said(about), *parts([ExchangeRow(**row) for row in found["rows"]])]


def measure_rows(args: argparse.Namespace, plan: Plan) -> tuple[list[ExchangeRow], dict[str, Any]]:
    """(rows, what they were measured on); no rows on ranks other than 0."""
    if args.repeats < 1:
        raise ValueError(f"--repeats {short(args.repeats)} must be >= 1; e.g. 7")
    memory = memory_bytes(torch.device("cpu")) or float("inf")
    if not 1 <= min(plan.sizes) <= max(plan.sizes) <= memory:
        raise ValueError(f"--sizes {short(args.sizes)} must be from 1 to the {memory} bytes of "
                         "memory here; e.g. 64KiB,1MiB")
    if args.emulate:
        return _emulated(args, plan)
    refuse_links(args)
    return _own_ranks(plan)


def _emulated(args: argparse.Namespace, plan: Plan) -> tuple[list[ExchangeRow], dict[str, Any]]:
    links, rows = links_of(args), []
    for grid in args.emulate.split(","):
        with EmulatedCluster(*parse_grid(grid), **links) as cluster:
            rows += measure_emulated(cluster, plan)
    return rows, {"emulated": args.emulate, **links, "cores": os.cpu_count()}


def _own_ranks(plan: Plan) -> tuple[list[ExchangeRow], dict[str, Any]]:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        raise ValueError("no ranks to measure on: start it with `torchrun --nproc-per-node 2 -m "
                         "moe_plugin.cli.main bench all-to-all` (on each node), or emulate a "
                         "cluster: --emulate 4x4")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        comm = TorchComm()
        _, cells = measure_rank(plan, comm)
        rows = [row_of(comm.topology, cell) for cell in cells] if comm.rank == 0 else []
        return rows, {"backend": comm.backend, "ranks": comm.size, "topology": str(comm.topology)}
    finally:
        dist.destroy_process_group()
