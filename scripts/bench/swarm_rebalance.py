"""Simulate the rebalancing experiment of SWARM (Ryabinin et al. 2023, section 4.4).

In this experiment, the peers of a pipeline leave and return while its throughput is measured. The
throughput is reported relative to that of the best placement of the peers that are present. The
stage of a new peer, and the peer that moves to another stage, are chosen by the code that a trainer
runs (`resilience.swarm.members.SwarmMembers`).
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import random
from dataclasses import dataclass
from typing import Any

from moe_plugin.training.resilience.swarm.journeys import Member, SwarmMembers
from scripts.bench.report import columns, page


@dataclass(frozen=True)
class Experiment:
    """Peers of equal speed that leave and return.

    Attributes:
        peers: total number of peers, present or absent.
        life_s: mean duration of a peer's presence in seconds. The duration has an exponential
            distribution.
        absence_s: mean duration of a peer's absence in seconds, exponentially distributed.
        load_s: time in seconds that a new or moved peer needs to load weights. A peer that is
            loading weights processes nothing.
        lives: duration of the experiment divided by the mean duration of a peer's presence.
    """

    stages: int = 4
    peers: int = 80
    life_s: float = 3600.0
    absence_s: float = 900.0
    load_s: float = 20.0
    lives: float = 100.0

    @property
    def seconds(self) -> float:
        """The duration of the experiment in seconds."""
        return self.lives * self.life_s


@dataclass(frozen=True)
class Rebalanced:
    """The result for one method of placing peers.

    Attributes:
        share: throughput of the slowest stage divided by the throughput of the best placement of
            the peers that are present. Both throughputs are summed over time.
        moves: number of times that a peer moved to another stage.
    """

    share: float
    moves: int


def simulate(about: Experiment, rebalance_s: float | None, *, random_stage: bool = False,
             seed: int = 0) -> Rebalanced:
    """Simulate peers that join, process micro-batches, and leave.

    Args:
        about: the experiment.
        rebalance_s: time between consecutive moves in seconds. None means that peers never move.
        random_stage: whether new peers are placed at a random stage instead of the slowest stage.
        seed: random seed for the times at which peers leave and return.
    """
    lives = [random.Random(f"{seed} {peer}") for peer in range(about.peers)]
    dice, members = random.Random(seed), SwarmMembers(about.stages, seed)
    stage_of: dict[int, int] = {}
    loading: dict[int, float] = {}
    events: list[tuple[float, int, str]] = [(0.0, peer, "comes") for peer in range(about.peers)]
    if rebalance_s is not None:
        events.append((rebalance_s, -1, "rebalances"))
    heapq.heapify(events)
    now, reached, best, moves = 0.0, 0.0, 0.0, 0
    while now < about.seconds:
        then, peer, what = heapq.heappop(events)
        then = min(then, about.seconds)
        if now > about.load_s:  # all peers load at the beginning, which is not counted
            slowest, ideal = _throughputs(about, stage_of, loading)
            reached, best = reached + slowest * (then - now), best + ideal * (then - now)
        now = then
        if what == "comes":
            member = Member((str(peer), 0), 1.0, 1.0)
            stage = dice.randrange(about.stages) if random_stage else members.place(member)
            members.serve(member, stage)
            stage_of[peer] = stage
            _load(about, events, loading, peer, now)
            heapq.heappush(events, (now + lives[peer].expovariate(1 / about.life_s), peer, "goes"))
        elif what == "goes":
            members.leave(stage_of.pop(peer), (str(peer), 0))
            loading.pop(peer, None)
            heapq.heappush(events, (now + lives[peer].expovariate(1 / about.absence_s), peer,
                                    "comes"))
        elif what == "loaded":
            if loading.get(peer) == now:
                del loading[peer]
        else:
            heapq.heappush(events, (now + rebalance_s, -1, "rebalances"))
            if (move := members.best_move()) is not None:
                member, old, new = move
                members.leave(old, member.address)
                members.serve(member, new)
                moves, stage_of[int(member.address[0])] = moves + 1, new
                _load(about, events, loading, int(member.address[0]), now)
    return Rebalanced(reached / best, moves)


def _load(about: Experiment, events: list[tuple[float, int, str]], loading: dict[int, float],
          peer: int, now: float) -> None:
    loading[peer] = now + about.load_s
    heapq.heappush(events, (loading[peer], peer, "loaded"))


def _throughputs(about: Experiment, stage_of: dict[int, int], loading: dict[int, float]
                 ) -> tuple[int, int]:
    """Return the number of peers that serve the slowest stage in the current placement, and in the
    best placement of all present peers.
    """
    serving = [0] * about.stages
    for peer, stage in stage_of.items():
        serving[stage] += peer not in loading
    return min(serving), len(stage_of) // about.stages


LIVES_S = (900.0, 3600.0, 4 * 3600.0)  # mean times of presence
# by name: where new peers are placed, and how often a peer may move
PLACES: dict[str, dict[str, Any]] = {
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
    shares = {(row["places"], row["life"]): row["share"] for row in rows}
    return page(__name__, about, table=columns(PLACES, {"placement of new peers": str, **{
        f"mean presence {life / 60:g} min": lambda name, life=life: f"{shares[name, life]:.1%}"
        for life in LIVES_S}}))
