"""A pipeline of peers of unequal speed behind slow links, some of which vanish and come back, on
emulated nodes: each micro-batch by the peers that are free (SWARM), against the best fixed pipeline
of the same peers, and against one process. Part `peers` needs Linux and root, and about six minutes
on an idle machine with two processors. Part `rebalancing` is computed: days of many peers that
vanish and come back.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin import LocalComm, MoELayer
from moe_plugin.cli.figures import columns
from moe_plugin.config import from_dict
from moe_plugin.output import weighted_loss
from moe_plugin.planner.peer_choice import BACKWARD
from moe_plugin.training.resilience.swarm import StagePeer, Swarm, make_stage
from moe_plugin.training.resilience.swarm.members import Member, SwarmMembers
from scripts.bench.study import Option
from scripts.bench.swarm_rebalance import Experiment, simulate
from scripts.emulate import EmulatedCluster
from scripts.emulate.ranks import fork, stop

TITLE = "A pipeline of peers that come and go"
STAGES, WIDTH, WORDS, SEED = 3, 64, 50, 0
BATCHES, SENTENCES, LENGTH = 24, 2, 64  # of a step; of a micro-batch
SPEEDS = (1.0, 0.9, 0.8, 0.6, 0.5, 0.4, 0.4, 0.3)  # of the peers
TASK_S = 0.05  # a forward pass of one micro-batch through a stage, at speed 1
PORT, TIMEOUT_S = 29444, 10.0
LOAD = 1 + BACKWARD  # of a micro-batch at each stage, in forward passes


class Takes(torch.autograd.Function):
    """Passes what it gets, and takes time, as an accelerator of the peer's speed would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # noqa: D102
        ctx.seconds = seconds
        time.sleep(seconds)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        time.sleep(ctx.seconds * (BACKWARD - 1))  # the forward pass that comes with it took 1
        return grad, None


