"""`moe-plugin simulate <what>`: the modules `simulate_<what>` in one command."""

from __future__ import annotations

import argparse

from moe_plugin.cli.parts import add_parts
from moe_plugin.cli.parts import run_part as run  # noqa: F401 - the command's

PARTS = ("all-to-all",)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `simulate` with its parts."""
    add_parts(commands, "simulate", PARTS, "predict times on clusters that you do not have",
              "what to predict")
