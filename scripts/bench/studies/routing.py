"""Routing traces through the layer on emulated nodes: each policy for overloaded experts over the
same run with forced balance, measured and predicted, as `moe-plugin simulate routing --emulate`.

Needs Linux and root, and about 10 minutes on an idle machine with two processors. The quick start's
models are trained first, and so is one of 64 experts: they write the traces.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_plugin.cli.figures import columns, table
from moe_plugin.observe.traces import read_traces
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.routing_replay import best
from moe_plugin.planner.units import parse_grid
from scripts.bench.quickstart import begin, quickstart, settings
from scripts.bench.replayed import (
    HEADER,
    MEANING,
    Emulation,
    Trace,
    emulate,
    excerpt,
    rows_of,
    times_of,
)
from scripts.bench.study import ROOT, Option

TITLE = "Share of the balanced ideal"
AIM = 0.94  # UltraEP's figure
# what decides whether a call spills
CLUSTER, DEVICE = "configs/clusters/emulated.yaml", "configs/devices/cpu_core.yaml"
WIDTH, TOP_K, REPLAN, DELAY_S = 256, 2, 2, 1e-3
SYNTHETIC = (4, 64, 512)  # ranks, steps, tokens of a rank


def recorded(host: str, sizes: Mapping[str, Any], args: argparse.Namespace) -> list[Trace]:
    """Traces of the quick start's model in a host, all steps of its run; sizes: of it that differ.
    """
    place, corpus, _ = begin(args)
    s = {**settings(args.steps), **sizes}
    folder = place / f"{host}-{s['experts']}-experts"
    data = quickstart().HOST_STEPS[host][0](corpus)
    command = [*quickstart().HOST_STEPS[host][1](s, data, folder, False),
               "--moe-stats-trace", str(folder / "trace")]
    quickstart().train(quickstart().Run(host, folder, command, s["steps"]))
    return read_traces(folder / "trace")


def synthetic(popularity: Callable[[float], Tensor], args: argparse.Namespace) -> list[Trace]:
    """Traces of one layer whose tokens choose at random. popularity: of each expert, [E], by the
    part of the steps that is over.
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
    """A wave that goes once around: the most popular expert has 3.2 times the mean."""
    angle_E = torch.arange(experts) / experts - over
    return (2 * torch.cos(2 * math.pi * angle_E)).exp()


def hot(over: float, experts: int = 8) -> Tensor:
    """One expert is a choice of nearly all tokens, the others are alike."""
    return torch.tensor([3.0 * (experts - 1), *[1.0] * (experts - 1)])


