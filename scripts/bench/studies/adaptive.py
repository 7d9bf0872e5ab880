"""Compare `parallel: auto` with every fixed layout on an emulated cluster.

Needs Linux and root, and takes about 20 minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

from moe_plugin import MoELayer, TorchComm
from moe_plugin.cli.figures import columns
from moe_plugin.config import from_dict
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from scripts.bench.layouts import one_step, slowest
from scripts.bench.report import bullets, layout_in_words
from scripts.bench.study import Option
from scripts.emulate import EmulatedCluster

TITLE = "Adaptive layouts on an emulated cluster"
NODES, EXPERTS, WIDTH = 4, 2, 256
EVERY = 6  # number of steps between two measurements of the fixed layouts
REGIMES: dict[str, dict[str, Any]] = {
    "few tokens, big experts": {"hidden": 2048, "tokens": [64]},
    "many tokens, small experts": {"hidden": 64, "tokens": [2048]},
    "load drifts": {"hidden": 256, "tokens": [64, 2048]},
    "load drifts, 2,000 steps": {"hidden": 256, "tokens": [64, 2048], "steps": 2000, "every": 100},
}
OPTIONS = {
    "steps": Option(120, "number of steps of each run with auto", quick=30),
    "most-steps": Option(2000, "leave out runs with more steps than this", quick=100),
    "rate": Option(200e6, "rate of a node's link in bit/s", quick=1e9),
}


def tokens_at(regime: dict[str, Any], step: int, steps: int) -> int:
    """Return the tokens of a rank: a constant, or one of two loads that alternate twice."""
    loads = regime["tokens"]
    return loads[step * 2 * len(loads) // steps % len(loads)]


def run_regime(hidden: int, loads: list[int], steps: int, every: int,
               choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Run forward and backward with `auto` on one rank, and at intervals also in each fixed layout.

    A fixed layout runs two steps, of which only the second is timed. The first step warms up the
    buffers
    and connections, which are always warm for `auto`. No fixed layout is measured in the first step
    of
    a load.
    """
    tree: dict[str, Any] = {
        "model_dim": WIDTH, "num_experts": EXPERTS, "router": {"top_k": 1},
        "experts": {"hidden_dim": hidden}, "losses": {"switch": 0.01}
    }
    comm = TorchComm()
    fixed, auto = MoELayer(from_dict(tree), comm), MoELayer(
        from_dict({**tree, "parallel": "auto", "tuner": {"max_d": 2}}), comm)
    seconds: dict[str, list[float]] = {}
    labels = []
    for step in range(steps):
        tokens = tokens_at({"tokens": loads}, step, steps)
        found, label = one_step(auto, tokens, None)
        seconds.setdefault("auto", []).append(found)
        labels.append(label)
        for values in choices if step % every == every // 2 else ():
            choice = LayoutChoice.from_dict(values)
            one_step(fixed, tokens, choice)
            seconds.setdefault(choice.label, []).append(one_step(fixed, tokens, choice)[0])
    return {
        "seconds": seconds, "labels": labels, "explored": auto.routed_experts.tuner.tuner.explored,
        "decisions": [d.as_dict() for d in auto.routed_experts.tuner.tuner.log]
    }


def mean_over_loads(seconds: list[float], loads: list[int],
                    counted: list[bool] | None = None) -> float:
    """Return the mean over the loads of the mean time at each load."""
    counted = counted or [True] * len(seconds)
    by_load: dict[int, list[float]] = {}
    for found, load, ok in zip(seconds, loads, counted, strict=True):
        if ok:
            by_load.setdefault(load, []).append(found)
    return statistics.fmean(statistics.fmean(found) for found in by_load.values())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every fixed layout and `auto`: the mean over the steps of each load, with equal
    weights.

    For `auto`, the mean is computed over all steps, and over the steps outside exploration.
    """
    report: dict[str, Any] = {"rate": args.rate}
    choices = [c.as_dict() for c in legal_choices(EXPERTS, NODES, degrees=(1, 2))]
    for name, regime in REGIMES.items():
        steps, every = regime.get("steps", args.steps), regime.get("every", EVERY)
        if steps > args.most_steps:
            continue
        with EmulatedCluster(NODES, 1, rate_bit_s=args.rate) as cluster:
            ranks = cluster.run(run_regime, regime["hidden"], regime["tokens"], steps, every,
                                choices, timeout_s=3000)
        loads = [tokens_at(regime, step, steps) for step in range(steps)]
        rows = {
            label: mean_over_loads(slowest(ranks, label), loads[every // 2::every])
            for label in ranks[0]["seconds"] if label != "auto"
        }
        seconds, settled = slowest(ranks, "auto"), _settled(ranks[0], steps)
        report[name] = {
            "fixed": rows, "best": min(rows, key=rows.get), "auto": mean_over_loads(
                seconds[1:], loads[1:]), "auto_settled": mean_over_loads(
                    seconds[1:], loads[1:], settled[1:]), "explored": ranks[0]["explored"],
            "steps": steps, "decisions": ranks[0]["decisions"], "layouts": {
                label: ranks[0]["labels"].count(label) for label in sorted(set(ranks[0]["labels"]))
            }
        }
    return report


def _settled(rank: dict[str, Any], steps: int) -> list[bool]:
    """Return for each step whether it lies outside exploration."""
    settled, exploring = [], False
    events = {d["call"]: d["event"] for d in rank["decisions"]}
    for step in range(1, steps + 1):
        exploring = {"explore": True, "settle": False,
                     "keep": False}.get(events.get(step, ""), exploring)
        settled.append(not exploring)
    return settled


def body(report: dict[str, Any]) -> Iterator[str]:
    yield ("This page compares `parallel: auto`, which chooses the layout of a layer during "
           "training, with every fixed layout. All of them run alternately in the same processes, "
           "so that they run under the same conditions. Times are those of the slowest rank, "
           f"forward and backward. The machine emulates {NODES} nodes with one rank each and links "
           f"of {report['rate'] / 1e6:.0f} Mbit/s.")
    yield (f"The layer has width {WIDTH} and {EXPERTS} experts, and selects one expert per token. "
           "Inner width and tokens differ between the sections:")
    yield bullets(*(
        f"*{name}*: inner width {regime['hidden']:,}; "
        f"{' and '.join(f'{tokens:,}' for tokens in regime['tokens'])} tokens per rank"
        + (", which alternate twice during the run." if len(regime["tokens"]) > 1 else ".")
        for name, regime in REGIMES.items() if name in report))
    for name in [n for n in REGIMES if n in report]:
        found = report[name]
        times = [*sorted(found["fixed"].items(), key=lambda item: item[1]),
                 ("auto, exploring included", found["auto"]),
                 ("auto, after exploring", found["auto_settled"])]
        yield f"## {name[0].upper()}{name[1:]}"
        yield columns(times, {
            "layout": lambda item: (layout_in_words(item[0]) if item[0] in found["fixed"]
                                    else item[0]),
            "ms per step": lambda item: f"{1e3 * item[1]:.1f}"})
        yield (f"`auto` used {found['explored']} of {found['steps']} steps "
               f"({found['explored'] / found['steps']:.1%}) to explore layouts.")
