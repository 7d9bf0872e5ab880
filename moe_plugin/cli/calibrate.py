"""`moe-plugin calibrate`: measure this cluster's exchanges and fit its links into a YAML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_plugin.lab.bench.options import add_exchange_sizes
from moe_plugin.regular_files import check_output, write_regular

NAMES = "linear,2dh,leader"
SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Measures linear, 2dh and leader all-to-all by size and fits the cost per "
                     "message and per byte of the links, by which `auto` (comm.cluster) and "
                     "`moe-plugin simulate` predict. On your own ranks: start it with torchrun on "
                     "each node. Emulated: give several small grids.")
    add_exchange_sizes(p, SIZES)
    p.add_argument("--nics", type=int, default=1,
                   help="network cards per node (default: %(default)s)")
    p.add_argument("--name", default="cluster",
                   help="the cluster's name in the file (default: %(default)s)")
    p.add_argument("--out", type=Path, default=Path("cluster.yaml"), metavar="FILE",
                   help="file to write (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write, and say how well the fit describes what was measured."""
    from moe_plugin.lab.bench.all_to_all import Plan, measurements_of
    from moe_plugin.lab.bench.studies.all_to_all import NAMES, measure_rows
    from moe_plugin.lab.planning.fit import fit
    from moe_plugin.planner import Cluster, dump_cluster
    from moe_plugin.planner.units import parse_size

    check_output(args.out)
    rows, about = measure_rows(
        args,
        Plan(tuple(NAMES.split(",")), tuple(map(parse_size, args.sizes.split(","))), args.repeats))
    if not rows:
        return 0  # a rank other than 0
    last = rows[-1]
    shape = Cluster(name=args.name, nodes=last.nodes, ranks_per_node=last.ranks_per_node,
                    nics=args.nics)
    result = fit(measurements_of(rows), shape, emulated=bool(args.emulate))
    grids = ", ".join(dict.fromkeys(f"{row.nodes}x{row.ranks_per_node}" for row in rows))
    comment = (
        f"Fitted by `moe-plugin calibrate` to {len(rows)} exchanges on {grids} ranks "
        f"({', '.join(f'{k} {v}' for k, v in about.items())}).\n"
        f"Relative error of the fit: mean {result.mean_error:.1%}, largest {result.max_error:.1%}.")
    write_regular(args.out, dump_cluster(result.cluster, comment))
    print(f"{args.out}: {comment}")
    return 0
