"""The command `moe-plugin schedule`, and the mode of `moe-plugin plan` that plans the memory of one
device.

The command computes the fastest schedule of a collective on a network and proves that no schedule
is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_output, write_regular

# `moe-plugin plan --memory`: where tensors are stored, for a model larger than its device
STREAMS = {"forward": "tab:blue", "backward": "tab:purple", "recompute": "tab:orange"}
# options only for parallel sizes
OF_SIZES = ("model", "device", "cluster", "scale", "write", "fine_tune")


def given_options(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the names of the options that the user has set."""
    return [name for name in names if getattr(args, name) is not None]


def plan_memory(args: argparse.Namespace) -> None:
    """Plan where tensors are stored for a model that exceeds the memory of the device."""
    from moe_plugin.planner.offload.schedule import load_profile
    from moe_plugin.planner.units import parse_size

    experts = args.profile is None and None not in (args.memory, args.model, args.device)
    if not experts and (args.profile is None or args.memory is None):
        raise ValueError("--memory SIZE and --profile FILE must be used together. To plan where "
                         "experts are stored, use --memory, --model and --device")
    if given := given_options(args, OF_SIZES[2 * experts:]):
        raise ValueError(f"--{given[0].replace('_', '-')} plans parallel sizes, but --memory plans "
                         "a single device. Leave one of them out")
    if experts and args.weights_on == "host":
        raise ValueError("--weights-on host needs --profile FILE instead of --model")
    if args.accumulate is not None and args.weights_on == "device":
        raise ValueError(f"--accumulate {short(args.accumulate)} needs --weights-on host")
    limit = parse_size(args.memory)
    if experts:
        outcome = _experts(args, limit)
    else:
        make_plan = _activations if args.weights_on == "device" else _weights
        outcome = make_plan(args, load_profile(args.profile), limit)
    if args.trace:
        write_regular(args.trace, json.dumps(outcome.trace()))
    if args.plot:
        _plot_streams(args.plot, outcome, limit)


def _experts(args: argparse.Namespace, limit: int) -> Any:
    """Choose where experts are stored during text generation."""
    from moe_plugin.planner.cluster import device_of
    from moe_plugin.planner.model import load_model
    from moe_plugin.planner.offload import pregate
    from moe_plugin.planner.units import parse_size

    model = load_model(args.model).in_host(args.host or "megatron")
    link = parse_size("25GB" if args.link is None else args.link)
    shape, active = pregate.expert_model(model, device_of(args.device), link,
                                         1 if args.tokens is None else args.tokens)
    costs = pregate.compare(shape, [active])
    print(json.dumps(pregate.as_dict(costs, limit), indent=1) if args.json
          else pregate.explain(costs, limit))
    return pregate.best(costs, limit).outcome


def _activations(args: argparse.Namespace, profile: Any, limit: int) -> Any:
    from moe_plugin.cli.planning.offload import as_dict, explain
    from moe_plugin.planner.offload.activation_plan import plan
    from moe_plugin.planner.offload.activation_problem import blocks_of

    base = profile.base_bytes + sum(b.parameter_bytes + b.gradient_bytes for b in profile.blocks)
    result = plan(blocks_of(profile), limit, base, profile.duplex)
    print(json.dumps(as_dict(result), indent=1) if args.json else explain(result, profile.name))
    return result.outcome


def _weights(args: argparse.Namespace, profile: Any, limit: int) -> Any:
    from moe_plugin.cli.planning.offload import explain_stream, stream_as_dict
    from moe_plugin.planner.offload.weight_streaming import fewest_batches, layers_of, plan

    layers, base, result = layers_of(profile), profile.base_bytes, None
    if args.accumulate is None:
        result = fewest_batches(layers, limit, base)
    if result is None:
        result = plan(layers, 1 if args.accumulate is None else args.accumulate, limit, base)
    print(json.dumps(stream_as_dict(result), indent=1) if args.json
          else explain_stream(result, profile.name))
    return result.outcome


def _plot_streams(path: Path, outcome: Any, limit: int) -> None:
    """Plot the activity of each stream over time, with the device memory in use below it."""
    from moe_plugin.cli.figures import pyplot, save_figure

    plt = pyplot()
    figure, (lanes, memory) = plt.subplots(2, 1, figsize=(11, 5), sharex=True,
                                           height_ratios=[2, 3], layout="constrained")
    for span in outcome.timeline.spans:
        color = STREAMS.get(span.task.name.split()[0], "tab:green")
        lanes.barh([span.task.resource], [1e3 * span.task.seconds], left=[1e3 * span.start],
                   color=color, edgecolor="white", linewidth=0.5)
    lanes.set_title("blue: forward, purple: backward, orange: recomputing, green: copies")
    times, sizes = zip(*((1e3 * at, size / 2**20) for at, size in outcome.memory), strict=True)
    memory.step([*times, 1e3 * outcome.seconds], [*sizes, sizes[-1]], where="post")
    memory.axhline(limit / 2**20, color="tab:red", linestyle="--", label="limit")
    memory.set_ylabel("MiB on the device")
    memory.set_xlabel("ms")
    memory.set_ylim(bottom=0)
    memory.legend()
    save_figure(figure, path)


