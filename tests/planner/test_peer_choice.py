"""SWARM: shares of uneven peers, and of the sums of gradients."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from moe_plugin.planner.peer_choice import Wiring, butterfly_weights

pytestmark = pytest.mark.fast

SPEEDS = st.lists(st.floats(0.1, 10), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(SPEEDS, st.integers(1, 300), st.integers(0, 9))
def test_shares_follow_throughput(speeds: list[float], tasks: int, seed: int) -> None:
    """Within one task of N, or as many as the peer's share of one round of all peers."""
    wiring = Wiring(seed)
    for peer, speed in enumerate(speeds):
        wiring.announce(peer, speed)
    got = Counter()
    for _ in range(tasks):
        peer = wiring.choose()
        wiring.done(peer, 1.0, 1 / speeds[peer])
        got[peer] += 1
    for peer, speed in enumerate(speeds):
        share = speed / sum(speeds)
        assert abs(got[peer] / tasks - share) <= max(1, len(speeds) * share) / tasks + 1e-9


@pytest.mark.parametrize("peers", [2, 5, 16])
def test_equal_peers_are_within_one_task(peers: int) -> None:
    wiring = Wiring()
    for peer in range(peers):
        wiring.announce(peer, 1.0)
    got = Counter(wiring.choose() for _ in range(10 * peers + 1))
    assert set(got.values()) <= {10, 11}


def test_the_makespan_is_close_to_ideal() -> None:
    """1,000 tasks over peers of 1 to 8 tasks a second: within a task of the slowest peer."""
    speeds = {peer: 1.0 + peer for peer in range(8)}
    wiring, load = Wiring(), Counter()
    for peer, speed in speeds.items():
        wiring.announce(peer, speed)
    for _ in range(1000):
        load[wiring.choose()] += 1
    assert max(load[p] / s for p, s in speeds.items()) <= 1000 / sum(speeds.values()) + 1


def test_a_newcomer_starts_at_the_others_load_and_the_banned_get_nothing() -> None:
    wiring = Wiring()
    wiring.announce("old", 1.0)
    for _ in range(10):
        wiring.choose()
    wiring.announce("new", 1.0)
    assert Counter(wiring.choose() for _ in range(10)) == {"old": 5, "new": 5}
    wiring.ban("old")
    assert {wiring.choose() for _ in range(5)} == {"new"}
    with pytest.raises(LookupError, match="all 1 peers are excluded"):
        wiring.choose(but=frozenset({"new"}))
    wiring.done("old", 1.0, 1.0)  # an answer of a banned peer changes nothing
    wiring.announce("old", 1.0)
    assert wiring.peers == {"old", "new"}
    with pytest.raises(ValueError, match="must be > 0"):
        wiring.announce("slow", 0.0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(0.05, 20), min_size=3, max_size=8))
def test_butterfly_weights_solve_the_linear_program(bandwidths: list[float]) -> None:
    """Variables w and T: minimise T with (1 + (n - 2) w_i) <= T b_i."""
    n = len(bandwidths)
    rows = [[(n - 2) * (i == j) for j in range(n)] + [-b] for i, b in enumerate(bandwidths)]
    best = linprog([0] * n + [1], A_ub=rows, b_ub=[-1] * n, A_eq=[[1] * n + [0]], b_eq=[1]).fun
    got = butterfly_weights(bandwidths)
    assert sum(got) == pytest.approx(1) and min(got) >= 0
    assert max((1 + (n - 2) * w) / b for w, b in zip(got, bandwidths, strict=True)) == (
        pytest.approx(best, rel=1e-6))


def test_butterfly_weights_of_equal_and_of_few_peers() -> None:
    assert butterfly_weights([3.0] * 5) == pytest.approx([0.2] * 5)
    assert butterfly_weights([1.0, 3.0]) == [0.25, 0.75] and butterfly_weights([2.0]) == [1.0]
    with pytest.raises(ValueError, match="must be > 0"):
        butterfly_weights([1.0, 0.0])
