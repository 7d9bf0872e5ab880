"""`moe-plugin doctor`: whether the layer works here, what is wrong, what is missing and the command
that adds it; with `--all` everything that is installed and active, and why.

Exit status 0 where the layer works (a tiny forward and backward pass agrees with a dense
computation), 1 where it does not.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from moe_plugin.cli.doctor import hosts
from moe_plugin.cli.doctor.report import first, render, rest, verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = ("Checks this installation: whether the layer works, what is wrong, what "
                          "is missing. Exit status 0: the layer works; 1: it does not.")
    parser.add_argument("--all", action="store_true",
                        help="also packages, registered names and what is active, and why")
    parser.add_argument("--json", action="store_true",
                        help="one JSON object with everything instead of text")


def run(args: argparse.Namespace) -> int:
    """Check, print the verdict as soon as it is known, then what takes longer; say by the exit
    status whether the layer works.
    """
    # the self check's simulated groups log what they choose; hosts take longest to import
    with _quiet("moe_plugin"), ThreadPoolExecutor(1) as beside:
        imports = beside.submit(hosts.host_rows)
        report = first()
        if not args.json:
            print(verdict(report), flush=True)
        report |= {**rest(everything=args.all or args.json), "hosts": imports.result()}
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
