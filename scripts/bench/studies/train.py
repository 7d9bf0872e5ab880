"""Compare the times of whole training steps. The study compares models with our layer, models with
the framework's own MoE layer, and models with dense layers of equal active width. All models have
the same weights and data, and run on the same ranks in the same processes. The models alternate
after every training step. With --evaluate, the study compares forward passes of an evaluation
instead of training steps. In evaluations, our layer is measured with and without dividing its rows
or experts into pieces, depending on the load. The command starts its own ranks, or uses the ranks
that torchrun started.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import add_links, links_of, refuse_links
from moe_plugin.planner.cluster import dump_cluster, load_cluster
from moe_plugin.planner.units import parse_grid
from scripts.bench.train import curves, results, sides
from scripts.bench.train import run as runs
from scripts.emulate import EmulatedCluster

FITTED_BIT_S = 200e6  # rate of the links that configs/clusters/emulated.yaml describes
TITLE, MADE_BY = "Whole training steps", results.MADE_BY
PLOTS = {curves.FILE: curves.draw}


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--host", required=True, choices=("megatron", "fairseq"),
                   help="the framework to train in. The native layer of fairseq is that of its moe "
                        "branch, rewritten from the code of that branch")
    p.add_argument("--shapes", default="all", metavar="LIST",
                   help=f"all, names separated by commas ({', '.join(sides.SHAPES)}), or width x "
                        "inner width x experts x k x tokens, such as 128x128x8x2x4096 (default: "
                        "%(default)s). With fairseq, k is reduced to 2 and shapes with gated "
                        "experts are left out")
    p.add_argument("--evaluate", action="store_true",
                   help="time forward passes of an evaluation instead of training steps, with and "
                        "without our pieces by load")
    p.add_argument("--emulate", metavar="NxP",
                   help="nodes x ranks per node of an emulated cluster, such as 2x2")
    add_links(p)
    p.add_argument("--ranks", type=int, metavar="N",
                   help="number of processes on this machine, without --emulate (default: 2)")
    p.add_argument("--steps", type=int, default=15,
                   help="number of timed steps of each model (default: %(default)s)")
    p.add_argument("--warm-up", type=int, default=4,
                   help="number of untimed steps before the timed ones. A model whose tuners have "
                        "not chosen by then gets more steps (default: %(default)s)")


def check(args: argparse.Namespace) -> None:
    if args.quick:
        args.steps, args.warm_up = 2, 1
    if args.emulate and args.ranks is not None:
        raise ValueError(f"--emulate {args.emulate} and --ranks {args.ranks} both set the number "
                         "of ranks. Leave out --ranks")
    args.ranks = 2 if args.ranks is None else args.ranks
    for name in ("steps", "warm_up", "ranks"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be >= 1. Use, "
                             "for example, 4")
    if not args.emulate:
        refuse_links(args)


def measure(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Return one report for each shape (on ranks of a launcher, only on rank 0)."""
    grid = parse_grid(args.emulate) if args.emulate else None
    shapes = sides.for_host(sides.parse_shapes(args.shapes), args.host)
    if "RANK" not in os.environ:
        for shape in shapes:  # raises an error before any process or node is started
            shape.sentences(grid[0] * grid[1] if grid else args.ranks)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        text = sides.write_text(folder)
        cluster = grid and stack.enter_context(EmulatedCluster(*grid, **links_of(args)))
        known = hardware(cluster.rate_bit_s, folder) if cluster else {}
        ours = sides.evaluated_settings(known) if args.evaluate else sides.our_settings(
            several_nodes=grid is not None and grid[0] > 1)
        plans = [runs.TrainPlan(args.host, shape, text, args.steps, args.warm_up, ours,
                                evaluate=args.evaluate) for shape in shapes]
        if cluster:
            found = runs.on_emulated(plans, cluster)
        elif "RANK" in os.environ:
            found = runs.on_own_ranks(plans)
        else:
            found = runs.on_this_machine(plans, args.ranks)
    return [one.as_dict() for one in found] or None


def hardware(rate_bit_s: float, folder: Path) -> sides.Settings:
    """Return settings for the processor and the links, by which the layer chooses pieces."""
    fitted = load_cluster("configs/clusters/emulated.yaml")
    link = replace(fitted.inter, beta_s=fitted.inter.beta_s * FITTED_BIT_S / rate_bit_s)
    path = folder / "cluster.yaml"
    path.write_text(dump_cluster(replace(fitted, inter=link)), encoding="utf-8")
    return {"comm.cluster": str(path), "tuner.device": "configs/devices/cpu_core.yaml"}


def merge(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace earlier reports for the same host, place and shape."""
    return [one.as_dict() for one in results.merged(results.reports(old), results.reports(new))]


def body(found: list[dict[str, Any]]) -> list[str]:
    return results.main_parts(results.reports(found))


def pages(found: list[dict[str, Any]]) -> dict[str, str]:
    return results.side_pages(results.reports(found))
