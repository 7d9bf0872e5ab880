"""`moe-plugin plan --memory`: what lies where, for a model that is larger than its device."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import write_regular

STREAMS = {"forward": "tab:blue", "backward": "tab:purple", "recompute": "tab:orange"}
OF_SIZES = ("model", "device", "cluster", "scale", "write")  # what other uses do not take


def given_options(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of these options that are given."""
    return [name for name in names if getattr(args, name) is not None]


def plan_memory(args: argparse.Namespace) -> None:
    """What lies where, for a model that is larger than its device."""
    from moe_plugin.planner.offload.profile import load_profile
    from moe_plugin.planner.units import parse_size

    experts = args.profile is None and None not in (args.memory, args.model, args.device)
    if not experts and (args.profile is None or args.memory is None):
        raise ValueError("--memory and --profile go together: a size and the file of a profile; "
                         "for where experts lie --memory, --model and --device")
    if given := given_options(args, OF_SIZES[2 * experts:]):
        raise ValueError(f"--{given[0]} plans parallel sizes, --memory a single device; leave one "
                         "of them out")
    if experts and args.weights_on == "host":
        raise ValueError("--weights-on host needs --profile FILE in the place of --model")
    if not experts and (given := given_options(args, ("link", "tokens"))):
        raise ValueError(f"--{given[0]} goes with --memory, --model and --device; leave it out")
    if args.accumulate is not None and args.weights_on == "device":
        raise ValueError(f"--accumulate {short(args.accumulate)} needs --weights-on host")
    limit = parse_size(args.memory)
    if experts:
        outcome = _experts(args, limit)
    else:
        made = _activations if args.weights_on == "device" else _weights
        outcome = made(args, load_profile(args.profile), limit)
    if args.trace:
        write_regular(args.trace, json.dumps(outcome.trace()))
    if args.plot:
        _plot_streams(args.plot, outcome, limit)


def _experts(args: argparse.Namespace, limit: int) -> Any:
    """Where experts lie while text is generated."""
    from moe_plugin.planner.device import load_device
    from moe_plugin.planner.model import load_model
    from moe_plugin.planner.offload import pregate
    from moe_plugin.planner.units import parse_size

    model = load_model(args.model).in_host(args.host)
    link = parse_size("25GB" if args.link is None else args.link)
    shape, active = pregate.expert_model(model, load_device(args.device), link,
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
    made = plan(blocks_of(profile), limit, base, profile.duplex)
    print(json.dumps(as_dict(made), indent=1) if args.json else explain(made, profile.name))
    return made.outcome


def _weights(args: argparse.Namespace, profile: Any, limit: int) -> Any:
    from moe_plugin.cli.planning.offload import explain_stream, stream_as_dict
    from moe_plugin.planner.offload.weight_streaming import fewest_batches, layers_of, plan

    layers, base, made = layers_of(profile), profile.base_bytes, None
    if args.accumulate is None:
        made = fewest_batches(layers, limit, base)
    if made is None:
        made = plan(layers, 1 if args.accumulate is None else args.accumulate, limit, base)
    print(json.dumps(stream_as_dict(made), indent=1) if args.json
          else explain_stream(made, profile.name))
    return made.outcome


def _plot_streams(path: Path, outcome: Any, limit: int) -> None:
    """The streams as lanes over the bytes on the device."""
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