class StagePart(nn.Module):
    """A residual block of experts; the first stage embeds, the last one predicts."""

    def __init__(self, stage: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.first = nn.Embedding(WORDS, WIDTH) if stage == 0 else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoELayer(from_dict({
            "model_dim": WIDTH, "num_experts": 4, "experts": {"hidden_dim": 2 * WIDTH},
            "router": {"top_k": 2}, "losses": {"gshard": 0.01}}), LocalComm())
        self.last = nn.Linear(WIDTH, WORDS) if stage == STAGES - 1 else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        out = self.moe(self.norm(x))
        x = self.last(x + out.output)
        if self.seconds:
            x = Takes.apply(x, self.seconds)
        return x, weighted_loss(out.losses, {"gshard": 0.01}) / BATCHES


def parts(speed: float | None) -> list[Any]:
    """Makers of the stages. speed: of a peer; None: they take no time."""
    return [partial(StagePart, stage, TASK_S / speed if speed else 0.0) for stage in range(STAGES)]


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten()) / BATCHES


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Sentences in which a word says the next one, most of the time."""
    dice = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (BATCHES, SENTENCES, LENGTH + 1), generator=dice)
    for i in range(1, LENGTH + 1):
        follows = torch.rand(BATCHES, SENTENCES, generator=dice) < 0.9  # noqa: PLR2004
        words[..., i] = torch.where(follows, (3 * words[..., i - 1] + 1) % WORDS, words[..., i])
    return [(ids[:, :-1], ids[:, 1:]) for ids in words]


OPTIMIZER = partial(torch.optim.SGD, lr=0.5)


def alone(steps: int) -> list[float]:
    """Losses of one process."""
    modules = [make_stage(parts(None), number, SEED) for number in range(STAGES)]
    optimizer = OPTIMIZER([p for module in modules for p in module.parameters()])
    found = []
    for step in range(steps):
        total = 0.0
        for x, target in batches(step):
            balance = torch.zeros(())
            for module in modules:
                x, own = module(x)
                balance = balance + own
            all_of_it = loss(x, target) + balance
            all_of_it.backward()
            total += float(all_of_it.detach())
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


# -- fixed pipelines


def best_fixed(speeds: Sequence[float]) -> tuple[float, tuple[int, ...]]:
    """(micro-batches per second, stage of each peer) of the fastest pipeline in which the peers of
    a stage get equal numbers of micro-batches. Stages without peers, and peers without a stage
    (-1), are tried, too.
    """
    def rate(places: tuple[int, ...]) -> float:
        stages = [[s for s, place in zip(speeds, places, strict=True) if place == stage]
                  for stage in range(STAGES)]
        return min(len(own) * min(own, default=0.0) for own in stages) / (LOAD * TASK_S)

    return max((rate(places), places)
               for places in itertools.product(range(-1, STAGES), repeat=len(speeds)))


class Fixed(SwarmMembers):
    """Peers whose stage is planned, which take turns.

    Args:
        stage_of: by a peer's host.
    """

    def __init__(self, stage_of: dict[str, int]) -> None:
        super().__init__(STAGES, SEED)
        self.stage_of = stage_of

    def place(self, member: Member) -> int:
        """See `SwarmMembers`."""
        return self.stage_of[member.address[0]]

    def choose(self, stage: int, number: int, size: float, but: set) -> Any:
        """See `SwarmMembers`."""
        return self.stages[stage][number % len(self.stages[stage])]


# -- a run


def trace(args: argparse.Namespace, peer: int) -> Iterator[tuple[float, float]]:
    """(seconds of life, seconds of absence) of a peer, again and again."""
    dice = random.Random(f"{SEED} {peer}")
    while True:
        yield dice.expovariate(1 / args.lifetime), dice.expovariate(1 / args.absence)


def peer_rank(trainer: str, host: str, speed: float, lives: list[tuple[float, float]]) -> None:
    """Serve, vanish and come back as the trace says, until the trainer is gone."""
    def serve() -> None:
        torch.set_num_threads(1)
        StagePeer((trainer, PORT), parts(speed), OPTIMIZER, loss, host=host, throughput=speed,
                  timeout_s=TIMEOUT_S).run()

    for number, (life_s, absence_s) in enumerate(lives):
        process = fork(serve, None, number)
        end = time.monotonic() + life_s
        while time.monotonic() < end:
            if os.waitpid(process.pid, os.WNOHANG)[0]:
                return
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        stop([process])
        time.sleep(absence_s)


def train_rank(host: str, seconds: float, way: dict[str, Any]) -> dict[str, Any]:
    """Train for so long; the numbers of a run."""
    torch.set_num_threads(1)
    swarm = Swarm(STAGES, host=host, port=PORT, wire=way["wire"], seed=SEED, timeout_s=TIMEOUT_S,
                  rebalance_s=way["rebalance_s"])
    if way["stage_of"]:
        swarm.members = Fixed(way["stage_of"])
    swarm.wait_for(way["peers"])
    losses = [sum(swarm.step(batches(0)).losses)]  # connections, throughputs
    found = {"resent": 0, "redone": 0, "gone": 0, "moved": 0}
    start = time.monotonic()
    while (taken := time.monotonic() - start) < seconds:
        result = swarm.step(batches(len(losses)))
        losses.append(sum(result.losses))
        for name, value in (("resent", result.resent), ("redone", result.redone),
                            ("gone", len(result.gone)), ("moved", len(result.moved))):
            found[name] += value
    swarm.close()
    return {**found, "seconds": taken, "losses": losses}


def rank(addresses: list[str], args: argparse.Namespace, way: dict[str, Any]) -> Any:
    """One node: the trainer, or a peer."""
    logging.getLogger("moe_plugin").setLevel(logging.ERROR)
    number = int(os.environ["RANK"])
    if number == 0:
        return train_rank(addresses[0], args.seconds, way)
    host, speed = addresses[number], SPEEDS[number - 1]
    if way["stage_of"] and host not in way["stage_of"]:
        return None
    lives = [(1e9, 0.0)]
    if way["vanish"] and number > 1 + args.steady:
        lives = list(itertools.islice(trace(args, number), 1000))
    return peer_rank(addresses[0], host, speed, lives)


WAYS = {
    "fixed": {"stage_of": True, "wire": "fp8"},
    "each to who is free": {"wire": "fp8"},
    "the same, boundaries in fp32": {"wire": "none"},
    "the same, peers vanish": {"wire": "fp8", "vanish": True},
    "the same, and move": {"wire": "fp8", "vanish": True, "rebalance_s": 5.0},
}


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One way to use the peers."""
    way = {"stage_of": None, "vanish": False, "rebalance_s": None, "peers": len(SPEEDS),
           **WAYS[name]}
    with EmulatedCluster(1 + len(SPEEDS), 1, args.rate, args.delay) as cluster:
        addresses = [node.address for node in cluster.nodes]
        if way["stage_of"]:
            places = best_fixed(SPEEDS)[1]
            way["stage_of"] = {addresses[1 + i]: stage for i, stage in enumerate(places)
                               if stage >= 0}
            way["peers"] = len(way["stage_of"])
        ranks = cluster.start(rank, addresses, args, way, join=False)
        ends = cluster.collect(ranks, 3 * args.seconds + 60)
    if ends[0].error is not None:
        raise RuntimeError(ends[0].error)
    return {"way": name, **ends[0].value}


