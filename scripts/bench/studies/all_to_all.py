"""Measure each all-to-all algorithm for different message sizes. To measure your own ranks, start
the command with torchrun (or Slurm) on each node. With --emulate, the command measures a cluster of
network namespaces on this machine.
"""

from __future__ import annotations

import argparse
from typing import Any

from moe_plugin.cli import figures
from moe_plugin.cli.figures import add_exchange_sizes
from moe_plugin.cli.measure.all_to_all import (
    NAMES,
    ExchangeRow,
    Plan,
    measure_rows,
)
from moe_plugin.comm import algorithms
from moe_plugin.config import CommConfig
from moe_plugin.planner.units import parse_size
from scripts.bench.all_to_all import as_dicts, parts, plot
from scripts.bench.report import versions_in_words

TITLE = "All-to-all by size"
SIZES = "16KiB,64KiB,256KiB,1MiB,4MiB,8MiB"


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
        figures.check_figure(args.plot)
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
