"""`moe-plugin plan`, which plans how to train a model on a cluster and explains the plan.

The command chooses the tensor, expert, data and pipeline parallel sizes, the layout of the experts
and the all-to-all algorithm. Other modes plan the memory of one device, the number of pieces into
which the rows of prompts are divided (EPS-MoE), or the schedule of pipeline stages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moe_plugin.cli.planning.launch import CONFIG, HOSTS, LINE, LaunchCommand
from moe_plugin.cli.schedule import OF_SIZES, given_options, plan_memory
from moe_plugin.planner.fine_tuned import FORMATS, STORES
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_output, make_folder, write_regular

NETWORK = "ib400"  # default of --network
COLORS = {"experts": "tab:orange", "a2a_out": "tab:blue", "a2a_back": "tab:cyan"}


def host_options(p: argparse.ArgumentParser, data: str | None, top: int, with_: str = "") -> None:
    """Add the options that select the host and control how a plan is printed and written.

    Args:
        with_: text placed before the help of the options that write files.
    """
    p.add_argument("--host", choices=HOSTS, default="megatron",
                   help="host framework of the plan (default: %(default)s); fairseq supports only "
                        "data and expert parallelism")
    p.add_argument("--data", default=data, metavar="PATH",
                   help=f"{with_}training data for the launch line: a folder (fairseq) or a prefix "
                        "(Megatron)")
    p.add_argument("--script", default=None, metavar="FILE",
                   help=f"{with_}path of Megatron-LM's pretrain_gpt.py for the launch line; "
                        "default: the training script of this package")
    p.add_argument("--auto", action="store_true",
                   help=f"{with_}allow the layers to change the planned layout during training")
    p.add_argument("--top", type=int, default=top, metavar="N",
                   help="number of plans to show (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def plan_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin plan`."""
    p.description = ("Searches all plans with a cost model (roofline, alpha-beta links, event "
                     "timelines with overlap, memory) and explains the fastest plan.")
    p.add_argument("--model", type=Path, default=None, metavar="PATH",
                   help="Hugging Face folder or config.json, Megatron launch script or file of "
                        "arguments, fairseq command or YAML file, or model file (see "
                        "configs/plans/)")
    p.add_argument("--gpus", type=int, default=None, metavar="N",
                   help="number of devices, instead of --cluster and --nodes")
    p.add_argument("--network", default=None, metavar="NAME",
                   help="with --gpus: links between nodes, e.g. ib400, roce200 or nvlink+ib400 "
                        f"(default: {NETWORK})")
    p.add_argument("--sequence", type=int, default=None, metavar="N",
                   help="tokens per sequence (default: as in the file of the model)")
    p.add_argument("--batch", type=int, default=None, metavar="N",
                   help="sequences per training step (default: as in the file of the model)")
    p.add_argument("--fine-tune", choices=FORMATS, default=None, metavar="FORMAT",
                   help="plan a model whose weights are frozen and whose experts have low-rank "
                        "adapters; number format of the experts' weights: " + ", ".join(FORMATS))
    p.add_argument("--lora-rank", type=int, default=None, metavar="R",
                   help="with --fine-tune: rank of the adapters (default: 8)")
    p.add_argument("--store", choices=STORES, default=None,
                   help="with --fine-tune: where the experts' weights are stored (default: device)")
    p.add_argument("--cluster", type=Path, default=None, metavar="FILE",
                   help="cluster file (written by `moe-plugin calibrate`, or see "
                        "configs/clusters/)")
    p.add_argument("--device", default=None, metavar="NAME",
                   help="a100, b200, h100, h200, mi300x, v100, or a device file (written by "
                        "`moe-plugin profile-device`, or see configs/devices/)")
    p.add_argument("--nodes", type=int, default=None, metavar="N",
                   help="number of nodes (default: as in the cluster file)")
    p.add_argument("--ranks-per-node", type=int, default=None, metavar="N",
                   help="ranks per node (default: as in the cluster file; with --gpus, at most 8)")
    host_options(p, None, 8, "with --write: ")
    p.set_defaults(host=None)  # the host of the model's file
    p.add_argument(
        "--plot", type=Path, default=None, metavar="FILE",
        help="plot the time of each component of the plans, and the timeline of an MoE layer (.png "
             "or .svg)")
    p.add_argument("--write", type=Path, default=None, metavar="DIR",
                   help="write the launch line and the YAML file of the best plan to this folder")
    p.add_argument(
        "--scale", default=None, metavar="LIST",
        help="instead of planning, compare one MoE layer with a static layer, on these numbers of "
             "nodes (e.g. 1,2,4)")
    p.add_argument("--experts-per-rank", type=float, default=1.0, metavar="X",
                   help="with --scale: number of experts per rank (default: %(default)s)")
    group = p.add_argument_group("memory of one device, instead of parallel sizes")
    group.add_argument("--memory", default=None, metavar="SIZE",
                       help="memory of the device, e.g. 8GiB. With --profile: choose which blocks "
                            "keep, recompute or swap their activations, and explain why. With "
                            "--model and --device: choose where experts are stored while text is "
                            "generated")
    group.add_argument("--profile", type=Path, default=None, metavar="FILE",
                       help="with --memory: measured times and sizes of the model's blocks "
                            "(see docs/activations.md)")
    group.add_argument("--weights-on", choices=("device", "host"), default="device",
                       help="where weights are stored; host: in host memory, from which segments "
                            "are streamed to the device (default: %(default)s)")
    group.add_argument("--accumulate", type=int, default=None, metavar="N",
                       help="with --weights-on host: micro-batches per step (default: the smallest "
                            "number that hides all copies)")
    group.add_argument("--link", default=None, metavar="SIZE",
                       help="with --memory and --model, or with --store: bytes per second from the "
                            "memory or disk that stores the experts to the device (default: 25GB, "
                            "PCIe 4; with --store disk 3GB)")
    group.add_argument("--tokens", type=int, default=None, metavar="N",
                       help="with --memory and --model: number of sequences for which each pass "
                            "generates a token (default: 1)")
    group.add_argument("--trace", type=Path, default=None, metavar="FILE",
                       help="with --memory: write the timeline for Perfetto or chrome://tracing")
    group = p.add_argument_group("pieces for each prompt length, instead of parallel sizes")
    group.add_argument("--prefill", default=None, metavar="LIST",
                       help="prompt lengths in tokens per rank (e.g. 256,4096): for each length, "
                            "choose the number of pieces and the kernel for the forward pass of an "
                            "MoE layer (EPS-MoE); needs --model, --cluster and --kernels")
    group.add_argument("--kernels", type=Path, default=None, metavar="FILE",
                       help="with --prefill: file written by `moe-plugin profile-device --kernels` "
                            "for the model's widths")
    group = p.add_argument_group("pipeline schedules, instead of parallel sizes")
    group.add_argument("--pipeline", type=Path, default=None, metavar="FILE",
                       help="times and sizes of a model's pipeline stages (see docs/pipeline.md): "
                            "compare schedules and choose one; with --trace: write its timeline "
                            "for Perfetto or chrome://tracing")


