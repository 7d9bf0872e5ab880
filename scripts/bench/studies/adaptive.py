"""Compare `parallel: auto` with every fixed layout on an emulated cluster.

The study requires Linux and root, and takes about 20 minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from moe_plugin import MoELayer, TorchComm
from moe_plugin.config import from_dict
from moe_plugin.planner.choice import legal_choices
from scripts.bench.report import bullets, layout_in_words, page
from scripts.bench.study import Option
from scripts.bench.sweep import Ranks, Sweep, one_step, slowest
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
CHOICES = list(legal_choices(EXPERTS, NODES, degrees=(1, 2)))
OPTIONS = {
    "steps": Option(120, "number of steps of each run with auto", quick=30),
    "most-steps": Option(2000, "leave out runs with more steps than this", quick=100),
    "rate": Option(200e6, "bandwidth of a node's link in bit/s", quick=1e9),
}


def steps_of(at: argparse.Namespace) -> tuple[int, int]:
    """Return the total number of steps of a regime, and the number of steps between measurements of
    the fixed layouts.
    """
    regime = REGIMES[at.regime]
    return regime.get("steps", at.steps), regime.get("every", EVERY)


def tokens_at(regime: dict[str, Any], step: int, steps: int) -> int:
    """Return the number of tokens per rank. The number of tokens is constant, or alternates twice
    between two loads.
    """
    loads = regime["tokens"]
    return loads[step * 2 * len(loads) // steps % len(loads)]


def run_regime(at: argparse.Namespace) -> dict[str, Any]:
    """On one rank, run forward and backward passes with `auto`, and at regular intervals with each
    fixed layout.

    Each fixed layout runs two steps, and only the second step is timed. The first step warms up
    buffers and connections, because they are always warm for `auto`. Fixed layouts are not measured
    in the first step after the load has changed.
    """
    regime = REGIMES[at.regime]
    tree: dict[str, Any] = {
        "model_dim": WIDTH, "num_experts": EXPERTS, "router": {"top_k": 1},
        "experts": {"hidden_dim": regime["hidden"]}, "losses": {"switch": 0.01}
    }
    comm = TorchComm()
    fixed, auto = MoELayer(from_dict(tree), comm), MoELayer(
        from_dict({**tree, "parallel": "auto", "tuner": {"max_d": 2}}), comm)
    steps, every = steps_of(at)
    seconds: dict[str, list[float]] = {"auto": []}
    labels = []
    for step in range(steps):
        tokens = tokens_at(regime, step, steps)
        found, label = one_step(auto, tokens, None)
        seconds["auto"].append(found)
        labels.append(label)
        for choice in CHOICES if step % every == every // 2 else ():
            one_step(fixed, tokens, choice)
            seconds.setdefault(choice.label, []).append(one_step(fixed, tokens, choice)[0])
    return {
        "seconds": seconds, "labels": labels, "explored": auto.routed_experts.tuner.tuner.explored,
        "decisions": [d.as_dict() for d in auto.routed_experts.tuner.tuner.log]
    }


def mean_over_loads(seconds: list[float], loads: list[int],
                    counted: list[bool] | None = None) -> float | None:
    """Compute the mean time for each load, and return the mean over all loads. Return None if no
    steps are selected.
    """
    counted = counted or [True] * len(seconds)
    by_load: dict[int, list[float]] = {}
    for found, load, ok in zip(seconds, loads, counted, strict=True):
        if ok:
            by_load.setdefault(load, []).append(found)
    means = list(map(statistics.fmean, by_load.values()))
    return statistics.fmean(means) if means else None


def row(at: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """For each layout and for `auto`, return the mean time over the steps. The mean gives all loads
    the same weight.

    For `auto`, return two means: over all steps, and over the steps in which it does not explore
    layouts.
    """
    (steps, every), first = steps_of(at), ranks[0]
    loads = [tokens_at(REGIMES[at.regime], step, steps) for step in range(steps)]
    fixed = {label: mean_over_loads(slowest(ranks, label), loads[every // 2::every])
             for label in first["seconds"] if label != "auto"}
    seconds, settled = slowest(ranks, "auto"), _settled(first, steps)
    return {
        "fixed": fixed, "best": min(fixed, key=fixed.get),
        "auto": mean_over_loads(seconds[1:], loads[1:]),
        "auto_settled": mean_over_loads(seconds[1:], loads[1:], settled[1:]),
        "explored": first["explored"], "steps": steps, "decisions": first["decisions"],
        "layouts": {label: first["labels"].count(label) for label in sorted(set(first["labels"]))}}


SWEEP = Sweep(
    axes=lambda args: {"regime": [name for name in REGIMES if steps_of(argparse.Namespace(
        **vars(args), regime=name))[0] <= args.most_steps]},
    cluster=lambda at: EmulatedCluster(NODES, 1, rate_bit_s=at.rate),
    rank=run_regime, row=row, timeout_s=3000)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cells = SWEEP.measure(args)
    return {"rate": args.rate, **{cell.pop("regime"): cell for cell in cells}}


def _settled(rank: dict[str, Any], steps: int) -> list[bool]:
    """For each step, return whether `auto` does not explore layouts in this step."""
    settled, exploring = [], False
    events = {d["call"]: d["event"] for d in rank["decisions"]}
    for step in range(1, steps + 1):
        exploring = {"explore": True, "settle": False,
                     "keep": False}.get(events.get(step, ""), exploring)
        settled.append(not exploring)
    return settled


def body(report: dict[str, Any]) -> list[str]:
    shown = {name: regime for name, regime in REGIMES.items() if name in report}
    return page(
        __name__, report, tables=[part for name in shown for part in _table(name, report[name])],
        regimes=bullets(*(
            f"*{name}*: inner width {regime['hidden']:,}; "
            f"{' and '.join(f'{tokens:,}' for tokens in regime['tokens'])} tokens per rank"
            + (", which alternate twice during the run." if len(regime["tokens"]) > 1 else ".")
            for name, regime in shown.items())))


def _table(name: str, found: dict[str, Any]) -> list[str]:
    fixed = sorted(found["fixed"].items(), key=lambda item: item[1])
    return page(__name__, found, "regime", name=name, times=[
        *((layout_in_words(label), seconds) for label, seconds in fixed),
        ("auto, exploring included", found["auto"]),
        ("auto, after exploring", found["auto_settled"])])
