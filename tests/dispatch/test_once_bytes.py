"""Which bytes go from which rank to which where a token is sent once, forward and backward, counted
by hand: on any nodes, by every all-to-all, in wire formats, in bounded memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, Traffic, run_simulated
from moe_plugin.config import from_dict
from tests.dispatch.fixed_routing import UNEQUAL, WIDTH, Fixed, drawn

pytestmark = pytest.mark.fast

FLOAT, CODE, COUNT = 8, 2, 8  # bytes of a number of float64, of a pair's code, of a count
# of a row: 2 bytes a number, a byte more for its scale; 1 a number, 4 or 1 for the scale of a block
ROW = {"none": WIDTH * FLOAT, "bf16": 2 * WIDTH, "fp16": 2 * WIDTH + 1, "fp8": WIDTH + 4,
       "mxfp8": WIDTH + 1}
FOUR = Topology.uniform(4, 2)
Bytes = dict[tuple[int, int], int]


@dataclass(frozen=True)
class Way:
    """How rows travel."""

    send: str
    topology: Topology
    d: int = 1
    all_to_all: str = "linear"
    wire: str = "none"
    name: str = "ragged"

    def __str__(self) -> str:
        return (f"{self.name} {self.send} {self.topology.size} d={self.d} {self.all_to_all} "
                f"{self.wire}")


def sent(ids_WTK: list[Tensor], experts: int, way: Way) -> tuple[Bytes, Bytes]:
    """What a call of a layer and its backward pass send, its settings being agreed."""
    traffic, forward = Traffic(), {}
    config = from_dict({
        "model_dim": WIDTH, "num_experts": experts, "losses": {}, "parallel": {"d": way.d, "r": 1},
        "dispatch": {"send": way.send, "name": way.name},
        "comm": {"all_to_all": way.all_to_all, "wire": way.wire},
        "router": {"top_k": ids_WTK[0].shape[1]}})

    def rank(comm: Comm) -> None:
        def restart() -> None:
            comm.barrier()
            if comm.rank == 0:
                forward.update(traffic.bytes)
                traffic.bytes.clear()
            comm.barrier()

        router = Fixed(ids_WTK[comm.rank])
        layer = MoELayer(config, comm, router=router, dtype=torch.float64)
        for _ in range(2):  # ranks compare experts in the first two calls and not in the third
            layer(torch.zeros(len(router.ids_TK), WIDTH, dtype=torch.float64))
        restart()
        forward.clear()
        x = torch.randn(len(router.ids_TK), WIDTH, dtype=torch.float64, requires_grad=True)
        out = layer(x).output
        restart()
        out.sum().backward()
        assert router.weights_TK.grad is not None

    run_simulated(way.topology.size, rank, traffic=traffic, topology=way.topology)
    return forward, traffic.bytes


class Ledger:
    """Bytes by (source, destination), forward and backward."""

    def __init__(self, way: Way) -> None:
        self.way, self.nodes = way, way.topology.nodes
        self.node_of, self.place_of = way.topology.node_of, way.topology.local_of
        self.forward: Counter[tuple[int, int]] = Counter()
        self.backward: Counter[tuple[int, int]] = Counter()

    def found(self) -> tuple[Bytes, Bytes]:
        both = ({pair: size for pair, size in sizes.items() if size and pair[0] != pair[1]}
                for sizes in (self.forward, self.backward))
        return next(both), next(both)

    def via(self, source: int, node: int) -> int:
        """The rank of a node that has the place of another one."""
        return self.nodes[node][self.place_of[source] % len(self.nodes[node])]

    def peers(self, rank: int) -> tuple[int, ...]:
        return self.nodes[self.node_of[rank]]

    def travel(self, source: int, target: int, rows: int, pairs: int, inside: bool = False) -> None:
        """Rows there, their results back, both gradients; pairs there, gradients of weights back.

        inside: the second hop, as rows are and straight.
        """
        size = rows * ROW["none" if inside else self.way.wire]
        for sizes in (self.forward, self.backward):
            for ends in ((source, target), (target, source)):
                for hop in [ends] if inside else self.hops(*ends):
                    sizes[hop] += size
        self.forward[source, target] += pairs * (CODE + FLOAT)
        self.backward[target, source] += pairs * FLOAT

    def hops(self, source: int, target: int) -> Iterator[tuple[int, int]]:
        """The messages that carry a row."""
        if self.way.all_to_all == "linear":
            yield source, target
        elif self.way.all_to_all == "2dh":
            peer = self.via(target, self.node_of[source])
            yield from ((source, peer), (peer, target))
        else:
            leaders = self.peers(source)[0], self.peers(target)[0]
            yield from ((source, leaders[0]), leaders, (leaders[1], target))

    def lengths(self) -> None:
        """Numbers that hierarchical all-to-alls of uneven rows send inside a node, in each of four:
        with the leader all of a rank's, in 2DH those of the ranks that a peer collects for.
        """
        for sizes, source in itertools.product((self.forward, self.backward),
                                               range(self.way.topology.size)):
            for peer in self.peers(source):
                if self.way.all_to_all == "2dh":
                    served = sum(self.via(target, self.node_of[source]) == peer
                                 for target in range(self.way.topology.size))
                    sizes[source, peer] += 2 * COUNT * served
                elif self.way.all_to_all == "leader" and peer == self.peers(source)[0]:
                    sizes[source, peer] += 2 * COUNT * 2 * self.way.topology.size

    def exact(self, ids_WTK: list[Tensor], local: int) -> None:
        """Rows of `ragged`, token by token."""
        for source, ids_TK in enumerate(ids_WTK):
            for token in ids_TK.tolist():
                pairs = Counter(expert // local for expert in token if expert >= 0)
                if self.way.send == "ranks":
                    for rank, number in pairs.items():
                        self.travel(source, rank, 1, number)
                    continue
                for node in {self.node_of[rank] for rank in pairs}:
                    peer = self.via(source, node)
                    here = {rank: n for rank, n in pairs.items() if self.node_of[rank] == node}
                    self.travel(source, peer, 1, sum(here.values()))
                    for rank, number in here.items():
                        self.travel(peer, rank, 1, number, inside=True)
        self.lengths()
        table = COUNT * self.way.d * (1 + local)
        for source, target in itertools.product(range(self.way.topology.size), repeat=2):
            if self.way.send == "ranks" or self.node_of[source] == self.node_of[target]:
                self.forward[source, target] += table
            if self.way.send == "nodes" and self.via(source, self.node_of[target]) == target:
                self.forward[source, target] += COUNT + table * len(self.peers(target))

    def bounded(self, tokens: int, k: int, local: int) -> None:
        """Slots of `bounded`, filled or not, and two numbers from each rank to each."""
        ranks, slots = range(self.way.topology.size), tokens * min(k, local)
        for source, target in itertools.product(ranks, repeat=2):
            self.forward[source, target] += 2 * COUNT
            if self.way.send == "ranks":
                self.travel(source, target, min(slots, tokens), slots)
        if self.way.send == "ranks":  # even: no lengths
            return
        self.lengths()
        pairs = slots * max(map(len, self.nodes))
        rows = min(pairs, tokens)
        for source in ranks:
            for node in range(len(self.nodes)):
                self.travel(source, self.via(source, node), rows, pairs)
            entries = Counter(self.via(other, self.node_of[source]) for other in ranks)
            most = max(entries.values())
            inner = min(most * slots, most * rows * k)
            for peer in self.peers(source):
                self.travel(source, peer, min(inner, most * rows), inner, inside=True)


RAGGED = [Way(send, topology, d) for send, topology, d in (
    ("ranks", FOUR, 2), ("nodes", FOUR, 3), ("nodes", UNEQUAL, 2))]
WAYS = RAGGED + [Way(send, topology, 1, all_to_all, wire, name)
                 for send in ("ranks", "nodes") for topology in (FOUR, UNEQUAL)
                 for all_to_all, wire in (("linear", "none"), ("2dh", "fp8"), ("leader", "mxfp8"),
                                          ("linear", "fp16"), ("2dh", "none"), ("leader", "bf16"))
                 for name in ("ragged", "bounded")]


def usual(place: int, number: int) -> bool:
    """Whether a way meets a number of experts with the usual tests: one for each way, and of most
    ways those with one of both topologies, so that dispatchers, exchanges, formats and topologies
    meet each other.
    """
    other = place - len(RAGGED)  # an order by send, topology, exchange, dispatcher
    half = other < 0 or (other + other // 2 + other // 12 + other // 24) % 2 == 0
    return half and (place + place // 2 + place // 12) % 4 == number


@pytest.mark.parametrize("way,k", [
    pytest.param(way, k, id=f"{way} k={k}", marks=[pytest.mark.slow] * (not usual(place, number)))
    for place, way in enumerate(WAYS) for number, k in enumerate((1, 2, 4, 8))])
def test_bytes_between_every_two_ranks(way: Way, k: int) -> None:
    world, local = way.topology.size, 4
    ids_WTK, by_hand = drawn(world, local * world, k, [9, 0, 5]), Ledger(way)
    if way.name == "bounded":
        by_hand.bounded(9, k, local)
    else:
        by_hand.exact(ids_WTK, local)
    assert sent(ids_WTK, local * world, way) == by_hand.found()


@pytest.mark.parametrize("send,targets,topology", [
    ("ranks", 4, FOUR), ("nodes", 2, FOUR), ("nodes", 4, Topology.uniform(8, 2))])
def test_rows_of_even_routing_are_those_of_the_formula(send: str, targets: int,
                                                       topology: Topology) -> None:
    """Tokens choose every k-tuple of ranks, or nodes, equally often: to others go exactly
    (W - 1) (1 - (1 - 1/W)^k) rows of a token, forward and backward, in each direction.
    """
    world, k = topology.size, 3
    local = 4
    per_target = world // targets * local
    tuples = list(itertools.product(range(targets), repeat=k))
    ids_TK = torch.tensor([[target * per_target + j for j, target in enumerate(choice)]
                           for choice in tuples])
    forward, backward = sent([ids_TK] * world, world * local, Way(send, topology))
    crossing = [sum(size for pair, size in sizes.items() if send == "ranks"
                    or not topology.same_node(*pair)) for sizes in (forward, backward)]
    if send == "ranks":
        tables = world * (world - 1) * COUNT * (1 + local)
        pairs = world * len(tuples) * k * (1 - 1 / targets)
    else:
        per_node = world // targets
        tables = world * (targets - 1) * COUNT * (1 + per_node * (1 + local))
        pairs = world * len(tuples) * k * (1 - 1 / targets)
    rows = (targets - 1) * (1 - (1 - 1 / targets) ** k) * len(tuples) * world
    both_ways = 2 * rows * ROW["none"]
    assert crossing == [tables + pairs * (CODE + FLOAT) + both_ways, pairs * FLOAT + both_ways]


@pytest.mark.parametrize("send,groups,chosen,topology", [
    ("nodes", 4, 2, Topology.uniform(8, 2)), ("ranks", 8, 3, Topology.uniform(8, 2)),
    ("nodes", 2, 1, FOUR), ("ranks", 4, 1, FOUR)])
def test_a_router_that_is_limited_to_groups_sends_as_many_rows(send: str, groups: int, chosen: int,
                                                               topology: Topology) -> None:
    """Where groups are the nodes, or ranks, to which rows go: at most one for each chosen group; a
    router without groups sends more.
    """
    def rows(router: dict[str, Any]) -> list[tuple[int, int]]:
        config = from_dict({
            "model_dim": WIDTH, "num_experts": 4 * topology.size, "losses": {},
            "router": {"top_k": 4, **router}, "parallel": {"r": 1}, "dispatch": {"send": send}})

        def rank(comm: Comm) -> tuple[int, int]:
            torch.manual_seed(comm.rank)
            stats = MoELayer(config, comm)(torch.randn(32, WIDTH)).stats
            return stats.rows_sent, stats.rows_between

        return run_simulated(topology.size, rank, topology=topology)

    limited = {"name": "group_limited", "groups": groups, "group_top_k": chosen}
    assert all(32 <= sent <= 32 * chosen and between <= sent for sent, between in rows(limited))
    assert all(sent > 32 * chosen for sent, _ in rows({"name": "topk"}))
