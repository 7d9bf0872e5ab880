"""`moe-plugin watch`: a running job in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    p = subparsers.add_parser(
        "watch", help="show a running job in the terminal", description=
        "Loss, speed and the balance of every layer, made anew as the run's files grow. Ctrl-C "
        "ends it; the job does not notice."
    )
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    p.add_argument("--once", action="store_true", help="show the present state and end")
    p.add_argument("--interval", type=float, default=2.0, metavar="S",
                   help="seconds between two looks at the files (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Show it."""
    from moe_plugin.observe.watch import Watch

    if not args.run_dir.is_dir():
        raise ValueError(f"{args.run_dir} is no directory; give the folder of a run")
    watch = Watch(args.run_dir, args.interval)
    if args.once:
        watch.once()
    else:
        watch.forever()
    return 0
