"""Measure a layer with overloaded experts on an emulated cluster. Layers whose rows spill to other
ranks are compared with the plain layer.

The study requires Linux and root, and takes about 8 minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial
from typing import Any

import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.config import from_dict
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.spill import POLICIES as ALL_POLICIES
from scripts.bench.measure import MIB, peak_extra_mib
from scripts.bench.report import columns, page
from scripts.bench.study import ROOT, Option
from scripts.bench.sweep import Ranks, Sweep, alternate, clean_step, slowest, timed_end
from scripts.emulate import EmulatedCluster

TITLE = "Overloaded experts on an emulated cluster"
NODES, EXPERTS, WIDTH, HIDDEN = 4, 8, 256, 256
# descriptions by which a layer decides whether a call spills
CLUSTER, DEVICE = "configs/clusters/emulated.yaml", "configs/devices/cpu_core.yaml"
# number of tokens per rank, and the share of tokens for the first expert; the other experts divide
# the rest equally
LOADS: dict[str, tuple[int, float]] = {
    "half of the tokens to one expert": (2048, 0.5), "a quarter to one expert": (2048, 0.25),
    "even": (2048, 1 / EXPERTS), "few tokens, half to one expert": (64, 0.5),
}
HOT = next(iter(LOADS))
STANDING = "standing"  # depends on earlier calls, so it needs a separate layer for each load
POLICIES = tuple(policy for policy in ALL_POLICIES if policy != STANDING)
BESIDE = ("never", "least_loaded")  # policies that are measured together with `standing`
WARM_UP = REPLAN = 2  # untimed rounds; steps between two placements


def make_layer(**parallel: Any) -> MoELayer:
    """Return a layer whose router selects the expert from the first elements of each token.

    Args:
        parallel: settings of the `parallel` section.
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
    """Return the tokens [T, D] that a rank processes in one round. All policies receive the same
    tokens.
    """
    tokens, share = LOADS[load]
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    parts = torch.full((EXPERTS,), (1 - share) / (EXPERTS - 1))
    parts[0] = share
    ids_T = torch.multinomial(parts, tokens, replacement=True, generator=generator)
    x_TD = torch.randn(tokens, WIDTH, generator=generator)
    x_TD[:, :EXPERTS] = torch.nn.functional.one_hot(ids_T, EXPERTS).float()
    return x_TD.requires_grad_()


def step(layer: MoELayer, x_TD: torch.Tensor, policy: str) -> tuple[float, int]:
    """Run a forward and a backward pass. Return the time in seconds, and the number of rows that
    this rank computed.
    """
    seconds, stats = clean_step(layer, x_TD, LayoutChoice(r=1, spill=policy))
    return seconds, stats.rows


def run_rank(at: argparse.Namespace) -> dict[str, dict[str, list[Any]]]:
    """Measure all policies with one load on one rank. Return the times in seconds and the rows of
    all steps by policy.

    If `standing` is measured, the policy "place" contains the times of all placements of replicas,
    and the numbers of experts with replicas as its rows.
    """
    plain, stand = make_layer(), make_layer(spill=STANDING, replan=REPLAN)
    rounds = {policy: itertools.count() for policy in at.policies}

    def one(policy: str) -> tuple[float, int]:
        x_TD = make_tokens(plain.comm.rank, next(rounds[policy]), at.load)
        return step(stand if policy == STANDING else plain, x_TD, policy)

    def place() -> tuple[float, int]:
        return timed_end(stand), len(stand.routed_experts.layouts.replicas.standing.shares)

    sides = {policy: partial(one, policy) for policy in at.policies}
    stands = {"place": place} if STANDING in at.policies else {}
    found = alternate(sides | stands, at.rounds, WARM_UP, rotate=True)
    for name in stands:  # the ends of other steps place nothing
        found[name] = found[name][REPLAN - 1::REPLAN]
    return {what: {policy: [pair[part] for pair in pairs] for policy, pairs in found.items()}
            for part, what in enumerate(("seconds", "rows"))}


