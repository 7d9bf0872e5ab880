"""A command of several parts (`moe-plugin bench layer`): each part is a module `<command>_<part>`
of this package.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable


def add_parts(commands: argparse._SubParsersAction, command: str, parts: Iterable[str], text: str,
              title: str) -> None:
    """Add `command`, with one sub-command a part; each module's own `add_parser` adds it."""
    group = commands.add_parser(command, help=text).add_subparsers(
        dest="part", metavar="what", required=True, title=f"{title} (each has its own --help)")
    for part in parts:
        _module(command, part).add_parser(group)


def run_part(args: argparse.Namespace) -> int:
    """Run the chosen part."""
    return _module(args.command, args.part).run(args)


def _module(command: str, part: str):
    return importlib.import_module(f"moe_plugin.cli.{command}_{part.replace('-', '_')}")