def plan(args: argparse.Namespace) -> int:
    """Search for plans, print the best plans, and write the best plan to files."""
    if args.plot:
        from moe_plugin.cli.figures import check_figure

        check_figure(args.plot)
    if args.trace:
        check_output(args.trace)
    experts = args.profile is None and None not in (args.memory, args.model, args.device)
    if not experts and (given := given_options(
            args, ("tokens",) if args.store in STORES[1:] else ("link", "tokens"))):
        raise ValueError(f"--{given[0]} needs --memory, --model and --device. Add these options, "
                         f"or leave --{given[0]} out")
    if args.pipeline is not None:
        _plan_pipeline(args)
    elif args.prefill is not None or args.kernels is not None:
        _plan_prefill(args)
    elif args.memory is not None or args.profile is not None:
        plan_memory(args)
    else:
        _plan_sizes(args)
    return 0


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raise `ValueError` if one of the given options has a value below 1."""
    for name in given_options(args, names):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {short(getattr(args, name))} must be >= "
                             "1. Leave it out for the default")


def _hardware(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the cluster and the device that the options name."""
    from moe_plugin.planner.cluster import cluster_of, device_of, load_cluster

    if args.gpus is None:
        if args.network is not None:
            raise ValueError(f"--network {short(args.network)} needs --gpus N. Add --gpus, or use "
                             "--cluster FILE")
        cluster = load_cluster(args.cluster)
        return (cluster.resized(args.nodes or cluster.nodes, args.ranks_per_node),
                device_of(args.device))
    if given := given_options(args, ("cluster", "nodes")):
        raise ValueError(f"--{given[0]} cannot be combined with --gpus. Use --gpus with --network "
                         "and --ranks-per-node, or --cluster with --nodes")
    device = device_of(args.device)  # before the cluster, whose links depend on the device
    return cluster_of(args.network or NETWORK, args.gpus, args.device,
                      args.ranks_per_node), device


