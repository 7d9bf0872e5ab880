"""Measure a pipeline of peers with unequal speeds and slow links on emulated nodes. Some of the
peers leave the pipeline and return. Each micro-batch is sent to peers that are idle (SWARM). The
study compares this pipeline with the fastest fixed pipeline of the same peers, and with a single
process. The part `peers` requires Linux and root, and takes about six minutes on an idle machine
with two CPU cores.
The part `rebalancing` is computed: it simulates several days in which many peers leave and return.
"""

from __future__ import annotations

import argparse
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
from torch import Tensor, nn

from moe_plugin import LocalComm, MoELayer
from moe_plugin.config import from_dict
from moe_plugin.output import weighted_loss
from moe_plugin.planner.peer_choice import BACKWARD
from moe_plugin.training.resilience.swarm import StagePeer, Swarm, make_stage
from moe_plugin.training.resilience.swarm.journeys import Member, SwarmMembers
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.swarm_rebalance import rebalance, rebalancing_body
from scripts.bench.toy import Sleep, loss_of, through
from scripts.emulate import EmulatedCluster
from scripts.emulate.ranks import fork, stop

TITLE = "A pipeline of peers that leave and return"
STAGES, WIDTH, WORDS, SEED = 3, 64, 50, 0
# micro-batches per step, sentences per micro-batch, tokens per sentence
BATCHES, SENTENCES, LENGTH = 24, 2, 64
SPEEDS = (1.0, 0.9, 0.8, 0.6, 0.5, 0.4, 0.4, 0.3)  # relative speeds of the peers
TASK_S = 0.05  # seconds of a micro-batch's forward pass through a stage, at speed 1
PORT, TIMEOUT_S = 29444, 10.0
RATE, DELAY_S = 50e6, 5e-3  # bandwidth of a node's link in bit/s, and its delay in one direction
# mean seconds for which a peer is present and absent, and number of peers that never leave
LIFETIME_S, ABSENCE_S, STEADY = 60.0, 15.0, 3
LOAD = 1 + BACKWARD  # cost of a micro-batch at each stage, in forward passes


class StagePart(nn.Module):
    """A residual block with experts, which is one stage of the pipeline. The first stage also
    contains the embedding, and the last stage also contains the output layer.
    """

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
            # a backward pass repeats the forward pass, which has already waited once
            x = Sleep.apply(x, self.seconds, self.seconds * (BACKWARD - 1))
        return x, weighted_loss(out.losses, {"gshard": 0.01}) / BATCHES


def parts(speed: float | None) -> list[Any]:
    """Return functions that build the stages of the pipeline.

    Args:
        speed: speed of the peer. None builds stages without a delay.
    """
    return [partial(StagePart, stage, TASK_S / speed if speed else 0.0) for stage in range(STAGES)]


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Return sentences in which a word usually determines the next word."""
    dice = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (BATCHES, SENTENCES, LENGTH + 1), generator=dice)
    for i in range(1, LENGTH + 1):
        follows = torch.rand(BATCHES, SENTENCES, generator=dice) < 0.9  # noqa: PLR2004
        words[..., i] = torch.where(follows, (3 * words[..., i - 1] + 1) % WORDS, words[..., i])
    return [(ids[:, :-1], ids[:, 1:]) for ids in words]


OPTIMIZER, loss = partial(torch.optim.SGD, lr=0.5), partial(loss_of, BATCHES)


def alone(steps: int) -> list[float]:
    """Return the losses of single-process training."""
    modules = [make_stage(parts(None), number, SEED) for number in range(STAGES)]
    optimizer = OPTIMIZER([p for module in modules for p in module.parameters()])
    found = []
    for step in range(steps):
        total = 0.0
        for x, target in batches(step):
            y, balance = through(modules, x)
            all_of_it = loss(y, target) + balance
            all_of_it.backward()
            total += float(all_of_it.detach())
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


# -- fixed pipelines


def best_fixed(speeds: Sequence[float]) -> tuple[float, tuple[int, ...]]:
    """Return (micro-batches per second, stage of each peer) for the fastest fixed pipeline.

    All peers of a stage process the same number of micro-batches. The search includes pipelines in
    which some peers are not used. An unused peer has the stage -1.
    """
    def rate(places: tuple[int, ...]) -> float:
        stages = [[s for s, place in zip(speeds, places, strict=True) if place == stage]
                  for stage in range(STAGES)]
        return min(len(own) * min(own, default=0.0) for own in stages) / (LOAD * TASK_S)

    return max((rate(places), places)
               for places in itertools.product(range(-1, STAGES), repeat=len(speeds)))


class Fixed(SwarmMembers):
    """The members of a swarm in which each peer has a fixed stage. Peers with the same stage take
    turns.

    Args:
        stage_of: the stage of each peer, by host name.
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


