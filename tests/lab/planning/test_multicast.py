"""Orders of multicasts, and what one costs."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.lab.planning import multicast
from moe_plugin.lab.planning.multicast import Multicast, MulticastStep
from moe_plugin.planner.cluster import Cluster, Link
from moe_plugin.planner.resharding import Slice, TensorLayout, unique_slices
from tests.planner.test_resharding import pairs

CLUSTER = Cluster(nodes=8, ranks_per_node=2, intra=Link(beta_s=1e-3), inter=Link(beta_s=1.0))


def test_costs_of_one_multicast() -> None:
    """12 bytes to two hosts of two devices each: t = 12 s between hosts."""
    to = [2, 3, 4, 5]
    assert multicast.send_receive_s(CLUSTER, 12, to, 0) == 48
    assert multicast.send_receive_s(CLUSTER, 12, [1], 0) == pytest.approx(0.012)
    assert multicast.local_all_gather_s(CLUSTER, 12, to) == pytest.approx(24 + 0.006)
    assert multicast.broadcast_s(CLUSTER, 12, to, chunks=6) == pytest.approx(12 * (1 + 2 / 6))
    with_alpha = Cluster(nodes=8, ranks_per_node=2, inter=Link(alpha_s=0.1, beta_s=1.0))
    best = multicast.best_chunks(with_alpha, 12, 2)
    assert best == min(range(1, 100), key=lambda k: multicast.broadcast_s(with_alpha, 12, to, k))


@pytest.mark.parametrize("hosts", [1, 2, 5])
@pytest.mark.parametrize("chunks", [1, 4, 32])
def test_a_chain_takes_what_the_model_says_less_one_chunk(hosts: int, chunks: int) -> None:
    seconds = multicast.chain(8.0, hosts, chunks).seconds
    assert seconds == pytest.approx(8.0 * (1 + hosts / chunks) - 8.0 / chunks)


def few(seed: int, most: int, receivers: int = 2) -> list[Multicast]:
    dice = random.Random(seed)
    return [Multicast(str(i), dice.choice([1, 2, 3, 5]), tuple(dice.sample(range(3), dice.choice(
        [1, 1, 2]))), tuple(dice.sample(range(3, 6), dice.randint(1, receivers))))
        for i in range(dice.randint(1, most))]


def best_of_all(tasks: list[Multicast]) -> float:
    return min(multicast.run([MulticastStep(t, s) for t,
                              s in zip(order, senders, strict=True)]).seconds
               for order in itertools.permutations(tasks)
               for senders in itertools.product(*(t.senders for t in order)))


@pytest.mark.parametrize("seed", range(25))
def test_the_search_finds_the_best_order(seed: int) -> None:
    tasks = few(seed, 5)
    steps, proven = multicast.depth_first(tasks)
    assert proven and multicast.run(steps).seconds == best_of_all(tasks)
    assert sorted(s.multicast.name for s in steps) == sorted(t.name for t in tasks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_best_order_of_six(seed: int) -> None:
    tasks = few(seed, 6)
    assert multicast.run(multicast.depth_first(tasks)[0]).seconds == best_of_all(tasks)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_greedy_orders_are_within_twice_the_load(seed: int) -> None:
    """With one receiving host each: twice the largest load of a host under the chosen senders."""
    tasks = few(seed, 20, receivers=1)
    for steps in (multicast.by_load(tasks), multicast.randomised(tasks, 5, seed)):
        done = multicast.run(steps)
        load = max(done.busy(f"host {h}") for h in range(6))
        assert multicast.lower_bound(tasks) - 1e-9 <= done.seconds <= 2 * load + 1e-9
        assert sorted(s.multicast.name for s in steps) == sorted(t.name for t in tasks)


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_orders_of_meshes_are_within_twice_the_lower_bound(
        pair: tuple[TensorLayout, TensorLayout]) -> None:
    tasks = multicast.multicasts(unique_slices(*pair), 4, CLUSTER)
    if tasks:
        seconds = multicast.run(multicast.plan_order(tasks)).seconds
        bound = multicast.lower_bound(tasks)
        assert bound - 1e-9 <= seconds <= 2 * bound + 1e-9


def test_equal_orders_on_every_rank() -> None:
    tasks = few(3, 20)
    assert multicast.plan_order(tasks) == multicast.plan_order(list(tasks))


def test_nobody_is_sent_what_nobody_needs() -> None:
    kept = Slice(((0, 4),), (0,), (), (0,))
    assert multicast.multicasts([kept], 4, CLUSTER) == []
    assert multicast.plan_order([]) == []
