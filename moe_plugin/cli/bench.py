"""`moe-plugin bench <what>`: the modules `bench_<what>` in one command."""

from __future__ import annotations

import argparse

from moe_plugin.cli.parts import add_parts
from moe_plugin.cli.parts import run_part as run  # noqa: F401 - the command's

PARTS = ("layer", "kernels", "all-to-all")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `bench` with its parts."""
    add_parts(commands, "bench", PARTS, "measure the layer, its kernels, the all-to-all algorithms",
              "what to measure")
