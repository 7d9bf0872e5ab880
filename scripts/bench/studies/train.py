"""Compare the times of whole training steps. The study compares models with our layer, models with
the framework's own MoE layer, and models with dense layers of equal active width. All models have
the same weights and data, and run on the same ranks in the same processes. The models alternate
after every training step. With --evaluate, the study compares forward passes of an evaluation
instead of training steps. In evaluations, our layer is measured with and without dividing its rows
or experts into pieces, depending on the load. The command starts its own ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import add_links, links_of, pyplot, refuse_links, save_figure
from moe_plugin.planner.cluster import dump_cluster, load_cluster
from moe_plugin.planner.units import parse_grid
from scripts.bench.plots import OTHERS, OURS
from scripts.bench.study import Option
from scripts.bench.train import results, sides
from scripts.bench.train import run as runs
from scripts.emulate import EmulatedCluster

FITTED_BIT_S = 200e6  # rate of the links that configs/clusters/emulated.yaml describes
TITLE, MADE_BY = "Whole training steps", results.MADE_BY
POINTS = 20  # number of means that one line shows
SHAPE = "few"  # eight experts, two experts per token
NATIVE = {"megatron": "Megatron-core's own layer",
          "fairseq": "the layer of fairseq's moe branch, as rewritten here"}


OPTIONS = {
    "host": Option("megatron", "the framework to train in. The native layer of fairseq is that of "
                               "its moe branch, rewritten from the code of that branch",
                   choices=tuple(results.HOSTS), required=True),
    "shapes": Option("all", f"all, names separated by commas ({', '.join(sides.SHAPES)}), or width "
                            "x inner width x experts x k x tokens, such as 128x128x8x2x4096. With "
                            "fairseq, k is reduced to 2 and shapes with gated experts are left "
                            "out"),
    "evaluate": Option(False, "time forward passes of an evaluation instead of training steps, "
                              "with and without our pieces by load"),
    "emulate": Option("", "nodes x ranks per node of an emulated cluster, such as 2x2"),
    "steps": Option(15, "number of timed steps of each model", quick=2, least=1),
    "warm-up": Option(4, "number of untimed steps before the timed ones. A model whose tuners have "
                         "not chosen by then gets more steps", quick=1, least=1),
}


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_links(p)
    p.add_argument("--ranks", type=int, metavar="N",
                   help="number of processes on this machine, without --emulate (default: 2)")


def check(args: argparse.Namespace) -> None:
    if args.emulate and args.ranks is not None:
        raise ValueError(f"--emulate {args.emulate} and --ranks {args.ranks} both set the number "
                         "of ranks. Leave out --ranks")
    args.ranks = 2 if args.ranks is None else args.ranks
    if args.ranks < 1:
        raise ValueError(f"--ranks {args.ranks} must be >= 1. Use, for example, 4")
    if not args.emulate:
        refuse_links(args)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    grid = parse_grid(args.emulate) if args.emulate else None
    shapes = sides.for_host(sides.parse_shapes(args.shapes), args.host)
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
        found = (runs.on_emulated(plans, cluster) if cluster else
                 runs.on_this_machine(plans, args.ranks))
    return [one.as_dict() for one in found]


def hardware(rate_bit_s: float, folder: Path) -> sides.Settings:
    """Return the settings that describe the links and the processor. The layer uses these settings
    to choose the number of pieces.

    For an emulated cluster, the settings describe the fitted links with the bandwidth of the
    cluster.
    """
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


def draw(found: Sequence[dict[str, Any]], path: str) -> None:
    """Draw one panel for each host on one machine. A panel shows the timed steps of `SHAPE`, or of
    the first shape if `SHAPE` was not measured.
    """
    shown = []
    for (_, place), mine in results.by_place(results.reports(found)).items():
        if place.startswith("one machine"):
            shown.append(next((one for one in mine if one.shape.name == SHAPE), mine[0]))
    figure, axes = pyplot().subplots(1, max(1, len(shown)), figsize=(4.6 * max(1, len(shown)), 3),
                                     squeeze=False, layout="constrained")
    for axis, report in zip(axes[0], shown, strict=False):
        _panel(axis, report)
    axes[0][0].set_ylabel("loss, nats per byte")
    save_figure(figure, path)


def _panel(axis: Any, report: results.TrainReport) -> None:
    native, ours = report.best("native"), report.side(sides.OURS)
    for side, name, color in ((native, NATIVE[report.host], OTHERS), (ours, "moe-plugin", OURS)):
        seconds = list(accumulate(side.seconds))  # since the start of the first timed step
        means, lows, highs = zip(*smoothed(side.losses[-len(seconds):]), strict=True)
        axis.plot(seconds, means, color=color, label=name)
        axis.fill_between(seconds, lows, highs, color=color, alpha=0.2, linewidth=0)
    shape = report.shape
    axis.set_title(f"{results.HOSTS[report.host]}: {shape.experts} experts, k = {shape.top_k}",
                   loc="left", fontsize="medium")
    axis.set_xlabel(f"seconds of training, {report.ranks} ranks on CPU cores")
    axis.spines[["top", "right"]].set_visible(False)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.25 * (high - low))  # leaves space for the legend
    axis.legend(frameon=False, fontsize="small", loc="upper right")


def smoothed(losses: Sequence[float]) -> list[tuple[float, float, float]]:
    """For each step, return (mean, minimum, maximum) of the losses around the step. Near the ends
    of a curve, fewer steps are averaged.
    """
    reach = len(losses) // (2 * POINTS)
    windows = [losses[max(0, i - reach):i + reach + 1] for i in range(len(losses))]
    return [(sum(near) / len(near), min(near), max(near)) for near in windows]


PLOTS = {"train_curves.png": draw}