def run_memory(policy: str, steps: int = 5) -> float:
    """Return the maximum additional memory, in bytes, that this rank needs during a step with the
    hot load.
    """
    layer = make_layer()
    step(layer, make_tokens(layer.comm.rank, 0, "even"), policy)
    inputs = iter([make_tokens(layer.comm.rank, number, HOT) for number in range(steps)])
    return MIB * peak_extra_mib(lambda: step(layer, next(inputs), policy), torch.device("cpu"),
                                steps)


def summary(ranks: Ranks) -> dict[str, dict[str, float]]:
    """Return the statistics of the measured steps for each policy.

    The statistics are: the median time in seconds on the slowest rank; the time of the plain layer
    divided by the time of the policy in the same rounds (median and quartiles); and the number of
    rows on the busiest rank. For "place", the statistics are the time in seconds and the number of
    experts with replicas.
    """
    found, plain = {}, slowest(ranks, "never")
    for policy in ranks[0]["seconds"]:
        seconds = slowest(ranks, policy)
        busiest = map(max, zip(*(rank["rows"][policy] for rank in ranks), strict=True))
        found[policy] = {"seconds": statistics.median(seconds), "rows": statistics.median(busiest)}
        if policy != "place":
            ratios = [base / s for base, s in zip(plain, seconds, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            found[policy] |= {"speedup": middle, "lower_quartile": low, "upper_quartile": high}
    return found


SWEEP = Sweep(
    axes=lambda args: {"load": LOADS}, rank=run_rank, timeout_s=1200,
    cluster=lambda at: EmulatedCluster(NODES, 1, rate_bit_s=at.rate),
    row=lambda at, ranks: {"policies": summary(ranks)})


def times_of(policies: tuple[str, ...], args: argparse.Namespace) -> dict[str, Any]:
    cells = SWEEP.measure(argparse.Namespace(**vars(args), policies=policies))
    return {"rate": args.rate, "rounds": args.rounds,
            "times": {cell["load"]: cell["policies"] for cell in cells}}


def measure_others(args: argparse.Namespace) -> dict[str, Any]:
    """Measure times and memory of all policies except `standing`."""
    found, peaks = times_of(POLICIES, args), {}
    for policy in POLICIES:
        with EmulatedCluster(NODES, 1, rate_bit_s=args.rate) as cluster:
            peaks[policy] = max(cluster.run(run_memory, policy, timeout_s=300))
    return {**found, "memory": peaks}


CELLS = {"policy": "`{policy}`", "ms": "{seconds:ms.1}",
         "speed over `never` (quartiles)":
             "{speedup:.3f} ({lower_quartile:.3f} to {upper_quartile:.3f})",
         "share of the even load": "{share}",
         "rows of the busiest rank": "{rows:.0f}"}


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all rows. Each row contains the throughput divided by the throughput of an even load
    without a policy.
    """
    even = found["times"]["even"]["never"]["seconds"]
    return [{"load": load, "policy": policy, **one,
             "share": f"{even / one['seconds']:.0%}" if LOADS[load][0] == LOADS["even"][0] else ""}
            for load, by_policy in found["times"].items() for policy, one in by_policy.items()]


def others_part(found: dict[str, Any]) -> list[str]:
    rows = _rows(found)
    loads = [part for load in found["times"] for part in (
        f"## {load[0].upper()}{load[1:]}, {LOADS[load][0]:,} tokens on each rank",
        columns([row for row in rows if row["load"] == load], CELLS))]
    return page(__name__, found, loads=loads, peaks=found["memory"].items(),
                expert_bytes=2 * WIDTH * HIDDEN * 4)


def standing_part(found: dict[str, Any]) -> list[str]:
    rows = _rows(found)
    return page(
        __name__, found, "standing", placements=[r for r in rows if r["policy"] == "place"],
        policies=columns([r for r in rows if r["policy"] != "place"], {"load": "{load}", **CELLS}))


PARTS = {"others": (measure_others, others_part), STANDING: (
    partial(times_of, (*BESIDE, STANDING)), standing_part)}
OPTIONS = {
    "rounds": Option(40, "timed steps of each policy and load", quick=2),
    "rate": Option(200e6, "bandwidth of a node's link in bit/s", quick=1e9),
}
