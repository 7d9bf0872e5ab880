"""Replicas of hot experts: those of one step, and those that stand for several."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.peer_choice import Throughput
from moe_plugin.planner.replicas import (
    ReplicaMap,
    host_placed,
    host_replicas,
    pack,
    place_replicas,
    replicate,
)
from moe_plugin.planner.spill import SpillCosts, round_shares
from moe_plugin.planner.standing import SLACK, TASKS, StandingReplicas, evenest, wired_shares

pytestmark = pytest.mark.fast


# Replicas of hot experts: against brute force, and what holds for any loads.


LOADS = st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=12)


def splits(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to give `parts` at least one of `total`."""
    return [tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))
            for cuts in itertools.combinations(range(1, total), parts - 1)]


@pytest.mark.parametrize("seed", range(30))
def test_numbers_of_replicas_are_the_best(seed: int) -> None:
    dice = random.Random(seed)
    loads = [dice.paretovariate(0.7) for _ in range(dice.randint(1, 5))]
    slots = len(loads) + dice.randint(0, 5)
    got = replicate(loads, slots)

    def largest(counts: tuple[int, ...]) -> float:
        return max(load / n for load, n in zip(loads, counts, strict=True))

    assert sum(got) == slots and min(got) >= 1
    assert largest(tuple(got)) == min(map(largest, splits(slots, len(loads))))


@pytest.mark.parametrize("seed", range(30))
def test_packs_are_within_four_thirds_of_the_best(seed: int) -> None:
    dice = random.Random(seed)
    packs, size = dice.choice([(2, 2), (2, 3), (2, 4), (3, 2), (4, 2)])
    loads = [dice.paretovariate(1.0) for _ in range(packs * size)]

    def fullest(order: tuple[int, ...]) -> float:
        return max(sum(loads[i] for i in order[p * size:(p + 1) * size]) for p in range(packs))

    made = pack(loads, packs)
    got = fullest(tuple(i for items in made for i in items))
    best = min(fullest(order) for order in itertools.permutations(range(packs * size)))
    assert got <= 4 / 3 * best + 1e-9


