"""Replay routing traces in the layer on emulated nodes, as `moe-plugin simulate routing --emulate`
does. Every policy for overloaded experts is measured and predicted, and compared with forced
balance on the same calls.

The study requires Linux and root, and takes about 10 minutes on an idle machine with two CPU cores.
The traces are recorded first, by training the quick start's models and a model with 64 experts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_plugin.cli.figures import table
from moe_plugin.observe.traces import read_traces
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.routing_replay import best
from moe_plugin.planner.units import parse_grid
from scripts.bench import replayed
from scripts.bench.quickstart import begin, command_of, data_of, settings, train
from scripts.bench.replayed import Emulation, Trace, times_of
from scripts.bench.report import page
from scripts.bench.study import ROOT, Option, run_options

TITLE = "Throughput relative to perfectly balanced experts"
AIM = 0.94  # the share that UltraEP publishes
# descriptions by which a layer decides whether a call spills
CLUSTER, DEVICE = "configs/clusters/emulated.yaml", "configs/devices/cpu_core.yaml"
WIDTH, TOP_K, REPLAN, DELAY_S = 256, 2, 2, 1e-3
SYNTHETIC = (4, 64, 512)  # number of ranks, steps, and tokens per rank


def recorded(host: str, sizes: Mapping[str, Any], args: argparse.Namespace) -> list[Trace]:
    """Train the quick start's model in one host, and return the traces of all steps.

    Args:
        host: "fairseq" or "megatron".
        sizes: model sizes that differ from those of the quick start.
    """
    place, corpus, _ = begin(args)
    s = {**settings(args.steps), **sizes}
    folder = place / f"{host}-{s['experts']}-experts"
    command = [*command_of(host, s, data_of(host, corpus), folder),
               "--moe-stats-trace", str(folder / "trace")]
    train(host, folder, command, s["steps"])
    return read_traces(folder / "trace")


def synthetic(popularity: Callable[[float], Tensor], args: argparse.Namespace) -> list[Trace]:
    """Return traces of a single layer whose tokens choose experts at random.

    Args:
        popularity: a function that maps the elapsed fraction of the steps to the popularity of each
            expert, [E].
        args: options of the study. The options are not used by this function.
    """
    ranks, steps, tokens = SYNTHETIC
    made: list[Trace] = []
    for rank in range(ranks):
        draw = torch.Generator().manual_seed(rank)
        made.append({("decoder", None, 0): [[torch.multinomial(
            popularity(step / steps).expand(tokens, -1), TOP_K, generator=draw)]
            for step in range(steps)]})
    return made


def drifting(over: float, experts: int = 8) -> Tensor:
    """Return the popularity of each expert at a given time of the trace. The popularity forms a
    wave that moves once around all experts.

    The most popular expert is chosen 3.2 times as often as the mean.
    """
    angle_E = torch.arange(experts) / experts - over
    return (2 * torch.cos(2 * math.pi * angle_E)).exp()


def hot(over: float, experts: int = 8) -> Tensor:
    """Return the popularity of each expert. Nearly all tokens choose one expert, and the other
    experts are equally popular.
    """
    return torch.tensor([3.0 * (experts - 1), *[1.0] * (experts - 1)])


# by name: the number of experts, and a function that returns the traces
TRACES: dict[str, tuple[int, Callable[[argparse.Namespace], list[Trace]]]] = {
    "quick start, fairseq": (8, partial(recorded, "fairseq", {})),
    "quick start, Megatron": (8, partial(recorded, "megatron", {})),
    "64 experts, fairseq": (64, partial(recorded, "fairseq", {"experts": 64, "hidden": 128})),
    "drifting": (8, partial(synthetic, drifting)),
    "a hot expert": (8, partial(synthetic, hot)),
}
OPTIONS = {
    "traces": Option(tuple(TRACES), "traces to replay", quick=("drifting", "a hot expert"),
                     choices=tuple(TRACES)),
    "grid": Option("4x1", "nodes x ranks per node", quick="2x1"),
    "rate": Option(200e6, "bandwidth of a node's link in bit/s", quick=1e9),
    "tokens": Option(1024, "tokens per rank and call", quick=64),
    "replayed": Option(12, "number of steps of a trace that are replayed, one third each from the "
                       "beginning, the middle and the end", quick=3),
    "steps": Option(200, "number of training steps of each model", quick=20),
    **run_options("routing"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    # models are trained before anything is timed
    traces = {name: TRACES[name][1](args) for name in args.traces}
    found = {}
    for name, made in traces.items():
        experts = TRACES[name][0]
        model = ModelShape(layers=2, model_dim=WIDTH, ffn_dim=WIDTH, experts=experts, top_k=TOP_K)
        where = Emulation(parse_grid(args.grid), {"rate_bit_s": args.rate, "delay_s": DELAY_S},
                          model, str(ROOT / CLUSTER), str(ROOT / DEVICE), replan=REPLAN)
        part = replayed.excerpt(made, experts, where.ranks, args.replayed, args.tokens)
        found[name] = replayed.emulate(part, where)
    return {"grid": args.grid, "rate": args.rate, "tokens": args.tokens, "steps": args.steps,
            "traces": found}


def summary(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each trace, with the policy that the planner chooses, the fastest policy
    and the slowest policy.

    The row contains the shares of these policies. For the slowest policy (except `never`), the row
    also contains the throughput divided by the throughput of the plain layer.
    """
    rows = []
    for name, one in found["traces"].items():
        predicted, measured = times_of(one, "predicted"), times_of(one, "measured")
        by_name = {times.policy: times for times in measured}
        fastest = min(measured, key=lambda times: times.mean)
        slowest = max(measured[1:], key=lambda times: times.mean)
        taken = best(predicted)
        rows.append({"trace": name, "never": measured[0].share(), "taken": taken.policy,
                     "predicted": taken.share(), "share": by_name[taken.policy].share(),
                     "over": measured[0].mean / by_name[taken.policy].mean,
                     "fastest": fastest.policy, "most": fastest.share(),
                     "slowest": slowest.policy, "least": measured[0].mean / slowest.mean})
    return rows


def noise(found: Mapping[str, Any]) -> list[float]:
    """For calls in which a policy lends no expert, return the quartiles of the time of `never`
    divided by the time of the policy.

    If no expert is lent, `never` and the policy do the same work, so the ratios show the noise of
    the measurement.
    """
    ratios = [plain / mine for one in found["traces"].values()
              for name, policy in one["policies"].items() if name != "never"
              for plain, mine, lent in zip(one["policies"]["never"]["measured"],
                                           policy["measured"], policy["lent"], strict=True)
              if not lent]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else []


def _traces(missed: Iterable[str]) -> str:
    found = ", ".join(missed)
    return f"missed in these traces: {found}" if found else "reached in every trace"


def body(found: dict[str, Any]) -> list[str]:
    rows, quartiles = summary(found), noise(found)
    return page(
        __name__, found, rows=rows, meaning=replayed.MEANING,
        lowest=min(rows, key=lambda row: row["least"]),
        missed=_traces(f"{row['trace']} {row['share']:.1%}" for row in rows if row["share"] < AIM),
        below=_traces(f"{row['trace']} {row['over']:.3f}" for row in rows if row["over"] < 1),
        noise=page(__name__, {}, "noise", quartiles=quartiles) if quartiles else [],
        traces=[part for name, one in found["traces"].items() for part in (
            f"## {name[0].upper()}{name[1:]}, {len(one['third'])} calls",
            table(replayed.HEADER, replayed.rows_of(one)))])
