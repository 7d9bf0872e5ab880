"""SWARM's experiment with rebalancing, simulated: how much of the best throughput of the peers that
are there a pipeline reaches, if peers vanish and come back (Ryabinin et al. 2023, section 4.4).

The stages that newcomers get, and the peer that moves, are chosen by the code that a trainer runs
(`resilience.swarm.members.SwarmMembers`).
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from moe_plugin.training.resilience.swarm.members import Member, SwarmMembers


@dataclass(frozen=True)
class Experiment:
    """Peers of equal speed that vanish and come back.

    Attributes:
        stages: of the pipeline.
        peers: that there are, present or not.
        life_s, absence_s: means of exponential distributions.
        load_s: seconds for which a newcomer, and a peer that moves, loads weights and serves none.
        lives: mean lives of a peer that the experiment takes.
    """

    stages: int = 4
    peers: int = 80
    life_s: float = 3600.0
    absence_s: float = 900.0
    load_s: float = 20.0
    lives: float = 100.0

    @property
    def seconds(self) -> float:
        """Of the experiment."""
        return self.lives * self.life_s


@dataclass(frozen=True)
class Rebalanced:
    """What a way to place peers reached.

    Attributes:
        share: throughput of the slowest stage over that of the best placement of the peers that are
            present, both summed over time.
        moves: of peers between stages.
    """

    share: float
    moves: int


def simulate(about: Experiment, rebalance_s: float | None, *, random_stage: bool = False,
             seed: int = 0) -> Rebalanced:
    """Let peers come, serve and vanish.

    Args:
        rebalance_s: seconds after which one peer may move; None: never.
        random_stage: newcomers go to a stage at random, and not to the slowest one.
        seed: of the times at which peers vanish and come back, which depend on nothing else.
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
        if now > about.load_s:  # at the beginning all peers load
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
    """(peers that serve the slowest stage, those that would in the best placement of all present).
    """
    serving = [0] * about.stages
    for peer, stage in stage_of.items():
        serving[stage] += peer not in loading
    return min(serving), len(stage_of) // about.stages
