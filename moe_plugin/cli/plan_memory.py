"""`moe-plugin plan --memory`: what lies where, for a model that is larger than its device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from moe_plugin.messages import short
from moe_plugin.regular_files import check_output, write_regular

# of the command's other use; neither use takes the other's
OTHERS = ("model", "cluster", "device", "scale", "write")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = p.add_argument_group("memory of one device, in place of parallel sizes")
    group.add_argument("--memory", default=None, metavar="SIZE",
                       help="the device's memory, e.g. 8GiB: choose which blocks keep, recompute "
                            "or swap their activations, and explain why")
    group.add_argument("--profile", type=Path, default=None, metavar="FILE",
                       help="with --memory: measured times and sizes of the model's blocks "
                            "(see docs/activations.md)")
    group.add_argument("--weights-on", choices=("device", "host"), default="device",
                       help="host: segments of weights stream through the device instead "
                            "(default: %(default)s)")
    group.add_argument("--accumulate", type=int, default=None, metavar="N",
                       help="with --weights-on host: micro-batches of a step (default: the fewest "
                            "that hide all copies)")
    group.add_argument("--trace", type=Path, default=None, metavar="FILE",
                       help="with --memory: write the timeline for Perfetto or chrome://tracing")


def run(args: argparse.Namespace) -> int:
    """Plan, show, write."""
    from moe_plugin.planner.offload.profile import load_profile
    from moe_plugin.planner.units import parse_size

    if args.profile is None or args.memory is None:
        raise ValueError("--memory and --profile go together: a size and the file of a profile")
    given = [name for name in OTHERS if getattr(args, name) is not None]
    if given:
        raise ValueError(f"--{given[0]} plans parallel sizes, --memory a single device; leave one "
                         "of them out")
    if args.accumulate is not None and args.weights_on == "device":
        raise ValueError(f"--accumulate {short(args.accumulate)} needs --weights-on host")
    limit = parse_size(args.memory)
    if args.trace:
        check_output(args.trace)
    if args.plot:
        from moe_plugin.lab.bench.report import check_figure

        check_figure(args.plot)
    profile = load_profile(args.profile)
    outcome = (_activations if args.weights_on == "device" else _weights)(args, profile, limit)
    if args.trace:
        write_regular(args.trace, json.dumps(outcome.trace()))
    if args.plot:
        _plot(args.plot, outcome, limit)
    return 0


def _activations(args: argparse.Namespace, profile: Any, limit: int) -> Any:
    from moe_plugin.lab.planning.offload.explain import as_dict, explain
    from moe_plugin.planner.offload.activation_plan import plan
    from moe_plugin.planner.offload.activation_problem import blocks_of

    base = profile.base_bytes + sum(b.parameter_bytes + b.gradient_bytes for b in profile.blocks)
    made = plan(blocks_of(profile), limit, base, profile.duplex)
    print(json.dumps(as_dict(made), indent=1) if args.json else explain(made, profile.name))
    return made.outcome


def _weights(args: argparse.Namespace, profile: Any, limit: int) -> Any:
    from moe_plugin.lab.planning.offload.explain import explain_stream, stream_as_dict
    from moe_plugin.planner.offload.weight_streaming import fewest_batches, layers_of, plan

    layers, base, made = layers_of(profile), profile.base_bytes, None
    if args.accumulate is None:
        made = fewest_batches(layers, limit, base)
    if made is None:
        made = plan(layers, 1 if args.accumulate is None else args.accumulate, limit, base)
    print(json.dumps(stream_as_dict(made), indent=1) if args.json
          else explain_stream(made, profile.name))
    return made.outcome


def _plot(path: Path, outcome: Any, limit: int) -> None:
    """The streams as lanes over the bytes on the device."""
    from moe_plugin.lab.bench.report import pyplot, save_figure

    plt = pyplot()
    figure, (lanes, memory) = plt.subplots(2, 1, figsize=(11, 5), sharex=True,
                                           height_ratios=[2, 3], layout="constrained")
    colors = {"forward": "tab:blue", "backward": "tab:purple", "recompute": "tab:orange"}
    for span in outcome.timeline.spans:
        color = colors.get(span.task.name.split()[0], "tab:green")
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
