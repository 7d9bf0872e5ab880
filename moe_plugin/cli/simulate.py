"""`moe-plugin simulate <what>`: one command; each module `simulate_<what>` adds its sub-command to it."""

from __future__ import annotations

import argparse
import importlib
from importlib.util import find_spec

PARTS = ("simulate_all_to_all",)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `simulate` with the parts that this installation has."""
    parser = commands.add_parser("simulate", help="predict times on clusters that you do not have")
    group = parser.add_subparsers(dest="simulate", metavar="what", required=True, title="what to predict (each has its own --help)")
    for name in PARTS:
        if find_spec(f"moe_plugin.cli.{name}") is not None:
            importlib.import_module(f"moe_plugin.cli.{name}").add_parser(group)


def run(args: argparse.Namespace) -> int:
    """Run the chosen part."""
    return importlib.import_module(f"moe_plugin.cli.simulate_{args.simulate.replace('-', '_')}").run(args)
