"""`moe-plugin report`: one run, or several side by side, as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Reads what a run of either host wrote (layer statistics, training log; found "
                     "by content) and writes one HTML page that needs no network. Several runs "
                     "are compared: the same curves in one plot, and the settings that differ.")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR", nargs="+",
                   help="the run's folder; several: runs to compare")
    p.add_argument("--output", type=Path, default=None, metavar="FILE",
                   help="file to write (default: report.html in RUN_DIR; comparison.html in the "
                   "first of several)")


def run(args: argparse.Namespace) -> int:
    """Write the page; print where it is and what in the files could not be read."""
    from moe_plugin.observe.history import read_run
    from moe_plugin.observe.report.page import write_comparison, write_report

    folders = args.run_dir
    runs = [read_run(folder) for folder in folders]
    for run_ in runs:
        for note in run_.notes:
            print(f"note: {note}" if len(runs) == 1 else f"note: {run_.name}: {note}")
    if len(runs) == 1:
        print(write_report(runs[0], args.output or folders[0] / "report.html"))
    else:
        print(write_comparison(runs, args.output or folders[0] / "comparison.html"))
    return 0
