"""`parallel: auto` against every fixed layout on an emulated cluster.

Needs Linux and root, and about 20 minutes on an idle machine.
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
from scripts.bench.study import Option
from scripts.emulate import EmulatedCluster

TITLE = "Adaptive layouts on an emulated cluster"
NODES, EXPERTS, WIDTH = 4, 2, 256
EVERY = 6  # steps from one measurement of the fixed layouts to the next
REGIMES: dict[str, dict[str, Any]] = {
    "few tokens, big experts": {"hidden": 2048, "tokens": [64]},
    "many tokens, small experts": {"hidden": 64, "tokens": [2048]},
    "load drifts": {"hidden": 256, "tokens": [64, 2048]},
    "load drifts, 2,000 steps": {"hidden": 256, "tokens": [64, 2048], "steps": 2000, "every": 100},
}
OPTIONS = {
    "steps": Option(120, "steps of each run with auto", quick=30),
    "most-steps": Option(2000, "leave out runs that are longer", quick=100),
    "rate": Option(200e6, "bit/s of a node's link", quick=1e9),
}


def tokens_at(regime: dict[str, Any], step: int, steps: int) -> int:
    """Tokens of a rank: constant, or alternating between two loads, twice."""
    loads = regime["tokens"]
    return loads[step * 2 * len(loads) // steps % len(loads)]


def run_regime(hidden: int, loads: list[int], steps: int, every: int,
               choices: list[dict[str, Any]]) -> dict[str, Any]:
    """One rank: forward and backward with `auto`, and at intervals also in each fixed layout.

    A fixed layout runs two steps and the second one counts: the first one warms up its buffers and
    connections, which are always warm for `auto`. None is measured in the first step of a load.
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
    """Mean of the means of each load."""
    counted = counted or [True] * len(seconds)
    by_load: dict[int, list[float]] = {}
    for found, load, ok in zip(seconds, loads, counted, strict=True):
        if ok:
            by_load.setdefault(load, []).append(found)
    return statistics.fmean(statistics.fmean(found) for found in by_load.values())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every fixed layout and auto: mean over the steps of each load, with equal weight.

    For auto over all its steps, and over those outside exploration.
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
    """Which steps lie outside exploration."""
    settled, exploring = [], False
    events = {d["call"]: d["event"] for d in rank["decisions"]}
    for step in range(1, steps + 1):
        exploring = {"explore": True, "settle": False,
                     "keep": False}.get(events.get(step, ""), exploring)
        settled.append(not exploring)
    return settled


def body(report: dict[str, Any]) -> Iterator[str]:
    yield ("Fixed layouts and `auto` run alternately in the same processes, so that all see the "
           "same machine; times are of the slowest rank, forward and backward. "
           f"{NODES} emulated nodes of one rank, {report['rate'] / 1e6:.0f} Mbit/s.")
    for name in [n for n in REGIMES if n in report]:
        found = report[name]
        times = [*sorted(found["fixed"].items(), key=lambda item: item[1]),
                 ("auto, exploring included", found["auto"]),
                 ("auto, after exploring", found["auto_settled"])]
        yield f"## {name}"
        yield columns(times, {"layout": "{0[0]}",
                              "ms per step": lambda item: f"{1e3 * item[1]:.1f}"})
        yield (f"Explored {found['explored']} of {found['steps']} steps "
               f"({found['explored'] / found['steps']:.1%}).")
