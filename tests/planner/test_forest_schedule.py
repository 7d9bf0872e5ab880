"""Networks and schedules as data: files, what is refused, what `check` finds."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings

from moe_plugin.planner import Cluster, Link
from moe_plugin.planner.forest import Edge, Network, Schedule, Wire, plan
from tests.planner.networks import networks

pytestmark = pytest.mark.fast

RING = {"name": "ring", "ranks": 3, "links": [[0, 1, 5], [1, 2, 2.5], [2, 0, "5/2", 1e-6]]}


@pytest.mark.parametrize(("change", "message"), [
    ({"ranks": []}, "has 0 ranks; it needs at least 1"),
    ({"ranks": ["0", "1", "2", "1"]}, "node '1' is listed twice"),
    ({"switches": ["2"]}, "node '2' is listed twice"),
    ({"ranks": 2}, "wire '1' to '2': '2' is neither a rank nor a switch"),
    ({"ranks": -1}, "network: ranks is -1; write a number from 0"),
    ({"ranks": 10**9}, "ranks is 1000000000; write a number from 0"),
    ({"ranks": True}, "ranks is True, but it must be a list"),
    ({"ranks": [[]]}, r"ranks\[0\] is \[\]; write the name of a node"),
    ({"switches": ["a"]}, "no path connects '0' with 'a'. Add wires"),
    ({"links": [[0, 0, 1]]}, "wire '0' to '0' connects a node with itself"),
    ({"links": [[0, 1, 0], [1, 2, 1]]}, "bandwidth .*0.* GB/s must be from 1e-09"),
    ({"links": [[0, 1, -5]]}, r"links\[0\]: bandwidth is -5; write a number such as 25"),
    ({"links": [[0, 1, "1/0"]]}, "a division by 0"),
    ({"links": [[0, 1, "fast"]]}, "bandwidth is 'fast'; write a number"),
    ({"links": [[0, 1, float("inf")]]}, "bandwidth is inf; write a number"),
    ({"links": [[0, 1, float("nan")]]}, "bandwidth is nan; write a number"),
    ({"links": [[0, 1]]}, r"links\[0\] is \[0, 1\]; write \[a, b, GB/s\]"),
    ({"links": [[0, 1, 1, -1.0], [1, 2, 1]]}, "alpha_s -1.0 must be seconds"),
    ({"links": [[0, 1, 1, "x"]]}, "alpha_s is 'x'; write the seconds"),
    ({"links": [[0, 1, 1], [1, 0, 1]]}, "wire '1' to '0' is listed twice"),
    ({"links": {}}, r"links is \{\}, but it must be a list"),
    ({"links": [[0, 1, 1]]}, "no path connects '0' with '2'"),
    ({"one_way": [[0, 2, 1]], "links": [[0, 1, 1], [1, 2, 1]]},
     "node '0' receives 1 GB/s but sends 2 GB/s. Both must be equal"),
    ({"wires": []}, "unknown key 'wires'. Known keys: name, ranks"),
])
def test_networks_that_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network.from_dict({**RING, **change})
    with pytest.raises(ValueError, match="must be a mapping"):
        Network.from_dict([])


def test_a_network_file(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text("ranks: [a, b]\nswitches: 1\nlinks:\n- [a, s0, 12.5]\n- [s0, b, 25/2, 1e-6]\n")
    network = Network.load(path)
    assert (network.name, network.ranks, network.switches) == ("box", ("a", "b"), ("s0",))
    assert Wire("b", "s0", Fraction(25, 2), 1e-6) in network.wires
    path.write_text("ranks: 2\nlinks: [[0, 1, x]]\n")
    with pytest.raises(ValueError, match=r"network file '.*box.yaml': links\[0\]: bandwidth is"):
        Network.load(path)
    with pytest.raises(ValueError, match="network file .*none.yaml"):
        Network.load(tmp_path / "none.yaml")


def test_a_network_of_a_cluster() -> None:
    cluster = Cluster(name="two", nodes=2, ranks_per_node=4, nics=2, phase_s=1e-6,
                      intra=Link(beta_s=1 / 300e9), inter=Link(alpha_s=1e-6, beta_s=1 / 24.97e9))
    network = Network.from_cluster(cluster)
    rates = {w.ends: w for w in network.wires}
    assert len(network.ranks) == 8
    assert network.switches == ("node0", "node0/nic0", "node0/nic1", "node1", "node1/nic0",
                                "node1/nic1", "network")
    assert rates["5", "node1/nic1"].bandwidth == rates["node1/nic1", "network"].bandwidth == 25
    assert rates["5", "node1/nic1"].alpha_s == 2e-6 and rates["5", "node1"].bandwidth == 300
    # two cards of 25 GB/s bring each node the other's four shards
    assert plan(network).inverse_rate == Fraction(4, 50)
    wide = Network.from_cluster(replace(cluster, ranks_per_node=1))
    assert plan(wide).inverse_rate == Fraction(1, 50)
    with pytest.raises(ValueError, match="inter.beta_s=0 means infinite bandwidth"):
        Network.from_cluster(replace(cluster, inter=Link()))


@settings(max_examples=15, deadline=None)
@given(network=networks(8))
def test_json_brings_a_schedule_back(network: Network) -> None:
    assert Network.from_dict(json.loads(json.dumps(network.to_dict()))) == network
    for schedule in (plan(network, "all_reduce"), plan(network, "reduce_scatter", 2)):
        assert Schedule.from_json(schedule.to_json()) == schedule


def _changed(schedule: Schedule, index: int, **values: object) -> Schedule:
    trees = list(schedule.trees)
    trees[index] = replace(trees[index], **values)
    return replace(schedule, trees=tuple(trees))


def test_check_finds_what_is_wrong() -> None:
    good = plan(Network.from_dict(RING))
    good.check()
    first = good.trees[0]
    edge = first.edges[0]
    elsewhere = Edge(edge.source, edge.target, (((good.network.ranks[edge.target],
                                                  good.network.ranks[edge.source]), first.weight),))
    for bad, message in [
        (replace(good, k=good.k + 1), "instead of k="),
        (replace(good, unit=good.unit * 2), "GB/s, more than its"),
        (replace(good, collective="all_reduce"), "instead of k="),
        (replace(good, collective="gather"), "collective 'gather' is unknown"),
        (replace(good, k=0), "both numbers must be positive"),
        (replace(good, cut=good.cut | {"x"}), "does not follow from the cut of 3 nodes"),
        (replace(good, cut=frozenset()), "does not follow from the cut of 0 nodes"),
        (_changed(good, 0, root=7), "tree of root 7"),
        (_changed(good, 0, edges=first.edges[:1]), "reaches only 2 of 3 ranks"),
        (_changed(good, 0, edges=first.edges[::-1] + first.edges), "does not continue the tree"),
        (_changed(good, 0, weight=first.weight + 1), "do not sum to the weight"),
        (_changed(good, 0, edges=(elsewhere, *first.edges[1:])), "does not lead from rank"),
    ]:
        with pytest.raises(ValueError, match=message):
            bad.check()


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "{", "nul", '{"format": 9}', '{"format": 1, "collective": []}', "[" * 2000])
def test_json_that_is_no_schedule(text: str) -> None:
    with pytest.raises(ValueError, match="schedule"):
        Schedule.from_json(text)


def test_damaged_json() -> None:
    values = json.loads(plan(Network.from_dict(RING)).to_json())
    for key in values:
        for value in (None, "x", -1, [[[]]], {"a": 1}):
            damaged = json.dumps({**values, key: value})
            if key in ("fixed", "overlap", "parts"):
                continue  # statements, which nothing here contradicts
            with pytest.raises(ValueError, match="."):
                Schedule.from_json(damaged)
