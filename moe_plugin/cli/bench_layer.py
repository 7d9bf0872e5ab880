"""`moe-plugin bench layer`: our layer and its peers."""

from __future__ import annotations

import argparse
import json
import sys

from moe_plugin.cli.options import add_problem, problem_of


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Forward and backward of one MoE layer and of every peer that is installed, "
                     "with the same weights and input; outputs are checked to agree. The bound is "
                     "the time of the experts' matmuls alone, in the same run.")
    add_problem(p)
    p.add_argument("--peers", default="all",
                   help="all, none, or names with commas: einsum, grouped_mm, megatron, "
                        "megatron_grouped, megatron_te, deepspeed, megablocks, scattermoe, "
                        "sonicmoe, dense (default: all)")
    p.add_argument("--plot", metavar="FILE",
                   help="also draw time and memory of each candidate into FILE (.png or .svg)")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from moe_plugin.lab.bench import layer, plots, report
    from moe_plugin.lab.bench.peers import peers

    problem = problem_of(args)
    if args.plot:
        report.check_figure(args.plot)
    names = {"all": peers.names(), "none": []}.get(args.peers, args.peers.split(","))
    found = layer.run(problem, names, args.rounds)
    text = json.dumps(found.as_dict(), indent=1) if args.json else report.layer_table(found)
    sys.stdout.write(text + "\n")
    if args.plot:
        plots.layer_plot(found, args.plot)
    return 0
