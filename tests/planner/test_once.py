"""Rows that are sent once: how many, and when the planner takes them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from moe_plugin.comm.topology import Topology
from moe_plugin.planner.all_to_all_cost import leader_cost, linear_cost, two_d_cost
from moe_plugin.planner.choice import LayoutChoice, combinations
from moe_plugin.planner.cluster import load_cluster
from moe_plugin.planner.layer_cost import LayerShape, layer_cost, rank_choices
from moe_plugin.planner.once import (
    Limits,
    OnceRows,
    TokenBytes,
    bytes_of_token,
    expected_targets,
    rows_of_token,
)
from tests.planner.problems import A100

pytestmark = pytest.mark.fast

SLOW = load_cluster(Path(__file__).parents[2] / "configs" / "clusters" / "emulated.yaml")
SHAPE = LayerShape(tokens=4096, model_dim=512, hidden_dim=512, experts=64, top_k=8)


@pytest.mark.parametrize("targets,k", [(2, 8), (4, 3), (3, 5), (1, 4)])
def test_expected_targets_are_the_mean_over_all_choices(targets: int, k: int) -> None:
    found = [len(set(choice)) for choice in itertools.product(range(targets), repeat=k)]
    assert expected_targets(k, targets) == pytest.approx(sum(found) / len(found))


def test_each_choice_on_several_ranks() -> None:
    """Of 4 ranks, each choice goes to 2 consecutive ones, of which each is in one pair."""
    found = [2 * len(set(choice)) for choice in itertools.product(range(2), repeat=3)]
    assert expected_targets(3, 4, 2) == pytest.approx(sum(found) / len(found))
    cluster = SLOW.resized(2, 2)
    assert rows_of_token(cluster, 3, 2).nodes == expected_targets(3, 2)
    assert rows_of_token(cluster, 3, 4).nodes == 2


@pytest.mark.parametrize("targets,groups,chosen", [
    (2, 2, 1), (4, 2, 1), (2, 4, 3), (2, 4, 1), (4, 4, 2), (3, 6, 2), (2, 6, 3)])
def test_a_router_may_limit_the_targets(targets: int, groups: int, chosen: int) -> None:
    """The mean over all groups that it may choose, and all choices from places in these."""
    places = range(max(targets, groups))
    found = [len({place * targets // len(places) for place in choice})
             for some in itertools.combinations(range(groups), chosen)
             for choice in itertools.product(
                 [p for p in places if p * groups // len(places) in some], repeat=3)]
    limits = Limits(groups, chosen)
    assert limits.targets(3, targets) == pytest.approx(sum(found) / len(found))


def test_groups_that_are_ranks_limit_ranks_and_nodes() -> None:
    """Groups of nodes limit nodes, groups of devices both; groups that nodes cut limit nothing."""
    cluster = SLOW.resized(8, 8)
    free, nodes, ranks = (rows_of_token(cluster, 8, limits=limits)
                          for limits in (Limits(), Limits(8, 4), Limits(64, 3)))
    assert nodes.nodes < 4 < free.nodes and nodes.ranks < free.ranks
    assert ranks.ranks < 3 and 2 < ranks.nodes < ranks.ranks
    assert rows_of_token(cluster, 8, limits=Limits(3, 1)) == free


def test_nodes_of_unequal_size() -> None:
    """Three ranks and one, all choices: the mean of nodes; and 2DH's busiest messages."""
    found = [len({rank // 3 for rank in choice})
             for choice in itertools.product(range(4), repeat=3)]
    cluster = SLOW.with_nodes([3, 1])
    assert (cluster.ranks, cluster.nodes, cluster.between) == (4, 2, 1 - 10 / 16)
    assert rows_of_token(cluster, 3).nodes == pytest.approx(sum(found) / len(found))
    assert rows_of_token(cluster, 3).ranks == rows_of_token(SLOW.resized(2, 2), 3).ranks
    assert rows_of_token(cluster, 3, 4).nodes == 2
    assert SLOW.with_nodes([2, 2]) == cluster.resized(2, 2) == SLOW.resized(2, 2)


@pytest.mark.parametrize("sizes", [[3, 1], [2, 3, 1], [4, 2], [1, 5]])
def test_the_busiest_rank_of_unequal_nodes(sizes: list[int]) -> None:
    """Messages and bytes between nodes as the exchange itself sends them."""
    starts = itertools.accumulate([0, *sizes])
    topology = Topology(tuple(tuple(range(start, start + size))
                              for start, size in zip(starts, sizes, strict=False)))
    cluster = dataclasses.replace(SLOW, nics=8).with_nodes(sizes)
    def collects(rank: int, to: int) -> bool:
        here = topology.peers(rank)
        return to not in here and here[topology.local_of[to] % len(here)] == rank

    away = [sum(collects(rank, to) for to in range(topology.size))
            for rank in range(topology.size)]
    share = [len(topology.peers(rank)) / topology.size * n for rank, n in enumerate(away)]
    between = two_d_cost(cluster, 1.0).phases[1].inter
    assert between == (max(away), pytest.approx(max(share)))
    size, nodes = topology.size, topology.nodes
    assert linear_cost(cluster, 1.0).phases[0].inter == (
        size - min(sizes), pytest.approx((size - min(sizes)) / size))
    assert leader_cost(cluster, 1.0).phases[1].inter == (
        len(nodes) - 1, pytest.approx(max(n * (size - n) for n in sizes) / size))


def best(top_k: int, nodes: int, ranks: int) -> LayoutChoice:
    values = {"r": [1], "d": [1], "send": ["rows", "ranks", *["nodes"] * (nodes > 1)]}
    shape = dataclasses.replace(SHAPE, top_k=top_k)
    cluster = SLOW.resized(nodes, ranks)
    return rank_choices(shape, cluster, A100, combinations(values, cluster.ranks))[0].choice


def test_what_the_planner_takes() -> None:
    assert best(8, 2, 2).send == "nodes" and best(8, 1, 4).send == "ranks"
    assert best(1, 2, 2).send == best(1, 1, 4).send == "rows"


@pytest.mark.parametrize("send", ["ranks", "nodes"])
def test_exchanges_take_less(send: str) -> None:
    cluster = SLOW.resized(4, 2)
    rows, once = (layer_cost(SHAPE, cluster, A100, LayoutChoice(r=1, send=name))
                  for name in ("rows", send))
    for phase in ("a2a_out", "a2a_back"):
        assert once.phases()[phase] < rows.phases()[phase]
    assert (once.memory_bytes < rows.memory_bytes) == (send == "ranks")  # two hops, two buffers
    assert once.phases()["experts"] == rows.phases()["experts"]


def test_combinations_hold_nothing_twice() -> None:
    """Where no rows travel there is nothing to send once; what is sent once is cut by no experts.
    """
    values = {"r": [0, 1], "d": [1, 2], "d_backward": [0], "algorithm": ["linear"],
              "piece_axis": ["rows", "experts"], "spill": ["never", "least_loaded"],
              "send": ["rows", "ranks"]}
    found = list(combinations(values, 4))
    assert len(set(found)) == len(found)
    assert {c.send for c in found if c.r == 0} == {"rows"}
    once = {(c.d, c.piece_axis, c.spill) for c in found if c.send == "ranks"}
    assert once == {(d, "rows", spill) for d in (1, 2) for spill in ("never", "least_loaded")}


def test_measured_visits_replace_even_routing() -> None:
    cluster = SLOW.resized(2, 2)
    seen = {1: OnceRows(2.0, 1.2, 8), 2: OnceRows(3.0, 1.2, 16)}
    assert all(rows_of_token(cluster, 8, r, visits=seen) == seen[r] for r in seen)
    choice = LayoutChoice(r=1, send="ranks")
    shape = dataclasses.replace(SHAPE, visits=seen)
    assert layer_cost(shape, cluster, A100, choice).seconds < layer_cost(
        SHAPE, cluster, A100, choice).seconds


def test_bytes_of_a_token_by_hand() -> None:
    """On two nodes of two ranks, three choices, rows of 100 bytes, pairs of 6."""
    cluster, nodes = SLOW.resized(2, 2), expected_targets(3, 2)
    ranks = expected_targets(3, 4)
    found = {send: bytes_of_token(cluster, send, 3, 100) for send in ("rows", "ranks", "nodes")}
    assert found["rows"] == TokenBytes(pytest.approx(3 * 100 / 4), pytest.approx(3 * 100 / 2))
    assert found["ranks"] == TokenBytes(pytest.approx((ranks * 100 + 18) / 4),
                                        pytest.approx((ranks * 100 + 18) / 2))
    assert found["nodes"] == TokenBytes(pytest.approx((ranks * 100 + 18) / 2),
                                        pytest.approx((nodes * 100 + 18) / 2))


def test_what_is_sent_once_may_spill() -> None:
    shape = dataclasses.replace(SHAPE, skew=4.0, top_k=2)
    cluster = SLOW.resized(2, 2)
    costs = {spill: layer_cost(shape, cluster, A100, LayoutChoice(r=1, send="ranks", spill=spill))
             for spill in ("never", "least_loaded")}
    assert costs["least_loaded"].phases()["experts"] < costs["never"].phases()["experts"]
    assert costs["least_loaded"].phases()["parameters"] > 0
