"""`moe-plugin doctor`, which checks whether the MoE layer works on this machine and which packages
are missing.

The command also prints the commands that install the missing packages. With `--all`, it also prints
all packages, the features that each host does not support, and the stored measurements.

The exit status is 0 if the layer works, and 1 otherwise. The check runs a small forward and
backward pass of the layer and compares the results with a dense computation.
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
    """Add the options of `moe-plugin doctor`."""
    parser.description = ("Checks whether the layer works in this installation, and lists problems "
                          "and missing packages. The exit status is 0 if the layer works, and "
                          "otherwise 1.")
    parser.add_argument("--all", action="store_true",
                        help="also show packages, names that cannot be selected here, features "
                             "that hosts lack, settings that hosts refuse together, and the stored "
                             "measurements of auto")
    parser.add_argument("--forget-decisions", action="store_true",
                        help="only delete the stored measurements of auto on this machine, so that "
                             "later runs measure again")
    parser.add_argument("--json", action="store_true",
                        help="print everything as one JSON object instead of text")


def doctor(args: argparse.Namespace) -> int:
    """Run the checks. Print whether the layer works. Then collect and print the sections of the
    report that take longer to compute.

    Returns: 0 if the layer works, and 1 otherwise.
    """
    if args.forget_decisions:
        files = ChoiceFiles()
        print(f"{files.forget_all()} kept decisions removed from {files.place()}")
        return 0
    # quiet, because the self check's simulated groups log their choices; hosts are checked in
    # parallel, because importing them takes longest
    with quiet(), ThreadPoolExecutor(1) as background:
        imports = background.submit(packages.host_rows)
        report = first()
        if not args.json:
            print(verdict(report), flush=True)
        report |= {**rest(everything=args.all or args.json), "hosts": imports.result()}
    print(json.dumps(report, indent=1) if args.json else render(report))
    return 0 if report["works"] else 1
