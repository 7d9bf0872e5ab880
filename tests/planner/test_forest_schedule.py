"""Schedules of collectives as data, and the simulator that runs them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings

from moe_plugin.planner import Cluster, Link
from moe_plugin.planner.events import Task, simulate, simulate_ready
from moe_plugin.planner.forest import COLLECTIVES, Edge, Network, Schedule, Tree, Wire, plan
from moe_plugin.planner.forest.baselines import baselines
from moe_plugin.planner.forest.msccl import to_msccl
from moe_plugin.planner.forest.presets import preset
from moe_plugin.planner.forest.simulate import MAX_TASKS, Program, program_of, run, verify
from tests.planner.msccl import carry_out, check_result
from tests.planner.networks import networks

pytestmark = pytest.mark.fast


# Networks and schedules as data: files, what is refused, what `check` finds.


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


# The chunk simulator, the baselines on it, and MSCCL XML: each collective comes out right, and
# what does not is refused.


SIZE = 10**9


def of_ring(ranks: int, collective: str) -> Schedule:
    """The optimal schedule of a ring by hand: each rank has a path in each direction."""
    network = preset(f"ring:{ranks}")
    outward = tuple(
        Tree(root, 1, tuple(_edge(network, (root + way * i) % ranks, (root + way * (i + 1)) % ranks)
                            for i in range(ranks - 1)))
        for root in range(ranks) for way in (1, -1))
    inward = tuple(tree.reversed() for tree in outward)
    trees = {"all_gather": outward, "reduce_scatter": inward, "all_reduce": inward + outward}
    return Schedule(collective, network, Fraction(ranks - 1, 2), frozenset(network.ranks[:-1]), 2,
                    Fraction(1, ranks - 1), trees[collective])


def _edge(network: Network, source: int, target: int) -> Edge:
    return Edge(source, target, (((network.ranks[source], network.ranks[target]), 1),))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_ring_takes_the_time_of_its_bound(collective: str) -> None:
    schedule = of_ring(5, collective)
    schedule.check()
    program = program_of(schedule)
    for chunks in (1, 2, 64):
        found = run(program, SIZE, chunks)
        limit = 1 + (found.depth - 1) / chunks
        assert schedule.bound_s(SIZE) <= found.seconds * (1 + 1e-9)
        assert found.seconds <= schedule.bound_s(SIZE) * limit * (1 + 1e-9)
    assert float(program.inverse_bandwidth()) == schedule.seconds(1e9)


def test_the_cost_of_messages_is_paid_for_each_chunk_on_each_wire() -> None:
    network = Network.from_dict({"ranks": ["a", "b"], "switches": ["s"], "links": [
        ["a", "s", 1, 0.5], ["s", "b", 1, 0.25]]})
    tree = Tree(0, 1, (Edge(0, 1, ((("a", "s", "b"), 1),)),))
    back = Tree(1, 1, (Edge(1, 0, ((("b", "s", "a"), 1),)),))
    program = program_of(Schedule("all_gather", network, Fraction(1), frozenset(["a"]), 1,
                                  Fraction(1), (tree, back)))
    # half a GB each way; the slower wire sends `chunks` chunks, the other one forwards the last
    for chunks, expected in ((1, 0.5 + 0.5 + 0.75), (4, 4 * 0.5 + 0.5 + 0.25 + 0.125)):
        assert run(program, SIZE, chunks).seconds == pytest.approx(expected)


def test_a_wire_takes_what_is_ready_and_comes_first() -> None:
    """c waits for b, which is slow; d comes later and goes before it."""
    tasks = [Task("a", "w", 1.0), Task("b", "v", 5.0), Task("c", "w", 1.0, ("b",)),
             Task("d", "w", 2.0), Task("e", "w", 1.0)]
    found = simulate_ready(tasks)
    assert {span.task.name: (span.start, span.end) for span in found.spans} == {
        "a": (0, 1), "b": (0, 5), "c": (5, 6), "d": (1, 3), "e": (3, 4)}
    assert found.seconds == 6 < simulate(tasks).seconds
    for wrong, said in ([Task("a", "w", 1.0), Task("a", "w", 1.0)], "a unique name"), (
            [Task("a", "w", 1.0, ("b",)), Task("b", "w", 1.0, ("a",))], "'a' waits for a task"), (
            [Task("a", "w", 1.0, ("z",))], "waits for a task that never ends"), (
            [Task("a", "w", 1.0, (), "", ("v",))], "exactly one resource"):
        with pytest.raises(ValueError, match=said):
            simulate_ready(wrong)


def damaged(program: Program, **change: object) -> Program:
    return replace(program, **change)


@pytest.mark.parametrize("collective, change, said", [
    ("all_gather", lambda p: {"moves": p.moves[:-1]}, "rank . lacks a part of piece"),
    ("all_gather", lambda p: {"moves": (*p.moves, p.moves[0])}, "delivers the piece twice"),
    ("all_gather", lambda p: {"moves": p.moves[1:]}, "sends missing data"),
    ("reduce_scatter", lambda p: {"moves": (*p.moves, p.moves[0])}, "adds a contribution twice"),
    ("reduce_scatter", lambda p: {"moves": p.moves[1:]}, "lacks a part"),
    ("all_reduce", lambda p: {"moves": p.moves[1:]}, "sends missing data"),
    ("all_reduce", lambda p: {"moves": p.moves[:-1]}, "lacks a part"),
    ("all_gather", lambda p: {"shares": p.shares[:-1] + (Fraction(1, 9),)}, "result exactly once"),
    ("all_gather", lambda p: {"roots": p.roots[:-1] + (0,)}, "result exactly once"),
    ("all_gather", lambda p: {"moves": (replace(p.moves[0], routes=((("r0", "r2"), Fraction(1)),)),
                                        *p.moves[1:])}, "does not lead to the target"),
    ("all_gather", lambda p: {"moves": (replace(p.moves[0], routes=(
        (p.moves[0].routes[0][0], Fraction(1, 2)),)), *p.moves[1:])}, "piece exactly once"),
    ("gather", lambda p: {}, "is unknown. Choose from all_gather"),
])
def test_wrong_programs_are_refused(collective: str, change: object, said: str) -> None:
    program = program_of(of_ring(4, collective if collective in COLLECTIVES else "all_gather"))
    verify(program)
    wrong = damaged(program, collective=collective, **change(program))
    for use in (verify, to_msccl, lambda each: run(each, SIZE, 1)):
        with pytest.raises(ValueError, match=said):
            use(wrong)


def test_impossible_numbers_of_chunks_are_refused() -> None:
    program = program_of(of_ring(4, "all_gather"))
    for chunks in (0, -1):
        with pytest.raises(ValueError, match="must be >= 1"):
            run(program, SIZE, chunks)
    with pytest.raises(ValueError, match=f"Use at most {MAX_TASKS // 24}"):
        run(program, SIZE, MAX_TASKS)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", ["ring:2", "ring:5", "star:8", "mesh:2x3", "clusters:2x4"])
def test_baselines_do_the_collective(name: str, collective: str) -> None:
    for program in baselines(preset(name), collective):
        found = run(program, SIZE, 4)
        assert found.seconds >= float(program.inverse_bandwidth()) * (1 - 1e-9)
        check_result(to_msccl(program))


def test_baselines_use_what_a_network_has() -> None:
    """A ring has the best ring; machines have a ring through each card; a torus has two rings."""
    ring = baselines(preset("ring:8"), "all_gather")[0]
    assert ring.inverse_bandwidth() == Fraction(7, 2) / 8
    machines = baselines(preset("dgx-a100:2"), "all_gather")[0]
    assert machines.inverse_bandwidth() == Fraction(15, 16) / 8 / 25
    torus = baselines(preset("torus:3x3"), "all_gather")[0]
    assert torus.inverse_bandwidth() == Fraction(8, 9) / 4
    doubling = baselines(preset("star:8"), "all_reduce")[2]
    assert doubling.inverse_bandwidth() == 2 * Fraction(7, 8)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_msccl_xml_of_a_schedule_does_the_collective(collective: str) -> None:
    check_result(to_msccl(program_of(of_ring(4, collective))))


def test_pieces_of_many_chunks_become_several_steps() -> None:
    """MSCCL counts chunks of a step below 72."""
    network = preset("ring:2")
    trees = tuple(Tree(root, weight, (Edge(root, 1 - root, (
        ((network.ranks[root], network.ranks[1 - root]), weight),)),))
        for root in (0, 1) for weight in (1, 150))
    text = to_msccl(program_of(Schedule("all_gather", network, Fraction(1), frozenset("0"), 151,
                                        Fraction(1, 151), trees)))
    check_result(text)
    assert 'cnt="71"' in text and 'nchunksperloop="302"' in text


def test_what_msccl_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="32 peers in a channel, but this schedule needs 39"):
        direct = tuple(Tree(root, 1, tuple(
            Edge(root, to, (((f"r{root}", "switch", f"r{to}"), 1),)) for to in range(40)
            if to != root)) for root in range(40))
        to_msccl(program_of(Schedule("all_gather", preset("star:40"), Fraction(39), frozenset(), 1,
                                     Fraction(1, 39), direct)))


def test_the_check_of_xml_finds_faults() -> None:
    good = to_msccl(program_of(of_ring(4, "reduce_scatter")))
    for old, new in [('depid="[0-9]"', 'depid="-1"'), ('type="rrc"', 'type="r"'),
                     ('srcoff="4"', 'srcoff="5"'), ('hasdep="1"', 'hasdep="0"')]:
        with pytest.raises(AssertionError):
            check_result(re.sub(old, new, good))
    assert carry_out(good, in_place=False)[0] == [0x1111, 0x1111]