# experts, and what makes the traces
TRACES: dict[str, tuple[int, Callable[[argparse.Namespace], list[Trace]]]] = {
    "quick start, fairseq": (8, partial(recorded, "fairseq", {})),
    "quick start, Megatron": (8, partial(recorded, "megatron", {})),
    "64 experts, fairseq": (64, partial(recorded, "fairseq", {"experts": 64, "hidden": 128})),
    "drifting": (8, partial(synthetic, drifting)),
    "a hot expert": (8, partial(synthetic, hot)),
}
OPTIONS = {
    "traces": Option(tuple(TRACES), "that are replayed", quick=("drifting", "a hot expert"),
                     choices=tuple(TRACES)),
    "grid": Option("4x1", "nodes x ranks per node", quick="2x1"),
    "rate": Option(200e6, "bit/s of a node's link", quick=1e9),
    "tokens": Option(1024, "of a rank in a call", quick=64),
    "replayed": Option(12, "steps of a trace that are replayed, a third each from its beginning, "
                       "middle and end", quick=3),
    "steps": Option(200, "of each model's training", quick=20),
    "runs": Option("runs/routing", "folder of corpus and runs"),
    "fresh": Option(False, "discard earlier runs"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    traces = {name: TRACES[name][1](args) for name in args.traces}  # before anything is timed
    found = {}
    for name, made in traces.items():
        experts = TRACES[name][0]
        model = ModelShape(layers=2, model_dim=WIDTH, ffn_dim=WIDTH, experts=experts, top_k=TOP_K)
        where = Emulation(parse_grid(args.grid), {"rate_bit_s": args.rate, "delay_s": DELAY_S},
                          model, str(ROOT / CLUSTER), str(ROOT / DEVICE), replan=REPLAN)
        found[name] = emulate(excerpt(made, experts, where.ranks, args.replayed, args.tokens),
                              where)
    return {"grid": args.grid, "rate": args.rate, "tokens": args.tokens, "steps": args.steps,
            "traces": found}


def summary(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of every trace: the policy that the planner takes and the fastest, with their shares, and the
    slowest but `never`, with its throughput over the plain layer's.
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
    """Quartiles of `never` over a policy, of the calls in which nothing was lent: both do the same.
    """
    ratios = [plain / mine for one in found["traces"].values()
              for name, policy in one["policies"].items() if name != "never"
              for plain, mine, lent in zip(one["policies"]["never"]["measured"],
                                           policy["measured"], policy["lent"], strict=True)
              if not lent]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else []


def verdict(rows: list[dict[str, Any]]) -> str:
    missed = [f"{row['trace']} {row['share']:.1%}" for row in rows if row["share"] < AIM]
    below = [f"{row['trace']} {row['over']:.3f}" for row in rows if row["over"] < 1]
    lowest = min(rows, key=lambda row: row["least"])
    return (
        f"**Aim: {AIM:.0%} with the policy that the planner takes, "
        + (f"missed: {', '.join(missed)}" if missed else "reached in every trace")
        + "; never below the plain layer, "
        + (f"missed: {', '.join(below)}" if below else "reached") + ".** "
        + f"The slowest of all policies is at {lowest['least']:.3f} of the plain layer "
        f"(`{lowest['slowest']}`, {lowest['trace']}).")


def body(found: dict[str, Any]) -> Iterator[str]:
    rows, quartiles = summary(found), noise(found)
    yield (
        "Routing traces are replayed through one layer: each call, forward and backward, has the "
        "choices that the trace has, under every value of `parallel.spill`, and once as many "
        "tokens under `router.force: balance`; all alternate in the same processes. "
        f"{found['grid']} emulated nodes, {found['rate'] / 1e6:.0f} Mbit/s; width and inner width "
        f"{WIDTH}, {found['tokens']:,} tokens of a rank, k = {TOP_K}, float32; times of the "
        f"slowest rank. Predicted by `moe-plugin simulate routing` with `{CLUSTER}` and "
        f"`{DEVICE}`, by which calls also decide whether they spill.")
    yield verdict(rows)
    if quartiles:
        yield ("Noise: in calls in which a policy lends nothing it does what `never` does; there "
               f"`never` over it has the quartiles {quartiles[0]:.2f} and {quartiles[2]:.2f}.")
    yield columns(rows, {
        "trace": "{trace}", "share of `never`": "{never:.1%}", "the planner takes": "`{taken}`",
        "its share": "{share:.1%}", "predicted": "{predicted:.1%}", "over `never`": "{over:.2f}",
        "fastest": "`{fastest}`", "share of the fastest": "{most:.1%}"})
    yield (f"The quick start's models have 8 experts and train for {found['steps']} steps; the "
           "third has 64 of inner width 128. Ranks of a trace are split for those here, and "
           "tokens repeated. `drifting`: popularity is a wave that goes once around the experts, "
           "at most 3.2 times the mean. `a hot expert`: nearly all tokens choose it, and another "
           "one. "
           f"`standing` places replicas every {REPLAN} steps, by those before; at the end of each "
           "third its loads are of another part of the run. Shares above 100 %: rows of a lent "
           "expert need not travel, which those of the balanced run do. Layouts other than r = 1 "
           "are not compared. Ranks share the processors of this machine, so an uneven load of "
           "matmuls is felt less than on ranks with processors of their own.")
    yield MEANING
    for name, one in found["traces"].items():
        yield f"## {name[0].upper()}{name[1:]}, {len(one['third'])} calls"
        yield table(HEADER, rows_of(one))
