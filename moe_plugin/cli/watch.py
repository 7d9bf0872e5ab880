"""`moe-plugin watch`: a running job in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Loss, throughput and the balance of every layer, updated as the run's files "
                     "grow. Ends when the run has finished, or with Ctrl-C; the job is not "
                     "affected.")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    p.add_argument("--once", action="store_true", help="show the present state and exit")
    p.add_argument("--interval", type=float, default=2.0, metavar="S",
                   help="seconds between two looks at the files (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Show the run."""
    try:
        from moe_plugin.observe.watch import Watch
    except ModuleNotFoundError as error:
        raise ValueError("it needs rich, which is not installed; pip install "
                         "'moe-plugin[observe]'") from error
    if not args.run_dir.is_dir():
        raise ValueError(f"{args.run_dir} is not a directory; give the folder of a run")
    watch = Watch(args.run_dir, args.interval)
    if args.once:
        watch.once()
    else:
        watch.follow()
    return 0
