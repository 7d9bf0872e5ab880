"""`moe-plugin doctor`: whether the layer works here, what is wrong, what is missing and the command
that adds it; with `--all` also packages, what hosts lack, and what was measured and kept.

Exit status 0 where the layer works (a tiny forward and backward pass agrees with a dense
computation), 1 where it does not.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

from moe_plugin.cli.doctor import packages
from moe_plugin.cli.doctor.report import first, render, rest, verdict
from moe_plugin.tuning.compute_times import ChoiceFiles
from moe_plugin.utils.quiet import quiet


def doctor_options(parser: argparse.ArgumentParser) -> None:
    """`moe-plugin doctor`."""
    parser.description = ("Checks this installation: whether the layer works, what is wrong, what "
                          "is missing. Exit status 0: the layer works; 1: it does not.")
    parser.add_argument("--all", action="store_true",
                        help="also packages, names that cannot be chosen here, what hosts lack, "
                             "and what auto has measured and kept")
    parser.add_argument("--forget-decisions", action="store_true",
                        help="only remove what auto has measured on this machine and kept for "
                             "later runs, so that it is measured again")
    parser.add_argument("--json", action="store_true",
                        help="one JSON object with everything instead of text")


def doctor(args: argparse.Namespace) -> int:
    """Check, print the verdict as soon as it is known, then what takes longer; say by the exit
    status whether the layer works.
    """
    if args.forget_decisions:
        files = ChoiceFiles()
        print(f"{files.forget_all()} kept decisions removed from {files.place()}")
        return 0
    # the self check's simulated groups log what they choose; hosts take longest to import
    with quiet(), ThreadPoolExecutor(1) as beside:
        imports = beside.submit(packages.host_rows)
        report = first()
        if not args.json:
            print(verdict(report), flush=True)
        report |= {**rest(everything=args.all or args.json), "hosts": imports.result()}
    print(json.dumps(report, indent=1) if args.json else render(report))
    return 0 if report["works"] else 1
