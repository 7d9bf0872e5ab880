"""`moe-plugin bench <what>`: one command; each module `bench_<what>` adds its sub-command to it."""

from __future__ import annotations

import argparse
import importlib
from importlib.util import find_spec

PARTS = ("bench_layer", "bench_kernels", "bench_all_to_all")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `bench` with the parts that this installation has."""
    parser = commands.add_parser("bench", help="measure the layer, its kernels, the all-to-all algorithms")
    group = parser.add_subparsers(dest="bench", metavar="what", required=True, title="what to measure (each has its own --help)")
    for name in PARTS:
        if find_spec(f"moe_plugin.cli.{name}") is not None:
            importlib.import_module(f"moe_plugin.cli.{name}").add_parser(group)


def run(args: argparse.Namespace) -> int:
    """Run the chosen part."""
    return importlib.import_module(f"moe_plugin.cli.bench_{args.bench.replace('-', '_')}").run(args)