PRINTED = Path("-")  # value of `--json` without a file


def schedule_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin schedule`."""
    from moe_plugin.planner.forest.presets import PRESETS
    from moe_plugin.planner.forest.schedule import COLLECTIVES

    p.description = ("Computes trees over which a collective has the highest throughput of all "
                     "possible schedules (ForestColl). Shows the cut of the network that proves "
                     "this, and compares with rings, binary trees and recursive doubling.")
    p.add_argument("--topology", required=True, metavar="FILE|PRESET",
                   help="network file (see configs/networks/), cluster file (written by "
                        "`moe-plugin calibrate`), output of `nvidia-smi topo -m`, or a preset: "
                        + ", ".join(preset.example for preset in PRESETS.values())
                        + "; @25 after a graph's name: links of 25 GB/s")
    p.add_argument("--nodes", type=int, default=None, metavar="N",
                   help="number of machines, for a cluster file or nvidia-smi's output "
                        "(default: as in the cluster file; otherwise 1)")
    p.add_argument("--collective", choices=COLLECTIVES, default="all_gather",
                   help="default: %(default)s")
    p.add_argument("--trees", type=int, default=None, metavar="K",
                   help="trees per rank (default: as many as the optimum requires)")
    p.add_argument("--overlap", action="store_true",
                   help="for all_reduce: run both halves at the same time on shared wires, with "
                        "the roots that suit the network best")
    p.add_argument("--size", default="1GiB",
                   help="bytes of the whole result (default: %(default)s)")
    p.add_argument("--chunks", type=int, default=64, metavar="N",
                   help="chunks of each tree's data in the simulation; fewer if it would take too "
                        "long (default: %(default)s)")
    p.add_argument("--json", type=Path, nargs="?", const=PRINTED, default=None, metavar="FILE",
                   help="write the schedule with exact fractions into FILE, or print it instead of "
                        "text")
    p.add_argument("--msccl", type=Path, default=None, metavar="FILE",
                   help="write the schedule for the MSCCL runtime (NCCL's fork, RCCL), as XML")
    p.add_argument("--svg", type=Path, default=None, metavar="FILE",
                   help="draw the network, its cut and the trees")
    p.add_argument("--html", type=Path, default=None, metavar="FILE",
                   help="write everything as one HTML page that needs no network access")


def schedule(args: argparse.Namespace) -> int:
    """Plan the schedule of a collective, compare it with other algorithms, and print and write the
    results.
    """
    from moe_plugin.cli.planning.forest import Report, compare, text
    from moe_plugin.cli.planning.pictures import drawing, page
    from moe_plugin.planner.forest import plan
    from moe_plugin.planner.forest.msccl import to_msccl
    from moe_plugin.planner.forest.simulate import program_of
    from moe_plugin.planner.forest.source import find_network
    from moe_plugin.planner.units import parse_size

    printed = args.json == PRINTED
    for path in (args.json, args.msccl, args.svg, args.html):
        if path and path != PRINTED:
            check_output(path)
    size = parse_size(args.size)
    if size < 1 or args.chunks < 1:
        raise ValueError(f"--size {short(args.size)} and --chunks {short(args.chunks)} must be at "
                         "least 1. Leave them out for the defaults")
    network, note = find_network(args.topology, args.nodes)
    begin = time.perf_counter()
    computed = plan(network, args.collective, args.trees, overlap=args.overlap)
    planned_s = time.perf_counter() - begin
    # formats that may refuse a schedule are written before the long simulation starts
    outputs = [(path, make()) for path, make in (
        (args.json, computed.to_json), (args.msccl, lambda: to_msccl(program_of(computed))),
        (args.svg, lambda: drawing(computed))) if path]
    report = Report(computed, size, compare(computed, size, args.chunks), planned_s, note)
    print(computed.to_json() if printed else text(report))
    if args.html:
        outputs.append((args.html, page(report)))
    for path, content in outputs:
        if path != PRINTED:
            print(f"wrote {write_regular(path, content)}",
                  file=sys.stderr if printed else sys.stdout)
    return 0