def trace(peer: int) -> Iterator[tuple[float, float]]:
    """Yield pairs (seconds of presence, seconds of absence) of a peer indefinitely."""
    dice = random.Random(f"{SEED} {peer}")
    while True:
        yield dice.expovariate(1 / LIFETIME_S), dice.expovariate(1 / ABSENCE_S)


def peer_rank(trainer: str, host: str, speed: float, lives: list[tuple[float, float]]) -> None:
    """Serve as a peer until the trainer has ended. The peer leaves and returns at the planned
    times.
    """
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
    """Train for the given number of seconds and return the measurements of the run."""
    torch.set_num_threads(1)
    swarm = Swarm(STAGES, host=host, port=PORT, wire=way["wire"], seed=SEED, timeout_s=TIMEOUT_S,
                  rebalance_s=way["rebalance_s"],
                  members=Fixed(way["stage_of"]) if way["stage_of"] else None)
    swarm.wait_for(way["peers"])
    losses = [sum(swarm.step(batches(0)).losses)]  # opens connections and measures throughputs
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
    """Run one node, which is the trainer or a peer."""
    logging.getLogger("moe_plugin").setLevel(logging.ERROR)
    number = int(os.environ["RANK"])
    if number == 0:
        return train_rank(addresses[0], args.seconds, way)
    host, speed = addresses[number], SPEEDS[number - 1]
    if way["stage_of"] and host not in way["stage_of"]:
        return None
    lives = [(1e9, 0.0)]
    if way["vanish"] and number > 1 + STEADY:
        lives = list(itertools.islice(trace(number), 1000))
    return peer_rank(addresses[0], host, speed, lives)


# by the key in the file of numbers: a text, and the settings
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fixed": ("`fixed`", {"stage_of": True, "wire": "fp8"}),
    "each to who is free": ("each micro-batch to free peers", {"wire": "fp8"}),
    "the same, boundaries in fp32": ("the same, activations sent in float32", {"wire": "none"}),
    "the same, peers vanish": ("the same, peers leave and return", {
        "wire": "fp8", "vanish": True}),
    "the same, and move": ("the same, peers also move between stages", {
        "wire": "fp8", "vanish": True, "rebalance_s": 5.0}),
}


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one way to use the peers (swarm or fixed pipeline)."""
    way = {"stage_of": None, "vanish": False, "rebalance_s": None, "peers": len(SPEEDS),
           **WAYS[name][1]}
    with EmulatedCluster(1 + len(SPEEDS), 1, RATE, DELAY_S) as cluster:
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


def present(places: Sequence[int], seconds: float) -> float:
    """Return the fraction of time during which all peers of a fixed pipeline are present."""
    lost: list[tuple[float, float]] = []
    for i, place in enumerate(places):
        now = 0.0
        for life_s, absence_s in trace(1 + i) if place >= 0 and i > STEADY - 1 else ():
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
    return {"rows": rows, "rate": RATE, "delay": DELAY_S, "lifetime": LIFETIME_S,
            "absence": ABSENCE_S, "steady": STEADY, "seconds": args.seconds,
            "fixed": {"rate": rate, "places": list(places),
                      "present": present(places, args.seconds)}}


def per_second(row: dict[str, Any]) -> float:
    return row["steps"] * BATCHES / row["seconds"]


def body(found: dict[str, Any]) -> list[str]:
    fixed = per_second(found["rows"][0])
    ideal = sum(SPEEDS) / STAGES / LOAD / TASK_S
    return page(
        __name__, found, ideal=ideal, still=found["fixed"]["present"] * fixed,
        vanishing=per_second(found["rows"][3]), moving=per_second(found["rows"][4]),
        places=", ".join(f"{s} at {'no stage' if p < 0 else f'stage {p}'}"
                         for s, p in zip(SPEEDS, found["fixed"]["places"], strict=True)),
        ways=[{**row, "text": WAYS[row["way"]][0], "per_second": per_second(row), "base": fixed,
               "ideal": ideal} for row in found["rows"]])


OPTIONS = {"seconds": Option(60.0, "seconds of each run", quick=2.0)}
PARTS = {"peers": (measure, body), "rebalancing": (rebalance, rebalancing_body)}
