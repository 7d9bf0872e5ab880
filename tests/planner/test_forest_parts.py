"""Clusters of equal parts: one part planned for all is as fast as the general algorithm."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner import Cluster, Link
from moe_plugin.planner.forest import Network, plan
from moe_plugin.planner.forest.by_parts import find_parts, trees_by_parts
from moe_plugin.planner.forest.optimum import Graph, optimum, whole, whole_trees
from moe_plugin.planner.forest.presets import preset
from tests.planner.networks import verify


def shared_cards(nodes: int = 3) -> Network:
    """Nodes of four ranks with two network cards."""
    return Network.from_cluster(Cluster(
        nodes=nodes, ranks_per_node=4, nics=2, intra=Link(beta_s=1 / 300e9),
        inter=Link(beta_s=1 / 25e9)))


def two_planes(nodes: int = 3) -> Network:
    """Half a DGX A100 with a node for each card, odd and even ones at switches of their own."""
    links = []
    for node in range(nodes):
        for gpu in range(4):
            rank, card = f"{node}.{gpu}", f"{node}.card{gpu}"
            links += [[rank, f"{node}.switch", 300], [rank, card, 25],
                      [card, f"plane{gpu % 2}", 25]]
    return Network.from_dict({
        "ranks": [f"{node}.{gpu}" for node in range(nodes) for gpu in range(4)],
        "switches": ["plane1", "plane0", *(f"{node}.switch" for node in reversed(range(nodes))),
                     *(f"{node}.card{gpu}" for node in range(nodes) for gpu in range(4))],
        "links": links})


def planned_once(network: Network) -> bool:
    """Whether one part was planned for all, at the best rate."""
    graph = Graph.of(network)
    k, per_unit = whole_trees(graph, optimum(graph).ratio)
    counted = whole(graph, per_unit)
    parts = find_parts(counted)
    return parts is not None and trees_by_parts(counted, network.nodes, parts, k) is not None


@pytest.mark.parametrize(("name", "network", "once"), [
    ("star:6", None, True), ("dgx-a100:1", None, True), ("dgx-a100:2", None, True),
    ("dgx-a100:3", None, True), ("clusters:3x3", None, True),
    ("fat-tree:4", None, False), ("ring:6", None, False),
    ("cards", shared_cards(), True), ("planes", two_planes(), True)])
def test_one_part_for_all_is_as_fast(name: str, network: Network | None, once: bool) -> None:
    network = network or preset(name)
    assert planned_once(network) is once
    fast, slow = plan(network), plan(network, symmetry=False)
    verify(fast)
    verify(slow)
    assert fast.k == slow.k and fast.unit == slow.unit and fast.inverse_rate == slow.inverse_rate
    fast = plan(network, "all_reduce", 2)
    verify(fast)
    assert fast.unit == plan(network, "all_gather", 2, symmetry=False).unit
    fast = plan(network, "all_reduce", overlap=True)
    verify(fast)
    slow = plan(network, "all_reduce", overlap=True, symmetry=False)
    assert (fast.unit, fast.k) == (slow.unit, slow.k)


@settings(max_examples=40, deadline=None)
@given(parts=st.integers(2, 5), inner=st.lists(st.integers(1, 40), min_size=1, max_size=4),
       outer=st.lists(st.integers(1, 9), min_size=4, max_size=4),
       planes=st.integers(1, 2), unlike=st.booleans(), data=st.data())
def test_any_cluster_of_parts(parts: int, inner: list[int], outer: list[int], planes: int,
                              unlike: bool, data: st.DataObject) -> None:
    """Ranks with links of any bandwidth to their part's switch, and to switches between parts; one
    link may be unlike its equals.
    """
    links = []
    for part in range(parts):
        for place, rate in enumerate(inner):
            rank = str(part * len(inner) + place)
            if len(inner) > 1:
                links.append([rank, f"in{part}", rate])
            links += [[rank, f"out{plane}", outer[(place + plane) % 4]] for plane in range(planes)]
    if unlike:
        links[data.draw(st.integers(0, len(links) - 1))][2] += 1
    switches = [f"out{plane}" for plane in range(planes)]
    switches += [f"in{part}" for part in range(parts)] if len(inner) > 1 else []
    network = Network.from_dict({
        "ranks": parts * len(inner), "switches": data.draw(st.permutations(switches)),
        "links": data.draw(st.permutations(links))})
    fast, slow = plan(network), plan(network, symmetry=False)
    verify(fast)
    assert (fast.inverse_rate, fast.k, fast.unit) == (slow.inverse_rate, slow.k, slow.unit)


def test_parts_are_found_whatever_the_order_of_the_switches() -> None:
    network = two_planes()
    parts = find_parts(Graph.of(network))
    assert parts is not None and (parts.size, parts.count) == (4, 3)
    assert {network.nodes[v] for v in parts.between} == {"plane0", "plane1"}
    slower = replace(network.wires[0], bandwidth=Fraction(200))
    back = replace(network.wires[1], bandwidth=Fraction(200))
    assert find_parts(Graph.of(replace(network, wires=(slower, back, *network.wires[2:])))) is None


@pytest.mark.slow
def test_a_thousand_ranks() -> None:
    schedule = plan(preset("dgx-a100:128"))
    verify(schedule)
    assert schedule.inverse_rate == Fraction(127, 25) and schedule.k == 1
    assert max(len(tree.edges) for tree in schedule.trees) == 1023
