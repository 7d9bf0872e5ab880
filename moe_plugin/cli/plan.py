"""`moe-plugin plan`: TP, EP, ETP, DP, PP, r, d and all-to-all for a model on a cluster, and why; or
what a model larger than its device keeps where; or the schedule of its pipeline stages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from moe_plugin.cli import plan_memory, plan_pipeline
from moe_plugin.lab.planning.launch import HOSTS
from moe_plugin.messages import short
from moe_plugin.regular_files import make_folder, write_regular

COLORS = {"experts": "tab:orange", "a2a_out": "tab:blue", "a2a_back": "tab:cyan"}


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.description = ("Searches all plans by a cost model (roofline, alpha-beta links, event "
                     "timelines with overlap, memory) and explains the fastest.")
    p.add_argument("--model", type=Path, default=None, metavar="FILE",
                   help="model file (see configs/plans/)")
    p.add_argument("--cluster", type=Path, default=None, metavar="FILE",
                   help="cluster file (`moe-plugin calibrate` makes one; see configs/clusters/)")
    p.add_argument("--device", type=Path, default=None, metavar="FILE",
                   help="device file (`moe-plugin profile-device` makes one; see configs/devices/)")
    p.add_argument("--nodes", type=int, default=None, metavar="N",
                   help="number of nodes (default: the cluster file's)")
    p.add_argument("--ranks-per-node", type=int, default=None, metavar="N",
                   help="ranks per node (default: the cluster file's)")
    p.add_argument("--host", choices=HOSTS, default="megatron",
                   help="host to plan and write for; fairseq: data and expert parallelism alone")
    p.add_argument("--top", type=int, default=8, metavar="N",
                   help="plans shown (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    p.add_argument(
        "--plot", type=Path, default=None, metavar="FILE",
        help="write the plans' times by part, and an MoE layer's timeline, as PNG or SVG")
    p.add_argument("--write", type=Path, default=None, metavar="DIR",
                   help="write the best plan's launch line and YAML for the host")
    p.add_argument("--data", default=None, metavar="PATH",
                   help="with --write: data of the launch line, a folder (fairseq) or a prefix "
                        "(Megatron)")
    p.add_argument("--script", default=None, metavar="FILE",
                   help="with --write: Megatron-LM's pretrain_gpt.py, for the launch line; "
                        "default: our own training script")
    p.add_argument(
        "--auto", action="store_true",
        help="with --write: let the layers move on from the planned layout while training runs")
    p.add_argument(
        "--scale", default=None, metavar="LIST",
        help="instead: one MoE layer on these numbers of nodes (e.g. 1,2,4), against a static layer"
    )
    p.add_argument("--experts-per-rank", type=float, default=1.0, metavar="X",
                   help="with --scale: experts grow with the ranks (default: %(default)s)")
    plan_memory.add_arguments(p)
    plan_pipeline.add_arguments(p)


def run(args: argparse.Namespace) -> int:
    """Search, show, write."""
    if args.pipeline is not None:
        return plan_pipeline.run(args)
    if args.memory is not None or args.profile is not None:
        return plan_memory.run(args)
    missing = [name for name in ("model", "cluster", "device") if getattr(args, name) is None]
    if missing:
        raise ValueError(f"--{missing[0]} FILE is missing; a plan of parallel sizes needs --model, "
                         "--cluster and --device, one of a device's memory --memory and --profile")
    import moe_plugin.comm.algorithms  # costs of all that are registered  # noqa: F401
    from moe_plugin.lab.planning.explain import breakdown, explain
    from moe_plugin.lab.planning.model import load_model
    from moe_plugin.lab.planning.model_search import Space, search
    from moe_plugin.planner.cluster import load_cluster
    from moe_plugin.planner.device import load_device

    for name in ("data", "script", "auto"):
        if getattr(args, name) and not args.write:
            raise ValueError(f"--{name} says what --write DIR writes: give that, too, or leave "
                             f"--{name} out")
    if args.plot:
        from moe_plugin.lab.bench.report import check_figure

        check_figure(args.plot)
    for name, value in (("top", args.top), ("nodes", args.nodes),
                        ("ranks-per-node", args.ranks_per_node)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {short(value)} must be >= 1; leave it out for the default")
    if not 0 < args.experts_per_rank <= 1e6:
        raise ValueError(f"--experts-per-rank {args.experts_per_rank} must be a number > 0; use 1")
    model, device = load_model(args.model).in_host(args.host), load_device(args.device)
    cluster = load_cluster(args.cluster)
    cluster = cluster.resized(args.nodes or cluster.nodes, args.ranks_per_node)
    if args.scale:
        return _scale(args, model, cluster, device)
    space = Space(data_parallel_only=args.host == "fairseq")
    found = search(model, cluster, device, space, keep=args.top)
    if args.json:
        print(json.dumps({
            "plans": [breakdown(c) for c in found.plans], "tried": found.tried,
            "skipped": found.skipped, "too_big": found.too_big
        }, indent=1))
    else:
        print(explain(model, cluster, device, found, space))
    if args.plot:
        _plot(args.plot, found.plans)
    if args.write:
        _write(args, model, found.plans[0], cluster)
    return 0


def _scale(args: argparse.Namespace, model: Any, cluster: Any, device: Any) -> int:
    from dataclasses import asdict

    from moe_plugin.lab.planning.static_layer import scale_table, scale_text
    from moe_plugin.planner.units import parse_counts

    nodes = parse_counts("--scale", args.scale, "1,2,4")
    micro = max(1, model.global_batch // cluster.ranks)
    rows = scale_table(model.layer(micro * model.sequence), cluster, device, nodes,
                       args.experts_per_rank)
    if args.json:
        print(json.dumps([{**asdict(r), "speedup": r.speedup} for r in rows], indent=1))
    else:
        print(scale_text(rows))
    return 0


def _write(args: argparse.Namespace, model: Any, best: Any, cluster: Any) -> None:
    from moe_plugin.lab.planning.launch import (
        CONFIG,
        LINE,
        LaunchCommand,
        launch_script,
        launch_text,
        launch_words,
        plan_yaml,
    )
    from moe_plugin.planner.units import show_time

    note = (f"Written by `moe-plugin plan`: {best.plan.label}, predicted "
            f"{show_time(best.seconds)} per step.")
    start = LaunchCommand(nodes=cluster.nodes, ranks_per_node=cluster.ranks_per_node,
                          data=args.data or LaunchCommand.data, config=args.write / CONFIG,
                          script=args.script)
    text = launch_text(launch_words(model, best.plan, args.host, start))
    make_folder(args.write)
    write_regular(args.write / CONFIG, plan_yaml(model, best.plan, args.host, args.auto, note))
    write_regular(args.write / LINE, launch_script(text, note))
    if not args.json:
        print(f"wrote {args.write / CONFIG}\nwrote {args.write / LINE}, which trains it:\n{text}")


def _plot(path: Path, plans: list[Any]) -> None:
    """Stacked bars of the plans' times, and the best plan's MoE layer as a timeline."""
    from moe_plugin.lab.bench.report import pyplot, save_figure

    plt = pyplot()
    figure, (bars, lanes) = plt.subplots(
        2, 1, figsize=(11, 3 + 0.35 * len(plans)), height_ratios=[max(2, len(plans)), 3],
        layout="constrained")
    left = [0.0] * len(plans)
    names = [cost.plan.label for cost in plans]
    for part in plans[0].time:
        values = [1e3 * cost.time[part] for cost in plans]
        bars.barh(names, values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    bars.invert_yaxis()
    bars.set_xlabel("ms per step")
    figure.legend(*bars.get_legend_handles_labels(), fontsize=7, ncols=8,
                  loc="outside upper center")
    start = 0.0
    for timeline in (plans[0].layer.forward, plans[0].layer.backward):
        for span in timeline.spans:
            lane = "network" if span.task.resource == "network" else "compute"
            lanes.barh([lane], [1e3 * span.task.seconds], left=[1e3 * (start + span.start)],
                       edgecolor="white", color=COLORS.get(span.task.phase, "tab:gray"))
        start += timeline.seconds
    lanes.set_xlabel(
        "ms of one MoE layer, forward and backward (orange: experts, blue: out, cyan: back)")
    save_figure(figure, path)
