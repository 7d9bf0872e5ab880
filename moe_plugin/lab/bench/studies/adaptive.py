"""`parallel: auto` against every fixed layout on an emulated cluster, and the effect of overlap.

Needs Linux and root, and about 20 minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm.exchange import FunctionExchange
from moe_plugin.config import from_dict
from moe_plugin.lab.bench.layouts import one_step, slowest
from moe_plugin.lab.bench.report import paragraph, pyplot, save_figure
from moe_plugin.lab.bench.study import Option
from moe_plugin.lab.emulate import EmulatedCluster
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.planner.units import show_time

NODES, EXPERTS, WIDTH = 4, 2, 256
EVERY = 6  # steps from one measurement of the fixed layouts to the next
REGIMES: dict[str, dict[str, Any]] = {
    "few tokens, big experts": {"hidden": 2048, "tokens": [64]},
    "many tokens, small experts": {"hidden": 64, "tokens": [2048]},
    "load drifts": {"hidden": 256, "tokens": [64, 2048]},
    "load drifts, 2,000 steps": {"hidden": 256, "tokens": [64, 2048], "steps": 2000, "every": 100},
}
OVERLAP = {"hidden": 1024, "tokens": 1024}
OPTIONS = {
    "steps": Option(120, "steps of each run with auto", quick=30),
    "most-steps": Option(2000, "leave out runs that are longer", quick=100),
    "rate": Option(200e6, "bit/s of a node's link", quick=1e9),
    "overlap-only": Option(False, "leave the regimes out"),
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
    torch.set_num_threads(1)
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
        "seconds": seconds, "labels": labels, "explored": auto.layouts.tuner.tuner.explored,
        "decisions": [d.as_dict() for d in auto.layouts.tuner.tuner.log]
    }


def run_overlap(d: int, steps: int) -> dict[str, Any]:
    """One rank: median step, and the spans of exchanges and experts of its last step."""
    torch.set_num_threads(1)
    comm = TorchComm()
    layer = MoELayer(
        from_dict({
            "model_dim": WIDTH, "num_experts": 4, "router": {"top_k": 1},
            "experts": {"hidden_dim": OVERLAP["hidden"]}
        }), comm)
    spans: list[tuple[str, float, float]] = []
    _trace(layer, spans)
    seconds = []
    for _ in range(steps):
        x = torch.randn(OVERLAP["tokens"], WIDTH)
        comm.barrier()
        spans.clear()
        start = time.perf_counter()
        with torch.no_grad():
            layer(x, choice=LayoutChoice(r=1, d=d))
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds),
        "spans": [(name, a - start, b - start) for name, a, b in spans]
    }


def _trace(layer: MoELayer, spans: list[tuple[str, float, float]]) -> None:
    """Record begin and end of exchanges and experts."""
    def timed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                spans.append((name, start, time.perf_counter()))
        return run

    layer.experts.forward = timed("experts", layer.experts.forward)
    for d in (1, 2, 4, 8):
        place = layer.layouts.available.at(LayoutChoice(r=1, d=d)).dispatcher.placement
        object.__setattr__(place, "algorithm",
                           FunctionExchange(timed("exchange", place.algorithm)))


def mean_over_loads(seconds: list[float], loads: list[int],
                    counted: list[bool] | None = None) -> float:
    """Mean of the means of each load."""
    counted = counted or [True] * len(seconds)
    by_load: dict[int, list[float]] = {}
    for found, load, ok in zip(seconds, loads, counted, strict=True):
        if ok:
            by_load.setdefault(load, []).append(found)
    return statistics.fmean(statistics.fmean(found) for found in by_load.values())


def measure_regimes(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Every fixed layout and auto: mean over the steps of each load, with equal weight.

    For auto over all its steps, and over those outside exploration.
    """
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


def _settled(rank: dict[str, Any], steps: int) -> list[bool]:
    """Which steps lie outside exploration."""
    settled, exploring = [], False
    events = {d["call"]: d["event"] for d in rank["decisions"]}
    for step in range(1, steps + 1):
        exploring = {"explore": True, "settle": False,
                     "keep": False}.get(events.get(step, ""), exploring)
        settled.append(not exploring)
    return settled


