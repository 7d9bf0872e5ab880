"""ForestColl's schedules: published values, brute force over all cuts, what holds for any."""

from __future__ import annotations

import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.forest import Network, Wire, plan
from moe_plugin.planner.forest.flow import LARGEST, check_exact
from moe_plugin.planner.forest.presets import preset
from tests.planner.networks import least_of_partitions, networks, slowest_cuts, verify

# 1/x*, k, and N * x* with k trees, with 1 and with 2
TABLE = {
    "ring:4": ("3/2", 2, "8/3", "2", "8/3"),
    "ring:8": ("7/2", 2, "16/7", "2", "16/7"),
    "star:8": ("7", 1, "8/7", "8/7", "8/7"),
    "clusters:2x4": ("1", 1, "8", "8", "8"),
    "mesh:2x3": ("5/2", 2, "12/5", "2", "12/5"),
    "mesh:3x3": ("4", 1, "9/4", "9/4", "9/4"),
    "hypercube:3": ("7/3", 3, "24/7", "8/3", "16/5"),
    "dgx-a100:1": ("7/300", 1, "2400/7", "2400/7", "2400/7"),
    "dgx-a100:2": ("3/65", 13, "1040/3", "2400/7", "2400/7"),
    "dgx-a100:4": ("3/25", 1, "800/3", "800/3", "800/3"),
    "mi250:1": ("7/150", 3, "2400/7", "800/3", "320"),
    "mi250:2": ("15/166", 83, "5312/15", "320", "1024/3"),
}
COLLECTIVES = st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"])


@pytest.mark.parametrize("name", TABLE)
def test_published_values(name: str) -> None:
    network = preset(name)
    ratio, k, *rates = TABLE[name]
    schedules = [plan(network), plan(network, trees=1), plan(network, trees=2)]
    assert (schedules[0].inverse_rate, schedules[0].k) == (Fraction(ratio), k)
    assert [s.algorithmic_bandwidth for s in schedules] == [Fraction(rate) for rate in rates]
    assert [s.fixed for s in schedules] == [False, True, True]
    for schedule in schedules:
        verify(schedule)


def test_two_slow_boxes_are_bound_by_their_slowest_rank() -> None:
    schedule = plan(preset("dgx-a100:2"))
    assert len(schedule.cut & set(schedule.network.ranks)) == 15
    size = 1e9
    assert schedule.seconds(size) == schedule.bound_s(size) == pytest.approx(3 / 1040)
    assert plan(preset("dgx-a100:2"), "all_reduce").seconds(size) == pytest.approx(6 / 1040)


@settings(max_examples=60, deadline=None)
@given(network=networks(), collective=COLLECTIVES)
def test_any_network_reaches_the_slowest_of_all_cuts(network: Network, collective: str) -> None:
    schedule = plan(network, collective)
    verify(schedule)
    best, cuts = slowest_cuts(network)
    assert schedule.inverse_rate == best and schedule.cut in cuts
    assert schedule.algorithmic_bandwidth * schedule.phases == len(network.ranks) / best


@settings(max_examples=40, deadline=None)
@given(network=networks(9), trees=st.integers(1, 4), collective=COLLECTIVES)
def test_any_number_of_trees(network: Network, trees: int, collective: str) -> None:
    schedule = plan(network, collective, trees)
    verify(schedule)
    assert schedule.k == trees and schedule.seconds(1e9) >= schedule.bound_s(1e9) * (1 - 1e-12)


