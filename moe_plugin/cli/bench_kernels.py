"""`moe-plugin bench kernels`: each operation beside its reference and its bound."""

from __future__ import annotations

import argparse
import json
import sys

from moe_plugin.cli.bench_layer import add_sizes, problem_of


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `kernels` to `bench`."""
    p = commands.add_parser(
        "kernels", help="each operation beside its reference and its bound", description=
        "Every operation of the layer at one layer's sizes: time of each implementation that runs "
        "here, and its bound, the larger of "
        "bytes over the measured copy bandwidth and FLOPs over the measured rate of one large "
        "matrix product."
    )
    add_sizes(p)
    p.add_argument(
        "--resources", action="store_true", help=
        "instead: compile the Triton kernels ahead of time for sm_80, sm_90 and gfx942 (no GPU "
        "needed) and report registers, spills "
        "and shared memory")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from dataclasses import asdict

    from moe_plugin.bench import report

    if args.resources:
        from moe_plugin.bench import resources

        found = [(resources.label(case), resources.compile_for(case, target))
                 for case in resources.cases() for target in resources.TARGETS]
        text = json.dumps([{"case": name, **asdict(r)} for name, r in found],
                          indent=1) if args.json else report.resource_table(found)
    else:
        from moe_plugin.bench import kernels

        measured = kernels.run(problem_of(args), args.rounds)
        text = json.dumps(measured.as_dict(),
                          indent=1) if args.json else report.kernel_table(measured)
    sys.stdout.write(text + "\n")
    return 0