def _fine_tuning(args: argparse.Namespace) -> Any:
    """Return how the model is fine-tuned, or None if all of its parameters are trained."""
    from moe_plugin.planner.fine_tuned import BF16, LINKS, FineTuning
    from moe_plugin.planner.units import parse_size

    if args.fine_tune is None:
        if given := given_options(args, ("lora_rank", "store")):
            raise ValueError(f"--{given[0].replace('_', '-')} needs --fine-tune FORMAT. Add it, or "
                             f"leave --{given[0].replace('_', '-')} out")
        return None
    store = args.store or "device"
    if args.fine_tune == BF16 and store != "device":
        raise ValueError(f"--store {store} needs experts that are stored as codes. Use --fine-tune "
                         "with a format of 4 or 8 bits, or --store device")
    check_counts(args, "lora_rank")
    return FineTuning(format=args.fine_tune, rank=args.lora_rank or 8, store=store,
                      link_bytes_s=LINKS[store] if args.link is None else parse_size(args.link))


def _check_sizes(args: argparse.Namespace) -> None:
    """Raise `ValueError` if an option is missing, has an invalid value or has no effect."""
    for name in ("model", *(() if args.gpus else ("cluster",)), "device"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name} FILE is missing. A plan of parallel sizes needs --model, "
                             "--device, and either --gpus or --cluster, e.g. --model config.json "
                             "--gpus 64 --device h100 --network ib400. A plan of a device's memory "
                             "needs --memory and --profile")
    for name in ("data", "script", "auto"):
        if getattr(args, name) and not args.write:
            raise ValueError(f"--{name} only affects the files of --write DIR. Add --write DIR, or "
                             f"leave --{name} out")
    check_counts(args, "top", "nodes", "ranks_per_node", "gpus", "sequence", "batch")
    if not 0 < args.experts_per_rank <= 1e6:
        raise ValueError(f"--experts-per-rank {args.experts_per_rank} must be a number > 0, e.g. 1")


def _plan_sizes(args: argparse.Namespace) -> None:
    """Plan the parallel sizes, the layout of the experts and the all-to-all algorithm."""
    from moe_plugin.cli.measure.model_files import read_source
    from moe_plugin.cli.planning.answer import (
        answer,
        breakdown,
        explain,
        found_plans,
        launch_lines,
        predicted,
    )
    from moe_plugin.cli.planning.launch import TRANSFORMERS, YAML
    from moe_plugin.planner.model_search import Space

    _check_sizes(args)
    tuning = _fine_tuning(args)
    cluster, device = _hardware(args)
    source = read_source(args.model, cluster.ranks, args.sequence, args.batch, tuning)
    args.host = args.host or ("megatron" if source.host == YAML else source.host)
    if tuning is not None and args.host != TRANSFORMERS:
        raise ValueError(f"--host {args.host} cannot fine-tune quantized experts. Leave --host out")
    if args.write and args.host == TRANSFORMERS:
        raise ValueError(f"--write {short(str(args.write))} needs a launch script, which "
                         "transformers does not have. Add --host megatron, or leave --write out "
                         "and copy the printed lines")
    model = source.model.in_host(args.host)
    if args.scale:
        return _scale(args, model, cluster, device)
    # the user's own command is kept, unless its flags are those of another host
    own = source if args.host == source.host else replace(source, script=None, flags={})
    start = LaunchCommand(
        data=args.data or LaunchCommand.data, script=own.script,
        flags={k: v for k, v in own.flags.items() if k != "data-path" or not args.data})
    space = Space(data_parallel_only=args.host != "megatron",
                  whole_experts=args.host == TRANSFORMERS)
    result = found_plans(model, cluster, device, space, args.top)
    best = result.plans[0]
    if args.json:
        print(json.dumps({
            "plans": [breakdown(c) for c in result.plans], "tried": result.tried,
            "skipped": result.skipped, "too_big": result.too_big, "assumed": source.assumed,
            "fit_errors": {"device": device.fit_error, "cluster": cluster.fit_error}
        }, indent=1))
    else:
        print("\n".join(answer(source.assumed, model, cluster, device, result, space)))
        print(f"\n{launch_lines(args.model, model, cluster, best.plan, args.host, start)}")
        if args.gpus is None:
            print(f"\n{explain(model, cluster, device, result, space)}")
            print(f"\n{predicted(best, cluster, device)}, without the optimizer and the host's work"
                  " outside of the layers. `moe-plugin recommend` measures these ranks.")
    if args.plot:
        _plot_plans(args.plot, result.plans)
    if args.write:
        make_folder(args.write)
        text = write_plan(args, args.write, model, best, cluster, device, start)
        if not args.json:
            print(f"wrote {args.write / CONFIG}\nwrote {args.write / LINE}, the launch script:\n"
                  f"{text}")


