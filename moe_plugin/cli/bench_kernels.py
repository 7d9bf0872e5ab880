"""`moe-plugin bench kernels`: each operation, its reference and its bound."""

from __future__ import annotations

import argparse
import json
import sys

from moe_plugin.cli.options import add_problem, problem_of


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Every operation of the layer at one layer's sizes: time of each "
                     "implementation that runs here, and its bound, the larger of bytes over the "
                     "measured copy bandwidth and FLOPs over the measured rate of one large "
                     "matmul.")
    add_problem(p)
    p.add_argument(
        "--resources", action="store_true",
        help="instead: compile the Triton kernels ahead of time for sm_80, sm_90, sm_100 and "
             "gfx942 (no GPU needed) and report registers, spills, shared memory, occupancy and "
             "which instructions they use")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from dataclasses import asdict

    from moe_plugin.lab.bench import kernels, report, resources
    from moe_plugin.lab.bench.chips import GPUS

    if args.resources:
        found = [resources.compile_for(case, target) for target in GPUS
                 for case in resources.cases(target)]
        rows, table = [asdict(r) for r in found], report.resource_table
    else:
        found = kernels.run(problem_of(args), args.rounds)
        rows, table = found.as_dict(), report.kernel_table
    sys.stdout.write((json.dumps(rows, indent=1) if args.json else table(found)) + "\n")
    return 0