@settings(max_examples=200, deadline=None)
@given(LOADS, st.integers(1, 4))
def test_packs_differ_by_one_item_at_most(loads: list[float], packs: int) -> None:
    loads = loads * packs
    made = pack(loads, packs)
    sums = [sum(loads[i] for i in items) for items in made]
    assert sorted(i for items in made for i in items) == list(range(len(loads)))
    assert {len(items) for items in made} == {len(loads) // packs}
    assert max(sums) - min(sums) <= max(loads) + 1e-9
    assert max(sums) <= sum(sums) / packs + max(loads) + 1e-9


@settings(max_examples=100, deadline=None)
@given(LOADS, st.integers(1, 4), st.integers(0, 3))
def test_every_expert_has_a_slot_and_ranks_are_within_a_slot_of_the_mean(
        loads: list[float], ranks: int, extra: int) -> None:
    slots = (-(-len(loads) // ranks) + extra) * ranks
    placed = place_replicas(loads, slots, ranks)
    assert len(placed.logical) == slots and set(placed.physical) == set(range(len(loads)))
    by_rank = placed.rank_loads(loads)
    assert sum(by_rank) == pytest.approx(sum(loads))
    hottest = max(load / len(placed.physical[e]) for e, load in enumerate(loads))
    assert max(by_rank) <= sum(loads) / ranks + hottest + 1e-6


def test_groups_stay_on_one_node() -> None:
    """16 experts in 4 groups on 2 nodes of 2 ranks, as EPLB's hierarchical form."""
    dice = random.Random(0)
    loads = [dice.paretovariate(0.8) for _ in range(16)]
    placed = place_replicas(loads, 24, 4, nodes=2, groups=4)
    for group in range(4):
        homes = {slot // 12 for e in range(group * 4, group * 4 + 4)
                 for slot in placed.physical[e]}
        assert len(homes) == 1
    assert max(placed.rank_loads(loads)) < max(
        sum(loads[r * 4:r * 4 + 4]) for r in range(4))
    # three groups do not divide over two nodes
    assert place_replicas(loads[:15], 16, 4, nodes=2, groups=3) == place_replicas(
        loads[:15], 16, 4)


def test_what_a_new_map_must_fetch() -> None:
    before, after = ReplicaMap((0, 1, 2, 0), 2), ReplicaMap((0, 2, 2, 1), 2)
    assert after.incoming(before) == [(2,), (1,)]
    assert before.incoming(before) == [(), ()]


@pytest.mark.parametrize("args, more, words", [
    (([1.0] * 4, 3, 1), {}, "slots=3 is not possible; .* multiple of 1 ranks and >= 4 experts"),
    (([1.0] * 4, 5, 2), {}, "slots=5"), (([1.0] * 4, 4, 2), {"nodes": 3}, "nodes=3"),
    (([1.0] * 4, 4, 2), {"groups": 3}, "groups=3"), (([-1.0], 1, 1), {}, "must be >= 0"),
])
def test_what_does_not_fit_is_named(args: tuple, more: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place_replicas(*args, **more)


# Replicas that stand for several steps: who has them, and which rows they get.


FREE = SpillCosts(row_s=1.0)  # lending costs nothing


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3), st.integers(1, 5),
       st.integers(1, 3), st.sampled_from([host_replicas, host_placed]))
def test_experts_stay_and_guests_are_others(loads: list[int], ranks: int, guests: int,
                                            place: Callable[..., ReplicaMap]) -> None:
    loads = [load * (i + 1) for i in range(ranks) for load in loads]
    local = len(loads) // ranks
    placed = place(loads, ranks, guests)
    assert placed.slots == local + guests
    for rank in range(ranks):
        slots = placed.logical[rank * placed.slots:(rank + 1) * placed.slots]
        own = list(range(rank * local, (rank + 1) * local))
        assert list(slots[:local]) == own
        hosted = [e for e in slots[local:] if e not in own]
        assert len(set(hosted)) == len(hosted) and all(loads[e] for e in hosted)
        assert all(e in own[:1] for e in slots[local:] if e not in hosted)
    for expert in range(len(loads)):
        assert expert // local in placed.holders(expert)


def rows(loads: list[int], ranks: int, guests: int, speeds: list[float],
         placed: ReplicaMap | None = None) -> list[float]:
    """Of each rank, as the shares give them out."""
    placed = placed or host_replicas(loads, ranks, guests, speeds)
    shares, local = wired_shares(loads, placed, speeds), len(loads) // ranks
    found = [0.0] * ranks
    for expert, load in enumerate(loads):
        given_ = shares.get(expert, {expert // local: 1.0})
        assert sum(given_.values()) == pytest.approx(1)
        assert set(given_) <= set(placed.holders(expert))
        for rank, share in given_.items():
            found[rank] += share * load
    return found


@pytest.mark.parametrize("speeds", [[1.0] * 4, [1.0, 1.0, 0.5, 1.0], [4.0, 1.0, 1.0, 2.0]],
                         ids=str)
def test_rows_go_by_throughput(speeds: list[float]) -> None:
    """One expert has all: within a task of SWARM's bound for each rank."""
    loads = [12_800, 0, 0, 0]
    for got, speed in zip(rows(loads, 4, 1, speeds), speeds, strict=True):
        share = speed / sum(speeds)
        bound = max(1, 4 * share) * sum(loads) / (4 * TASKS)
        assert abs(got - share * sum(loads)) <= bound + 1e-6


def test_a_hot_expert_and_its_neighbours() -> None:
    assert max(rows([900, 100, 100, 100], 2, 1, [1.0, 1.0])) < 640
    assert max(rows([900, 100, 100, 100], 4, 1, [1.0] * 4)) < 380


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=8, max_size=8), st.integers(1, 2))
def test_the_evenest_of_several(loads: list[int], guests: int) -> None:
    speeds, maps = [1.0] * 4, [make(loads, 4, guests) for make in (host_replicas, host_placed)]
    placed, _ = evenest(maps, loads, speeds)
    most = [max(rows(loads, 4, guests, speeds, m)) for m in (placed, *maps)]
    assert most[0] <= min(most[1:]) * (1 + SLACK)


@pytest.mark.parametrize(("loads", "before", "after"), [
    # 3's 800 leave whole; replicas of the largest experts alone leave 100 with them
    ([200, 0, 200, 0, 400, 800, 0, 800], 1.2, 1.05),
    # a rank whose experts are all busy, none the busiest
    ([50, 50, 50, 50, 80, 0, 0, 0, 80, 0, 0, 0, 80, 0, 0, 0], 1.3, 1.12),
])
def test_what_hosted_replicas_alone_leave(loads: list[int], before: float, after: float) -> None:
    mean = sum(loads) / 4
    assert max(rows(loads, 4, 1, [1.0] * 4)) > before * mean
    replicas = standing()
    replicas.add([loads] * 4)
    replicas.place()
    assert replicas.placed is not None
    assert max(rows(loads, 4, 1, [1.0] * 4, replicas.placed)) < after * mean


def standing(costs: SpillCosts = FREE, every: int = 2) -> StandingReplicas:
    return StandingReplicas(4, costs, 1, every)


HOT, EVEN = [[90, 10, 10, 10]] * 4, [[30, 30, 30, 30]] * 4


def test_placed_every_so_many_steps_by_the_mean_load() -> None:
    replicas = standing()
    assert replicas.plan(HOT) is None
    for step in (1, 2):
        replicas.add(HOT)
        due = replicas.finish_step()
        assert due == (step == 2)
    replicas.place()
    plan = replicas.plan([[9, 1, 0, 0], [0, 0, 3, 0], [30, 0, 0, 2], [0] * 4])
    assert plan is not None and [loan.expert for loan in plan.loans] == [0]
    assert sum(plan.amounts[0]) == 39 and max(plan.amounts[0]) < 20
    assert replicas.placed is not None and len(replicas.placed.holders(0)) > 1
    assert max(rows([90, 10, 10, 10], 4, 1, [1.0] * 4)) < 1.1 * 30
    # loads that are even take them away; so does a place without loads
    replicas.add(EVEN)
    replicas.place()
    assert replicas.placed is None and replicas.plan(HOT) is None


def test_not_where_lending_costs_more_than_it_saves() -> None:
    replicas = standing(SpillCosts(row_s=1e-6, lend_s=1.0))
    replicas.add(HOT)
    replicas.place()
    assert replicas.plan(HOT) is None


def test_a_resumed_run_goes_on() -> None:
    replicas = standing(every=3)
    for _ in range(3):
        replicas.add(HOT)
        replicas.finish_step()
    replicas.place([1.0, 1.0, 0.5, 1.0])
    replicas.add(EVEN)
    replicas.finish_step()
    again = standing(every=3)
    again.load_state(replicas.state())
    assert again.state() == replicas.state() and again.plan(HOT) == replicas.plan(HOT)
    assert [again.finish_step() for _ in range(2)] == [False, True]
    other = StandingReplicas(2, FREE, 1, 3)
    other.load_state(replicas.state())
    assert other.plan(HOT) is None


def test_the_average_has_no_bias_of_its_start() -> None:
    mean = Throughput()
    assert mean.value is None
    mean.add(2.0, 0.5)
    assert mean.value == pytest.approx(4.0)
    mean.add(1.0, 1.0)
    assert mean.value == pytest.approx((0.9 * 0.1 * 4 + 0.1 * 1) / 0.19)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(any), st.integers(0, 500))
def test_rounded_shares_have_the_sum_and_keep_their_quota(shares: list[float],
                                                          total: int) -> None:
    got = round_shares(shares, total)
    assert sum(got) == total
    assert all(n >= int(total * share / sum(shares) * (1 - 1e-12))
               for n, share in zip(got, shares, strict=True))


def test_rounding_by_hand() -> None:
    """Quota 100 / 11: 5, 3, 1; the tenth goes to the largest of 50/6, 34/4, 16/2."""
    assert round_shares([50, 34, 16], 10) == [5, 4, 1]
    assert round_shares([1, 1], 1) == [1, 0] and round_shares([0, 5], 3) == [0, 3]
    for bad in (([], 1), ([-1, 2], 1), ([0, 0], 1), ([1], -1)):
        with pytest.raises(ValueError, match="must be >= 0"):
            round_shares(*bad)
