"""`moe-plugin bench train`: whole training steps of our layer and the framework's own."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from moe_plugin.cli.options import add_links, links_of

if TYPE_CHECKING:
    from moe_plugin.lab.bench.train.results import TrainReport

log = logging.getLogger(__name__)


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Whole training steps (forward, backward, optimizer) of models with our "
                     "layer, with the framework's own and with dense layers of equal active "
                     "width: equal weights and data, the same ranks and processes, steps in turn. "
                     "Starts its ranks itself, or runs on those that torchrun started.")
    p.add_argument("--host", required=True, choices=("megatron", "fairseq"),
                   help="the framework; native with fairseq is the layer of its moe branch, "
                        "written after its code")
    p.add_argument("--shapes", default="all", metavar="LIST",
                   help="all, names with commas (few, fine, wide, switch, mixture, many), or "
                        "width x inner x experts x k x tokens, e.g. 128x128x8x2x4096 "
                        "(default: %(default)s); fairseq: k is at most 2")
    p.add_argument("--emulate", metavar="NxP",
                   help="nodes x ranks per node of an emulated cluster, e.g. 2x2")
    add_links(p)
    p.add_argument("--ranks", type=int, default=2,
                   help="processes on this machine, without --emulate (default: %(default)s)")
    p.add_argument("--steps", type=int, default=15,
                   help="timed steps of each model (default: %(default)s)")
    p.add_argument("--warm-up", type=int, default=4,
                   help="steps before; tuners that have not chosen get more (default: %(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE",
                   help="JSON file to add the results to; those of the same host, place and shape "
                        "are replaced, and pages of its name (.md) are written next to it")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. On ranks of a launcher only rank 0 prints and writes."""
    from moe_plugin.lab.bench.report import write_json
    from moe_plugin.lab.bench.train.results import merged, read, sides_table, summary_table
    from moe_plugin.lab.bench.train.write import write_pages
    from moe_plugin.regular_files import check_output

    for name in ("steps", "warm_up", "ranks"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be >= 1; "
                             "e.g. 4")
    found: list[TrainReport] = []
    for path in (args.out, args.out.with_suffix(".md")) if args.out else ():
        check_output(path)
    kept = read(args.out) if args.out else []
    for report in _measured(args):
        found.append(report)
        sys.stdout.write(f"{report.shape.name}: {report.shape.label()}; {report.place}\n\n"
                         f"{sides_table(report)}\n\n")
        if args.out:
            every = merged(kept, found)
            write_json(args.out, [one.as_dict() for one in every])
            write_pages(args.out.with_suffix(".md"), every)
    if found:
        sys.stdout.write(summary_table(found) + "\n")
    return 0


def _measured(args: argparse.Namespace) -> Iterator[TrainReport]:
    from moe_plugin.lab.bench.train import run as runs
    from moe_plugin.lab.bench.train.shapes import for_host, parse_shapes
    from moe_plugin.lab.emulate import EmulatedCluster
    from moe_plugin.planner.units import parse_grid

    grid = parse_grid(args.emulate) if args.emulate else None
    shapes = for_host(parse_shapes(args.shapes), args.host)
    if "RANK" not in os.environ:
        for shape in shapes:  # before any process or node is started
            shape.sentences(grid[0] * grid[1] if grid else args.ranks)
    with ExitStack() as stack:
        text = runs.write_text(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        cluster = grid and stack.enter_context(EmulatedCluster(*grid, **links_of(args)))
        for shape in shapes:
            log.info("%s: %s", shape.name, shape.label())
            plan = runs.TrainPlan(args.host, shape, text, args.steps, args.warm_up,
                                  several_nodes=grid is not None and grid[0] > 1)
            if cluster is not None:
                yield runs.on_emulated(plan, cluster)
            elif "RANK" in os.environ:
                report = runs.on_own_ranks(plan)
                if report is not None:
                    yield report
            else:
                yield runs.on_this_machine(plan, args.ranks)