def present(args: argparse.Namespace, places: Sequence[int], seconds: float) -> float:
    """Share of the time in which all peers of a fixed pipeline are there."""
    lost: list[tuple[float, float]] = []
    for i, place in enumerate(places):
        now = 0.0
        for life_s, absence_s in trace(args, 1 + i) if place >= 0 and i > args.steady - 1 else ():
            lost.append((now + life_s, now + life_s + absence_s))
            now += life_s + absence_s
            if now > seconds:
                break
    ticks = [seconds * (i + 0.5) / 10000 for i in range(10000)]  # noqa: PLR2004
    return sum(not any(a <= t < b for a, b in lost) for t in ticks) / len(ticks)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows = [run(name, args) for name in WAYS]
    exact = alone(max(len(row["losses"]) for row in rows))
    for row in rows:
        row["difference"] = max(abs(a / b - 1) for a, b in zip(row["losses"], exact, strict=False))
        row["steps"], row["loss"] = len(row["losses"]) - 1, row.pop("losses")[-1]
    rate, places = best_fixed(SPEEDS)
    return {"rows": rows, "rate": args.rate, "delay": args.delay, "lifetime": args.lifetime,
            "absence": args.absence, "steady": args.steady, "seconds": args.seconds,
            "fixed": {"rate": rate, "places": list(places),
                      "present": present(args, places, args.seconds)}}


# -- rebalancing, simulated

LIVES_S = (900.0, 3600.0, 4 * 3600.0)  # means
PLACES: dict[str, dict[str, Any]] = {  # of newcomers, and how often a peer may move
    "at random, none moves": {"rebalance_s": None, "random_stage": True},
    "at random, moves every 300 s": {"rebalance_s": 300.0, "random_stage": True},
    "at random, moves every 60 s": {"rebalance_s": 60.0, "random_stage": True},
    "to the slowest stage, none moves": {"rebalance_s": None},
    "to the slowest stage, moves every 300 s": {"rebalance_s": 300.0},
    "to the slowest stage, moves every 60 s": {"rebalance_s": 60.0},
}


def rebalance(args: argparse.Namespace) -> list[Any]:
    about = Experiment()
    return [dataclasses.asdict(about), [
        {"places": name, "life": life, **dataclasses.asdict(simulate(
            dataclasses.replace(about, life_s=life, absence_s=life / 4), **way))}
        for name, way in PLACES.items() for life in LIVES_S]]


