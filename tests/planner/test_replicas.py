"""Replicas of hot experts: against brute force, and what holds for any loads."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.replicas import ReplicaMap, pack, place_replicas, replicate

pytestmark = pytest.mark.fast

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