def write_plan(args: argparse.Namespace, folder: Path, model: Any, best: Any, cluster: Any,
               device: Any, start: LaunchCommand, activations: Sequence[str] = ()) -> str:
    """Write the YAML file and launch script of a plan, and return the launch line.

    Args:
        args: parsed arguments with the options of `host_options`.
        folder: folder in which the files are created.
        best: a `PlanCost`.
        device: the device.
        start: the settings of the launch command that do not depend on the plan.
        activations: the policy that keeps, recomputes or swaps the activations of each layer. See
            `PlanCost`.
    """
    from moe_plugin.cli.planning.answer import predicted
    from moe_plugin.cli.planning.launch import launch_script, launch_text, launch_words, plan_yaml
    from moe_plugin.planner.plan_cost import needs_send

    note = (f"Written by `moe-plugin {args.command}`: {best.plan.label}; "
            f"{predicted(best, cluster, device)}.")
    start = replace(start, nodes=cluster.nodes, ranks_per_node=cluster.ranks_per_node,
                    config=folder / CONFIG, script=args.script or start.script)
    text = launch_text(launch_words(model, best.plan, args.host, start))
    write_regular(folder / CONFIG, plan_yaml(model, best.plan, args.host, args.auto, note,
                                             activations, keeps_send=needs_send(
                                                 model, cluster, device, best.plan)))
    write_regular(folder / LINE, launch_script(text, note))
    return text


def _scale(args: argparse.Namespace, model: Any, cluster: Any, device: Any) -> None:
    from moe_plugin.planner.model_search import scale_table, scale_text
    from moe_plugin.planner.units import parse_counts

    nodes = parse_counts("--scale", args.scale, "1,2,4")
    micro = max(1, model.global_batch // cluster.ranks)
    rows = scale_table(model.layer(micro * model.sequence), cluster, device, nodes,
                       args.experts_per_rank)
    if args.json:
        print(json.dumps([{**asdict(r), "speedup": r.speedup} for r in rows], indent=1))
    else:
        print(scale_text(rows))


def _plot_plans(path: Path, plans: list[Any]) -> None:
    """Plot the step times of the plans as stacked bars, and the MoE layer of the best plan as a
    timeline.
    """
    from moe_plugin.cli.figures import pyplot, save_figure

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


def _plan_prefill(args: argparse.Namespace) -> None:
    """For each prompt length, choose the kernel and the number of pieces into which the rows are
    divided.
    """
    from moe_plugin.cli.planning.pipeline import explain_prefill, prefill_table
    from moe_plugin.planner.cluster import load_cluster
    from moe_plugin.planner.model import load_model
    from moe_plugin.planner.prefill import load_kernels
    from moe_plugin.planner.units import parse_counts

    if None in (args.prefill, args.kernels, args.model, args.cluster):
        raise ValueError("--prefill LIST, --kernels FILE, --model FILE and --cluster FILE must be "
                         "used together")
    if given := given_options(args, ("device", "scale", "write", "plot", "memory", "profile",
                                      "fine_tune")):
        raise ValueError(f"--{given[0].replace('_', '-')} cannot be combined with --prefill. "
                         "Leave one of them out")
    check_counts(args, "nodes", "ranks_per_node")
    cluster = load_cluster(args.cluster)
    table = prefill_table(load_model(args.model).in_host(args.host or "megatron"),
                          cluster.resized(args.nodes or cluster.nodes, args.ranks_per_node),
                          load_kernels(args.kernels),
                          parse_counts("--prefill", args.prefill, "256,4096"))
    print(json.dumps(asdict(table), indent=1) if args.json else explain_prefill(table))


def _plan_pipeline(args: argparse.Namespace) -> None:
    """Compare pipeline schedules, and show the timeline of the best schedule."""
    from moe_plugin.cli.planning.pipeline import as_dict, explain, trace
    from moe_plugin.planner.pipeline.choice import choose, load_profile

    if given := given_options(args, (*OF_SIZES, "plot", "memory", "profile")):
        raise ValueError(f"--{given[0].replace('_', '-')} cannot be combined with --pipeline. "
                         "Leave one of them out")
    profile = load_profile(args.pipeline)
    print(json.dumps(as_dict(profile), indent=1) if args.json else explain(profile))
    if args.trace:
        write_regular(args.trace, json.dumps(trace(choose(profile).timeline)))