@settings(max_examples=20, deadline=None)
@given(network=networks(8, both_ways=True), trees=st.integers(1, 3))
def test_no_faster_rate_of_trees_fits(network: Network, trees: int) -> None:
    """Where links are the same both ways: just below the rate, a cut holds too few whole trees."""
    schedule = plan(network, trees=trees)
    if schedule.seconds(1) == schedule.bound_s(1):
        return
    faster = schedule.unit * (1 + Fraction(1, 10**6))
    rounded = Network("rounded", network.ranks, network.switches, tuple(
        Wire(w.source, w.target, Fraction(w.bandwidth // faster)) for w in network.wires
        if w.bandwidth >= faster)) if _connected(network, faster) else None
    assert rounded is None or slowest_cuts(rounded)[0] * trees > 1


def _connected(network: Network, least: Fraction) -> bool:
    try:
        Network("wide", network.ranks, network.switches,
                tuple(w for w in network.wires if w.bandwidth >= least))
    except ValueError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(network=networks(6))
def test_an_overlapped_all_reduce_reaches_the_least_of_all_partitions(network: Network) -> None:
    schedule = plan(network, "all_reduce", overlap=True)
    verify(schedule)
    assert schedule.algorithmic_bandwidth == least_of_partitions(network)
    assert schedule.seconds(1e9) == pytest.approx(schedule.bound_s(1e9), rel=1e-12)
    assert schedule.algorithmic_bandwidth >= plan(network, "all_reduce").algorithmic_bandwidth


@settings(max_examples=20, deadline=None)
@given(network=networks())
def test_overlapped_all_reduces_of_larger_networks(network: Network) -> None:
    verify(plan(network, "all_reduce", overlap=True))


def test_overlap_spares_a_slow_rank() -> None:
    """One rank with a tenth of the bandwidth: it is no root of what others can be roots of."""
    network = Network.from_dict({"ranks": 4, "switches": ["s"], "links": [
        [0, "s", 1], [1, "s", 10], [2, "s", 10], [3, "s", 10]]})
    assert plan(network, "all_reduce").algorithmic_bandwidth == Fraction(4, 6)
    assert plan(network, "all_reduce", overlap=True).algorithmic_bandwidth == 1


def test_directions_that_differ() -> None:
    """A one-way ring: each of its arcs passes every shard but one."""
    ring = Network.from_dict({"ranks": 4, "one_way": [[i, (i + 1) % 4, 5] for i in range(4)]})
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        schedule = plan(ring, collective)
        verify(schedule)
        assert schedule.inverse_rate == Fraction(3, 5) and schedule.k == 1


def test_switches_behind_switches() -> None:
    """Paths through a tree of switches: all of them are named, none twice."""
    links = [[rank, f"leaf{rank // 2}", 10] for rank in range(8)]
    links += [[f"leaf{leaf}", f"spine{spine}", 5] for leaf in range(4) for spine in range(2)]
    schedule = plan(Network.from_dict({
        "ranks": 8, "switches": [f"leaf{i}" for i in range(4)] + ["spine0", "spine1"],
        "links": links}))
    verify(schedule)
    assert schedule.inverse_rate == Fraction(7, 10)  # no slower than one switch
    lengths = {len(path) for t in schedule.trees for e in t.edges for path, _ in e.paths}
    assert lengths == {3, 5}


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_one_rank(collective: str) -> None:
    schedule = plan(Network("one", ("r",), (), ()), collective)
    schedule.check()
    assert schedule.seconds(1e9) == schedule.bound_s(1e9) == 0
    with pytest.raises(ValueError, match="1 rank and moves no data"):
        schedule.algorithmic_bandwidth


def test_the_same_network_has_the_same_schedule() -> None:
    assert plan(preset("mi250:1")).to_json() == plan(preset("mi250:1")).to_json()


def test_bad_requests() -> None:
    ring = preset("ring:4")
    with pytest.raises(ValueError, match="'broadcast' is unknown. Choose from all_gather"):
        plan(ring, "broadcast")
    with pytest.raises(ValueError, match="trees=0 per root must be from 1"):
        plan(ring, trees=0)
    with pytest.raises(ValueError, match="not possible with all_gather, which has only one phase"):
        plan(ring, overlap=True)
    with pytest.raises(ValueError, match="cannot be combined with trees=2, .*Omit trees"):
        plan(ring, "all_reduce", 2, overlap=True)
    with pytest.raises(ValueError, match=r"integers up to \d+, .* fewer digits"):
        check_exact([LARGEST])
    primes = [999999937, 999999929, 999999893]
    uneven = Network.from_dict({"ranks": 3, "links": [
        [i, (i + 1) % 3, f"1000000007/{prime}"] for i, prime in enumerate(primes)]})
    with pytest.raises(ValueError, match="fewer digits"):
        plan(uneven)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(ValueError, match=r"need igraph; run pip install 'moe-plugin\[forest\]'"):
        plan(preset("ring:4"))