def rebalancing_body(found: list[Any]) -> list[str]:
    about, rows = found
    table = [{"places": name, **{life: row["share"] for row in rows if row["places"] == name
                                 for life in [row["life"]]}} for name in PLACES]
    return [
        "## Rebalancing, simulated",
        f"Computed by `moe-plugin bench swarm --parts rebalancing`: {about['peers']} peers of "
        f"equal speed, four fifths of them present on average, and {about['stages']} stages, for "
        f"{about['lives']:g} mean lives of a peer. A peer works for a time with an exponential "
        "distribution, and is gone for a quarter of that time on average. A newcomer, and a peer "
        f"that moves, loads weights for {about['load_s']:g} s. The decisions are those of the code "
        "that a trainer runs. Each number is the throughput of the slowest stage, over that of the "
        "best placement of the peers present at each moment.",
        columns(table, {"newcomers go": "{places}", **{
            f"peers work for {life / 60:g} min": lambda row, life=life: f"{row[life]:.1%}"
            for life in LIVES_S}}),
        "The paper's shares, quoted from memory, are 82.7 % without rebalancing, 95.8 % with a "
        "move every 300 s and 97.6 % with one every 60 s, on a trace of preemptible T4 that is not "
        "here. Newcomers at random are our assumption of its baseline. To send newcomers to the "
        "slowest stage, as our trainer does, gains most of it already.",
    ]


def per_second(row: dict[str, Any]) -> float:
    return row["steps"] * BATCHES / row["seconds"]


def body(found: dict[str, Any]) -> list[str]:
    fixed = per_second(found["rows"][0])
    ideal = sum(SPEEDS) / STAGES / LOAD / TASK_S
    still = found["fixed"]["present"] * fixed
    places = ", ".join(f"{s}: {'none' if p < 0 else p}"
                       for s, p in zip(SPEEDS, found["fixed"]["places"], strict=True))
    return [
        f"A model of {STAGES} stages, each with an MoE layer, is trained by {len(SPEEDS)} peers "
        "([how](../swarm.md)), each on an emulated node with a link of "
        f"{found['rate'] / 1e6:g} Mbit/s and {1e3 * found['delay']:g} ms, by a trainer on another. "
        f"Products take time alone: a stage {1e3 * TASK_S:g} ms for a micro-batch's forward pass, "
        f"{BACKWARD} times that for a backward pass, over the peer's speed: "
        f"{', '.join(map(str, SPEEDS))}. {BATCHES} micro-batches a step. Peers with all their time "
        f"in use, and no boundary between stages, would do {ideal:.2f} a second.",
        "`fixed`: the best pipeline of these peers in which the peers of a stage take turns, found "
        f"by trying all (speed: stage; {places}); predicted {found['fixed']['rate']:.2f} "
        "micro-batches a second. Peers vanish: each but the "
        f"{found['steady']} fastest works for {found['lifetime']:g} s and is gone for "
        f"{found['absence']:g} s, means of exponential distributions, the same times in both "
        "lines. Gone: peers that the trainer lost. Sent again: tasks. Computed again: backward "
        "passes that were summed and lost. Moved: peers, at most one every 5 s, in this "
        "measurement where the slowest stage gained a tenth by it. Difference: the "
        "largest of a "
        "step's loss from that of one process, relative.",
        columns(found["rows"], {
            "peers": "{way}", "micro-batches / s": lambda r: f"{per_second(r):.2f}",
            "over `fixed`": lambda r: f"{per_second(r) / fixed:.2f}",
            "of the ideal": lambda r: f"{per_second(r) / ideal:.0%}", "steps": "{steps}",
            "gone": "{gone}", "moved": "{moved}", "sent again": "{resent}",
            "computed again": "{redone}", "difference": "{difference:.1e}"}),
        "A fixed pipeline stands still while one of its peers is gone. In this minute all of them "
        f"are there for {found['fixed']['present']:.0%} of the time: at most {still:.2f} "
        "micro-batches a second, if a restart takes no time, of which the peers that vanish did "
        f"{per_second(found['rows'][3]) / still:.2f} times as many.",
    ]


OPTIONS = {
    "seconds": Option(60.0, "of each run", quick=2.0),
    "rate": Option(50e6, "bit/s of a node's link"),
    "delay": Option(5e-3, "s of a link, one way"),
    "lifetime": Option(60.0, "s, mean, of a peer that vanishes"),
    "absence": Option(15.0, "s, mean, until it is back"),
    "steady": Option(3, "peers that never vanish, the fastest ones"),
}

PARTS = {"peers": (measure, body), "rebalancing": (rebalance, rebalancing_body)}
