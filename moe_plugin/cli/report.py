"""`moe-plugin report`: a run's report as one HTML page."""

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


def run(args: argparse.Namespace) -> int:
    """Write the page; print where it is and what in the files could not be read."""
    from moe_plugin.observe.history import read_run
    from moe_plugin.observe.report import write_report

    found = read_run(args.run_dir)
    for note in found.notes:
        print(f"note: {note}")
    print(write_report(found, args.output or args.run_dir / "report.html"))
    return 0
