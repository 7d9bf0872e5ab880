"""Forward and backward of one MoE layer and of every peer that is installed, with the same weights
and input; outputs are checked to agree. The bound is the time of the experts' matmuls alone, in the
same run.
"""

from __future__ import annotations

import argparse
from typing import Any

from moe_plugin.lab.bench import layer, plots, report
from moe_plugin.lab.bench.layer import LayerReport
from moe_plugin.lab.bench.options import add_problem, problem_of
from moe_plugin.lab.bench.peers import peers


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_problem(p)
    p.add_argument("--peers", default="all",
                   help="all, none, or names with commas: einsum, grouped_mm, megatron, "
                        "megatron_grouped, megatron_te, deepspeed, megablocks, scattermoe, "
                        "sonicmoe, dense (default: all)")
    p.add_argument("--plot", metavar="FILE",
                   help="also draw time and memory of each candidate into FILE (.png or .svg)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One problem."""
    problem = problem_of(args)
    if args.plot:
        report.check_figure(args.plot)
    names = {"all": peers.names(), "none": []}.get(args.peers, args.peers.split(","))
    found = layer.run(problem, names, args.rounds)
    if args.plot:
        plots.layer_plot(found, args.plot)
    return found.as_dict()


def show(found: dict[str, Any]) -> str:
    """Its table."""
    return report.layer_table(LayerReport.from_dict(found))


def page(found: dict[str, Any]) -> str:
    """The table, with what it was measured with."""
    return report.page("One layer and its peers", "moe-plugin bench layer", found["versions"],
                       show(found))
