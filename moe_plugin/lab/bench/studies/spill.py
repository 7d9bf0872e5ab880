"""Overloaded experts on an emulated cluster: rows spilled to other ranks against the plain layer.

Needs Linux and root, and about 8 minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.config import from_dict
from moe_plugin.lab.bench.report import paragraph, table
from moe_plugin.lab.bench.study import ROOT, Option
from moe_plugin.lab.emulate import EmulatedCluster
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.spill import POLICIES as ALL_POLICIES
from moe_plugin.routing import finish_step

NODES, EXPERTS, WIDTH, HIDDEN = 4, 8, 256, 256
# what decides whether a call spills
CLUSTER, DEVICE = "configs/clusters/emulated.yaml", "configs/devices/cpu_core.yaml"
# tokens of a rank, and the part of them that goes to the first expert; the others share the rest
LOADS: dict[str, tuple[int, float]] = {
    "half of the tokens to one expert": (2048, 0.5), "a quarter to one expert": (2048, 0.25),
    "even": (2048, 1 / EXPERTS), "few tokens, half to one expert": (64, 0.5),
}
HOT = next(iter(LOADS))
STANDING = "standing"  # has a memory of earlier calls, and so a layer of its own for each load
POLICIES = tuple(policy for policy in ALL_POLICIES if policy != STANDING)
BESIDE = ("never", "least_loaded")  # `standing` is measured next to these
WARM_UP = REPLAN = 2  # rounds that do not count; steps from one placement to the next


def make_layer(**parallel: Any) -> MoELayer:
    """A layer whose router sends a token to the expert that its first elements name. parallel:
    settings of this section.
    """
    layer = MoELayer(from_dict({
        "model_dim": WIDTH, "num_experts": EXPERTS, "router": {"top_k": 1},
        "experts": {"hidden_dim": HIDDEN}, "comm": {"cluster": str(ROOT / CLUSTER)},
        "parallel": {"mode": "fixed", **parallel}, "tuner": {"device": str(ROOT / DEVICE)}
    }), TorchComm())
    with torch.no_grad():
        layer.router.weight_ED.copy_(torch.eye(EXPERTS, WIDTH) * 30)
    return layer


def make_tokens(rank: int, round_: int, load: str) -> torch.Tensor:
    """Tokens [T, D] of a rank for one round; the same for every policy."""
    tokens, share = LOADS[load]
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    parts = torch.full((EXPERTS,), (1 - share) / (EXPERTS - 1))
    parts[0] = share
    ids_T = torch.multinomial(parts, tokens, replacement=True, generator=generator)
    x_TD = torch.randn(tokens, WIDTH, generator=generator)
    x_TD[:, :EXPERTS] = torch.nn.functional.one_hot(ids_T, EXPERTS).float()
    return x_TD.requires_grad_()


def step(layer: MoELayer, x_TD: torch.Tensor, policy: str) -> tuple[float, int]:
    """Seconds of forward and backward, which all ranks begin together; rows computed here."""
    layer.comm.barrier()
    start = time.perf_counter()
    out = layer(x_TD, choice=LayoutChoice(r=1, spill=policy))
    out.output.square().mean().backward()
    seconds = time.perf_counter() - start
    layer.zero_grad(set_to_none=True)
    x_TD.grad = None  # or the next policy would add to it
    return seconds, out.stats.rows


def run_times(rounds: int) -> dict[str, dict[str, list[tuple[float, int]]]]:
    """One rank: all policies alternately in every round, by load; (seconds, rows) of each step."""
    torch.set_num_threads(1)
    layer = make_layer()
    found: dict[str, dict[str, list[tuple[float, int]]]] = {
        load: {policy: [] for policy in POLICIES} for load in LOADS}
    for round_ in range(WARM_UP + rounds):
        for load, by_policy in found.items():
            x_TD = make_tokens(layer.comm.rank, round_, load)
            # each policy comes first, second and last equally often
            turn = round_ % len(POLICIES)
            for policy in (*POLICIES[turn:], *POLICIES[:turn]):
                one = step(layer, x_TD, policy)
                if round_ >= WARM_UP:
                    by_policy[policy].append(one)
    return found


def run_standing(rounds: int) -> dict[str, dict[str, list[tuple[float, int]]]]:
    """One rank: `standing` and others alternately in every round, by load; (seconds, rows) of each
    step, and as "place" (seconds, experts with replicas) of each placement of replicas.
    """
    torch.set_num_threads(1)
    plain = make_layer()
    stand = {load: make_layer(spill=STANDING, replan=REPLAN) for load in LOADS}
    found: dict[str, dict[str, list[tuple[float, int]]]] = {
        load: {policy: [] for policy in (*BESIDE, STANDING, "place")} for load in LOADS}
    for round_ in range(WARM_UP + rounds):
        for load, by_policy in found.items():
            x_TD, order = make_tokens(plain.comm.rank, round_, load), (*BESIDE, STANDING)
            turn = round_ % len(order)
            for policy in (*order[turn:], *order[:turn]):
                layer = stand[load] if policy == STANDING else plain
                one = step(layer, x_TD, policy)
                if round_ >= WARM_UP:
                    by_policy[policy].append(one)
            one = place(stand[load])
            if round_ >= WARM_UP and (round_ + 1) % REPLAN == 0:
                by_policy["place"].append(one)
    return found


def place(layer: MoELayer) -> tuple[float, int]:
    """Seconds of the end of a step, in which replicas may be placed; experts that have some."""
    layer.comm.barrier()
    start = time.perf_counter()
    finish_step(layer)
    seconds = time.perf_counter() - start
    return seconds, len(layer.layouts.available.replicas.standing.shares)


def run_memory(policy: str, steps: int = 5) -> float:
    """One rank: bytes by which its memory grows at most in a step under the hot load."""
    torch.set_num_threads(1)
    layer = make_layer()
    step(layer, make_tokens(layer.comm.rank, 0, "even"), policy)
    inputs = [make_tokens(layer.comm.rank, number, HOT) for number in range(steps)]
    # Linux forgets the peak so far
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = memory("VmRSS")
    for x_TD in inputs:
        step(layer, x_TD, policy)
    return memory("VmHWM") - before


def memory(field: str) -> float:
    """Bytes of a field of this process's status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def summary(ranks: list[dict[str, Any]], load: str,
            policies: tuple[str, ...] = POLICIES) -> dict[str, dict[str, float]]:
    """By policy: median seconds of the slowest rank, plain over it in the same rounds (median and
    quartiles), and rows of the busiest rank.
    """
    slowest = {policy: [max(rank[load][policy][i][0] for rank in ranks)
                        for i in range(len(ranks[0][load][policy]))] for policy in policies}
    found = {}
    for policy, seconds in slowest.items():
        ratios = [plain / s for plain, s in zip(slowest["never"], seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows = [max(rank[load][policy][i][1] for rank in ranks) for i in range(len(seconds))]
        found[policy] = {"seconds": statistics.median(seconds), "speedup": middle,
                         "lower_quartile": low, "upper_quartile": high,
                         "rows": statistics.median(rows)}
    return found


def standing_lines(report: dict[str, Any]) -> list[str]:
    """Of `standing`, which is measured by itself."""
    part = report[STANDING]
    rows = [[load, f"`{policy}`", *cells(by_policy[policy])]
            for load, by_policy in part["times"].items() for policy in (*BESIDE, STANDING)]
    placed = [[load, f"{1e3 * found['seconds']:.2f}", f"{found['rows']:.0f}"]
              for load, by_policy in part["times"].items() for found in [by_policy["place"]]]
    return [
        "## Replicas that stand", "",
        paragraph(
            f"`standing` places replicas every {REPLAN} steps here, by the loads of these steps. "
            "Measured by itself (`--parts standing`), alternately with two of the others: "
            f"{part['rounds']} rounds; load average before and after: {part['load']}. Times of "
            "different parts of this page are of other runs."), "",
        *table(("load", "spill", "ms", "plain / this (quartiles)", "rows of the busiest rank"),
               rows).splitlines(), "",
        paragraph("A placement, at the end of a step: how long it takes, and how many experts then "
                  "have replicas. It moves no weights: they are lent in the next call, whose time "
                  "is part of the table above."), "",
        *table(("load", "ms", "experts with replicas"), placed).splitlines(), ""]


def cells(found: dict[str, float]) -> list[str]:
    """Of a policy's summary: time, speedup, rows."""
    return [f"{1e3 * found['seconds']:.1f}",
            f"{found['speedup']:.3f} ({found['lower_quartile']:.3f} to "
            f"{found['upper_quartile']:.3f})", f"{found['rows']:.0f}"]


def page(report: dict[str, Any]) -> str:
    """Tables."""
    if "times" not in report:
        return "\n".join(standing_lines(report))
    lines = [
        "# Overloaded experts on an emulated cluster", "",
        paragraph(
            "Made by `moe-plugin bench spill`. One layer runs forward and backward with "
            "each value of `parallel.spill` alternately, in the same processes and on the same "
            "tokens, so that all see the same machine; times are of the slowest rank. See "
            "[overloaded experts](../overload.md) for what the values mean."), "",
        paragraph(
            f"{NODES} emulated nodes of one rank, {report['rate'] / 1e6:.0f} Mbit/s; {EXPERTS} "
            f"experts, width {WIDTH}, inner width {HIDDEN}, k = 1, float32; median of "
            f"{report['rounds']} rounds; load average before and after: {report['load']}. Whether "
            f"a call spills is decided from its own load by `{CLUSTER}` and `{DEVICE}`."), "",
    ]
    for load, by_policy in report["times"].items():
        tokens, _ = LOADS[load]
        rows = [[f"`{policy}`", *cells(found)] for policy, found in by_policy.items()]
        lines += [f"## {load[0].upper()}{load[1:]}, {tokens} tokens on each rank", "",
                  *table(("spill", "ms", "plain / this (quartiles)", "rows of the busiest rank"),
                         rows).splitlines(), ""]
    lines += standing_lines(report) if STANDING in report else []
    rows = [[f"`{policy}`", f"{size / 2**20:.1f}"] for policy, size in report["memory"].items()]
    weights = 2 * WIDTH * HIDDEN * 4 / 2**20
    lines += ["## Memory", "",
              paragraph("What a step under the first load adds to the memory of the busiest rank, "
                        f"at most. An expert's weights are {weights:.1f} MiB here."), "",
              *table(("spill", "MiB"), rows).splitlines()]
    return "\n".join(lines) + "\n"


def standing(rate: float, rounds: int) -> dict[str, Any]:
    """The numbers of `standing`."""
    before = os.getloadavg()[0]
    with EmulatedCluster(NODES, 1, rate_bit_s=rate) as cluster:
        ranks = cluster.run(run_standing, rounds, timeout_s=60 + 30 * rounds)
    times: dict[str, dict[str, Any]] = {}
    for load in LOADS:
        times[load] = summary(ranks, load, (*BESIDE, STANDING))
        each = [rank[load]["place"] for rank in ranks]
        times[load]["place"] = {
            "seconds": statistics.median(max(one[0] for one in at)
                                         for at in zip(*each, strict=True)),
            "rows": statistics.median(one[1] for one in each[0])}
    return {"times": times, "rounds": rounds,
            "load": [round(before, 1), round(os.getloadavg()[0], 1)]}


def others(rate: float, rounds: int) -> dict[str, Any]:
    """The numbers of all other policies."""
    before = os.getloadavg()[0]
    with EmulatedCluster(NODES, 1, rate_bit_s=rate) as cluster:
        ranks = cluster.run(run_times, rounds, timeout_s=60 + 30 * rounds)
    peaks = {}
    for policy in POLICIES:
        with EmulatedCluster(NODES, 1, rate_bit_s=rate) as cluster:
            peaks[policy] = max(cluster.run(run_memory, policy, timeout_s=300))
    return {"rate": rate, "rounds": rounds,
            "times": {load: summary(ranks, load) for load in LOADS}, "memory": peaks,
            "load": [round(before, 1), round(os.getloadavg()[0], 1)]}


PARTS = ("others", STANDING)
OPTIONS = {
    "rounds": Option(40, "measured steps of each cell", quick=2),
    "rate": Option(200e6, "bit/s of a node's link", quick=1e9),
    "parts": Option(PARTS, "of the page; the numbers of the others stay", choices=PARTS),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts."""
    found = others(args.rate, args.rounds) if "others" in args.parts else {}
    return {**found, **({STANDING: standing(args.rate, args.rounds)}
                        if STANDING in args.parts else {})}


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Parts that were not measured again stay, with their load."""
    return {**old, **(new if "times" in new else {STANDING: new[STANDING]})}
