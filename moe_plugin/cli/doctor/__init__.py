"""`moe-plugin doctor`: what is installed, what is active and why, what is missing and the command
that adds it.

Exit status 0 where the layer works (a tiny forward and backward pass agrees with a dense
computation), 1 where it does not.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from moe_plugin.cli.doctor.report import collect, render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = ("Checks this installation: versions, devices, what is active and why, "
                          "what is missing. Exit status 0: the layer works; 1: it does not.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Collect, print, and say by the exit status whether the layer works."""
    with _quiet("moe_plugin.comm"):  # the self check's simulated groups log what they choose
        report = collect()
    print(json.dumps(report, indent=1) if args.json else render(report))
    return 0 if report["works"] else 1


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Only warnings of this logger, for the time of the block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
