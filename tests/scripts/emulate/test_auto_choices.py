"""What `auto` takes is within 5 % of the fastest, measured on emulated nodes whose links are what
waits: Parm's schedules, the layout, the all-to-all algorithm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import Topology, algorithms
from moe_plugin.config import from_dict
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.tuning.exchange_tuner import ExchangeTuner
from scripts.bench.sweep import timed_step
from scripts.emulate import why_not

pytestmark = [pytest.mark.distributed, pytest.mark.slow,
              pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]
LINK = {"rate_bit_s": 50e6}
AIM, ROUNDS = 1.05, 9
# k, f, pieces, tokens
PARM = {"many copies": (2, 1.0, 1, 512), "half a copy": (1, 0.5, 1, 1024),
        "in pieces": (2, 1.0, 4, 1024), "few tokens in pieces": (2, 1.0, 4, 16)}


def interleaved(calls: dict[str, Callable[[], float]], comm: TorchComm,
                rounds: int = ROUNDS) -> dict[str, float]:
    """The median of each one's time on the slowest rank, one of each in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + rounds):
        for name, call in calls.items():
            found[name].append(comm.agree_max([call()])[0])
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def schedules(case: tuple[int, float, int, int]) -> tuple[str, dict[str, float]]:
    """Which of Parm's schedules `auto` takes, and what each takes forward."""
    k, factor, pieces, tokens = case
    comm = TorchComm()
    comm.prepare(Topology.uniform(comm.size, 2))

    def layer(schedule: str) -> MoELayer:
        return MoELayer(from_dict({
            "model_dim": 256, "num_experts": 8, "experts": {"hidden_dim": 8},
            "router": {"top_k": k}, "dispatch": {"name": "padded", "capacity_factor": factor},
            "comm": {"all_to_all": "linear", "topology": "2"},
            "parallel": {"replicas": 2, "schedule": schedule, "d": pieces}}), comm)

    torch.manual_seed(comm.rank // 2)
    x_TD = torch.randn(tokens, 256)
    layers = {name: layer(name) for name in ("s1", "s2")}

    def call(one: MoELayer) -> float:
        comm.barrier()
        begun = time.perf_counter()
        with torch.no_grad():
            one(x_TD)
        return time.perf_counter() - begun

    chosen = "s2" if layer("auto").config.dispatch.name == "parm_s2" else "s1"
    return chosen, interleaved({name: lambda one=one: call(one) for name, one in layers.items()},
                               comm)


@pytest.mark.parametrize("case", PARM)
def test_parm(cluster: Callable[..., Any], case: str) -> None:
    chosen, seconds = cluster(2, 2, **LINK).run(schedules, PARM[case])[0]
    print(f"{case}: {chosen} of {seconds}")
    assert seconds[chosen] <= AIM * min(seconds.values())


def exchanges(size: int) -> tuple[str, dict[str, float]]:
    """Which all-to-all `auto` takes, and what each takes."""
    comm = TorchComm()
    comm.prepare(Topology.uniform(comm.size, comm.size // 2))
    x = torch.zeros(size // 4)
    for _ in range(60):
        algorithms.get("auto")(comm, x)
    tuner = ExchangeTuner.of(comm)

    def call(name: str) -> float:
        comm.barrier()
        begun = time.perf_counter()
        algorithms.get(name)(comm, x)
        return time.perf_counter() - begun

    return tuner.chosen(comm, size), interleaved(
        {name: lambda name=name: call(name) for name in tuner.names}, comm, 15)


@pytest.mark.parametrize("size", [1 << 12, 1 << 20])
def test_all_to_all(cluster: Callable[..., Any], size: int) -> None:
    chosen, seconds = cluster(2, 4, **LINK).run(exchanges, size)[0]
    print(f"{size} bytes: {chosen} of {seconds}")
    assert seconds[chosen] <= AIM * min(seconds.values())


def layouts(hidden: int, tokens: int) -> tuple[str, dict[str, float]]:
    """Which layout `auto` takes, and what it and some others take."""
    comm = TorchComm()
    comm.prepare(Topology.uniform(comm.size, 1))
    tree = {"model_dim": 128, "num_experts": 4, "experts": {"hidden_dim": hidden},
            "comm": {"all_to_all": "linear"}, "parallel": "auto", "tuner": {"max_d": 2}}
    torch.manual_seed(0)
    layer = MoELayer(from_dict(tree), comm)
    x_TD = torch.randn(tokens, 128, requires_grad=True)
    for _ in range(80):
        layer(x_TD).output.square().mean().backward()
    current = layer.routed_experts.current
    choices = {c.label: c for c in (current, LayoutChoice(r=0), LayoutChoice(r=1),
                                    LayoutChoice(r=1, d=2, d_backward=2))}
    return current.label, interleaved(
        {name: lambda c=c: timed_step(layer, x_TD, c)[0] for name, c in choices.items()}, comm)


@pytest.mark.parametrize("shape", [(16, 1024), (512, 64)], ids=str)
def test_layout(cluster: Callable[..., Any], shape: tuple[int, int]) -> None:
    chosen, seconds = cluster(2, 1, **LINK).run(layouts, *shape)[0]
    print(f"hidden, tokens {shape}: {chosen} of {seconds}")
    assert seconds[chosen] <= AIM * min(seconds.values())
