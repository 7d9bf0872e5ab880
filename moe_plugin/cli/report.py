"""`moe-plugin report`: a run's report as one HTML page, and its plots as PNG files."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Reads what a run of either host wrote (layer statistics, training log; found "
                     "by content) and writes one HTML page that needs no network.")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    p.add_argument("--output", type=Path, default=None, metavar="FILE",
                   help="file to write (default: RUN_DIR/report.html)")
    p.add_argument("--png", type=Path, default=None, metavar="DIR",
                   help="also write each plot as a PNG file to this folder (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Write it and say where it is, and what of the files could not be read."""
    from moe_plugin.observe.history import read_run
    from moe_plugin.observe.report import write_png, write_report

    found = read_run(args.run_dir)
    for note in found.notes:
        print(f"note: {note}")
    print(write_report(found, args.output or args.run_dir / "report.html"))
    if args.png is not None:
        print(f"{len(write_png(found, args.png))} PNG files in {args.png}")
    return 0
