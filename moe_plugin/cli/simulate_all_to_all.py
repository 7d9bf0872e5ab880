"""`moe-plugin simulate all-to-all`: predicted time of each algorithm for 2 to 4096 ranks."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

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
        plot(rows, args.plot)
    return 0


def tables(rows: list[dict[str, Any]]) -> str:
    """A markdown table for each size."""
    from moe_plugin.lab.bench.report import table
    from moe_plugin.planner.units import show_size, show_time

    parts = []
    for size in dict.fromkeys(row["bytes"] for row in rows):
        mine = [row for row in rows if row["bytes"] == size]
        names = list(dict.fromkeys(row["algorithm"] for row in mine))
        lines = []
        for ranks in dict.fromkeys(row["ranks"] for row in mine):
            times = {row["algorithm"]: row["ms"] for row in mine if row["ranks"] == ranks}
            ratio = times["linear"] / times["2dh"] if times["2dh"] else 1.0
            lines.append([str(ranks), *[show_time(times[name] / 1e3) for name in names],
                          f"{ratio:.2f}", min(times, key=times.get)])
        head = ["ranks", *names, "linear / 2dh", "best"]
        parts.append(f"{show_size(size)} per rank, predicted time:\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Time by ranks, one panel for each size."""
    from moe_plugin.lab.bench.plots import log_scale, log_ticks
    from moe_plugin.lab.bench.report import pyplot, save_figure
    from moe_plugin.planner.units import show_size

    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    figure, axes = pyplot().subplots(1, len(sizes), figsize=(3.6 * len(sizes), 3.6),
                                     squeeze=False, layout="constrained")
    for axis, size in zip(axes[0], sizes, strict=True):
        for name in dict.fromkeys(row["algorithm"] for row in rows):
            line = [row for row in rows if row["bytes"] == size and row["algorithm"] == name]
            axis.plot([r["ranks"] for r in line], [r["ms"] for r in line], marker=".", label=name)
        axis.set(xlabel="ranks", title=f"{show_size(size)} per rank")
        ranks = sorted({row["ranks"] for row in rows})
        log_ticks(axis, "x", ranks[:: max(1, len(ranks) // 4)])
        log_scale(axis, "y")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("predicted ms")
    axes[0][0].legend()
    save_figure(figure, path)
