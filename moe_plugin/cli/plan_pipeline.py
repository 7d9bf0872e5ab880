"""`moe-plugin plan --pipeline`: what each pipeline schedule takes, and the timeline of the best."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moe_plugin.regular_files import check_output, write_regular

# of the command's other uses
OTHERS = ("model", "cluster", "device", "scale", "write", "plot", "memory", "profile")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the option."""
    group = p.add_argument_group("pipeline schedules, in place of parallel sizes")
    group.add_argument("--pipeline", type=Path, default=None, metavar="FILE",
                       help="times and sizes of a model's pipeline stages (see docs/pipeline.md): "
                            "compare schedules, choose one; with --trace: its timeline for "
                            "Perfetto or chrome://tracing")


def run(args: argparse.Namespace) -> int:
    """Predict, show, write."""
    from moe_plugin.lab.planning.pipeline import as_dict, explain, trace
    from moe_plugin.planner.pipeline.choice import choose, load_profile

    given = [name for name in OTHERS if getattr(args, name) is not None]
    if given:
        raise ValueError(f"--{given[0]} is of another use of plan than --pipeline; leave one of "
                         "them out")
    if args.trace:
        check_output(args.trace)
    profile = load_profile(args.pipeline)
    print(json.dumps(as_dict(profile), indent=1) if args.json else explain(profile))
    if args.trace:
        write_regular(args.trace, json.dumps(trace(choose(profile).timeline)))
    return 0
