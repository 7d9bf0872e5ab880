"""`moe-plugin simulate all-to-all`: predicted time of each algorithm for 2 to 4096 ranks."""

from __future__ import annotations

import argparse
import json
import sys

RANKS = "2,4,8,16,32,64,128,256,512,1024,2048,4096"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Predicts from a cluster file (`moe-plugin calibrate`, or configs/clusters) "
                     "how long each all-to-all takes, and which is best.")
    p.add_argument("--cluster", required=True, metavar="FILE", help="cluster file")
    p.add_argument(
        "--ranks", default=RANKS, metavar="LIST",
        help="numbers of ranks; the file says how many each node has (default: %(default)s)")
    p.add_argument("--sizes", default="64KiB,1MiB,32MiB,256MiB", metavar="LIST",
                   help="bytes per rank (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    p.add_argument("--plot", metavar="FILE",
                   help="also draw time by ranks into FILE (.png or .svg)")


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    import moe_plugin.comm.algorithms  # costs of all that are registered  # noqa: F401
    from moe_plugin.lab.bench.all_to_all_report import plot_model, tables
    from moe_plugin.planner import load_cluster, predict_table
    from moe_plugin.planner.units import parse_counts, parse_size

    ranks = parse_counts("--ranks", args.ranks, "16,256,4096")
    rows = predict_table(load_cluster(args.cluster), ranks,
                         [parse_size(word) for word in args.sizes.split(",")])
    if args.json:
        json.dump({"cluster": args.cluster, "rows": rows}, sys.stdout, indent=2)
        print()
    else:
        print(tables(rows))
    if args.plot:
        plot_model(rows, args.plot)
    return 0