def measure_overlap(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """d = 1, 2, 4, 8 on a bandwidth-bound setting."""
    with EmulatedCluster(NODES, 1, rate_bit_s=args.rate) as cluster:
        runs = {d: cluster.run(run_overlap, d, 9, timeout_s=300) for d in (1, 2, 4, 8)}
    total = {
        name: statistics.fmean(sum(b - a for n, a, b in r["spans"] if n == name) for r in runs[1])
        for name in ("exchange", "experts")
    }
    report["overlap"] = {
        "exchange": total["exchange"], "experts": total["experts"],
        "seconds": {d: max(r["seconds"] for r in ranks) for d, ranks in runs.items()},
        "hidden_share": {
            d: statistics.fmean(hidden_share(r["spans"]) for r in ranks)
            for d, ranks in runs.items()
        },
        # of rank 0, for the plot
        "spans": {d: ranks[0]["spans"] for d, ranks in runs.items()}
    }


def hidden_share(spans: list[tuple[str, float, float]]) -> float:
    """Time in which exchange and experts run at once, over the smaller of their totals."""
    lanes = {name: [(a, b) for n, a, b in spans if n == name] for name in ("exchange", "experts")}
    both = sum(
        max(0.0,
            min(b, d) - max(a, c)) for a, b in lanes["exchange"] for c, d in lanes["experts"])
    return both / min(sum(b - a for a, b in lane) for lane in lanes.values())


def draw(report: dict[str, Any], path: Path) -> None:
    """Exchange and experts of rank 0 over time, by pieces; older numbers lack them."""
    spans = report["overlap"].get("spans")
    if spans is None:
        return
    figure, axes = pyplot().subplots(len(spans), 1, figsize=(9, 1.4 * len(spans)), sharex=True,
                                   layout="constrained")
    for axis, (d, items) in zip(axes, spans.items(), strict=True):
        for name, start, end in items:
            axis.barh([name], [1e3 * (end - start)], left=[1e3 * start],
                      color={"exchange": "tab:blue",
                             "experts": "tab:orange"}[name], edgecolor="white")
        axis.set_title(f"d = {d}", fontsize=9)
    axes[-1].set_xlabel("ms, forward, rank 0")
    axes[-1].set_xlim(left=0)
    save_figure(figure, path)


def page(report: dict[str, Any]) -> str:
    """Tables."""
    lines = [
        "# Adaptive layouts on an emulated cluster", "",
        paragraph(
            "Made by `moe-plugin bench adaptive`. Fixed layouts and `auto` run "
            "alternately in the same processes, so that all see the same machine; times are of the "
            "slowest rank, forward and backward."), "",
        paragraph(
            f"{NODES} emulated nodes of one rank, {report['rate'] / 1e6:.0f} Mbit/s; load average "
            f"before and after: {report['load']}."), ""
    ]
    for name in [n for n in REGIMES if n in report]:
        found = report[name]
        lines += [f"## {name}", "", "| layout | ms per step |", "|---|---|"]
        lines += [
            f"| {label} | {1e3 * s:.1f} |"
            for label, s in sorted(found["fixed"].items(), key=lambda item: item[1])
        ]
        lines += [
            f"| auto, exploring included | {1e3 * found['auto']:.1f} |",
            f"| auto, after exploring | {1e3 * found['auto_settled']:.1f} |", "",
            f"Explored {found['explored']} of {found['steps']} steps "
            f"({found['explored'] / found['steps']:.1%}).",
            ""
        ]
    found = report["overlap"]
    lines += [
        "## Overlap, forward", "",
        f"Exchange {show_time(found['exchange'])}, experts {show_time(found['experts'])} "
        "without overlap.",
        "",
        "| d | ms, median of 9 | share of the smaller one that overlaps the other (last run) |",
        "|---|---|---|"
    ]
    lines += [
        f"| {d} | {1e3 * s:.1f} | {found['hidden_share'][d]:.2f} |"
        for d, s in found["seconds"].items()
    ]
    return "\n".join([*lines, "", "![exchange and experts on rank 0](adaptive_overlap.png)"
                      ]) + "\n"


PLOTS = {"adaptive_overlap.png": draw}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Overlap, and the regimes."""
    report: dict[str, Any] = {"rate": args.rate}
    measure_overlap(args, report)
    if not args.overlap_only:
        measure_regimes(args, report)
    return report
