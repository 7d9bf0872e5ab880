"""`moe-plugin schedule`: the fastest schedule of a collective on a network, and the proof."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_output, write_regular

PRINTED = Path("-")  # `--json` without a file


def schedule_options(p: argparse.ArgumentParser) -> None:
    """`moe-plugin schedule`."""
    from moe_plugin.planner.forest.presets import PRESETS
    from moe_plugin.planner.forest.schedule import COLLECTIVES

    p.description = ("Computes trees over which a collective has the highest throughput that any "
                     "schedule can have (ForestColl), shows the cut of the network that proves it, "
                     "and compares with rings, binary trees and recursive doubling.")
    p.add_argument("--topology", required=True, metavar="FILE|PRESET",
                   help="network file (see configs/networks/), cluster file (`moe-plugin "
                        "calibrate` makes one), output of `nvidia-smi topo -m`, or a preset: "
                        + ", ".join(preset.example for preset in PRESETS.values())
                        + "; @25 behind a graph's name: links of 25 GB/s")
    p.add_argument("--nodes", type=int, default=None, metavar="N",
                   help="number of machines, of a cluster file or of nvidia-smi's output "
                        "(default: the cluster file's; 1)")
    p.add_argument("--collective", choices=COLLECTIVES, default="all_gather",
                   help="default: %(default)s")
    p.add_argument("--trees", type=int, default=None, metavar="K",
                   help="trees per rank (default: as many as the optimum needs)")
    p.add_argument("--overlap", action="store_true",
                   help="of all_reduce: both halves at the same time, on shared wires, with the "
                        "roots where the network wants them")
    p.add_argument("--size", default="1GiB",
                   help="bytes of the whole result (default: %(default)s)")
    p.add_argument("--chunks", type=int, default=64, metavar="N",
                   help="chunks of each tree's data in the simulation, fewer where it would take "
                        "long (default: %(default)s)")
    p.add_argument("--json", type=Path, nargs="?", const=PRINTED, default=None, metavar="FILE",
                   help="the schedule, with exact fractions, into FILE, or printed instead of text")
    p.add_argument("--msccl", type=Path, default=None, metavar="FILE",
                   help="write the schedule for the MSCCL runtime (NCCL's fork, RCCL), as XML")
    p.add_argument("--svg", type=Path, default=None, metavar="FILE",
                   help="draw the network, its cut and the trees")
    p.add_argument("--html", type=Path, default=None, metavar="FILE",
                   help="write all of it as a page that needs no network")


def schedule(args: argparse.Namespace) -> int:
    """Plan, compare, show, write."""
    from moe_plugin.cli.planning.forest import Report, compare, text
    from moe_plugin.cli.planning.pictures import drawing, page
    from moe_plugin.planner.forest import plan
    from moe_plugin.planner.forest.msccl import to_msccl
    from moe_plugin.planner.forest.simulate import program_of
    from moe_plugin.planner.forest.source import find_network
    from moe_plugin.planner.units import parse_size

    printed = args.json == PRINTED
    for path in (args.json, args.msccl, args.svg, args.html):
        if path and path != PRINTED:
            check_output(path)
    size = parse_size(args.size)
    if size < 1 or args.chunks < 1:
        raise ValueError(f"--size {short(args.size)} and --chunks {short(args.chunks)} must be at "
                         "least 1; leave them out for the defaults")
    network, note = find_network(args.topology, args.nodes)
    begin = time.perf_counter()
    found = plan(network, args.collective, args.trees, overlap=args.overlap)
    planned_s = time.perf_counter() - begin
    # what refuses a schedule goes before what takes long
    made = [(path, make()) for path, make in (
        (args.json, found.to_json), (args.msccl, lambda: to_msccl(program_of(found))),
        (args.svg, lambda: drawing(found))) if path]
    report = Report(found, size, compare(found, size, args.chunks), planned_s, note)
    print(found.to_json() if printed else text(report))
    if args.html:
        made.append((args.html, page(report)))
    for path, content in made:
        if path != PRINTED:
            print(f"wrote {write_regular(path, content)}",
                  file=sys.stderr if printed else sys.stdout)
    return 0
