"""Experts placed by who is chosen together: against all orders, planted groups, even loads."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from moe_plugin.planner.expert_order import CoChoices, best_order, place, rows_of
from moe_plugin.planner.order_files import (
    dump_choices,
    dump_orders,
    load_choices,
    load_orders,
    match_layers,
)

pytestmark = pytest.mark.fast


def counted(sets: Sequence[Sequence[int]], experts: int, groups: int = 1) -> CoChoices:
    pairs = [[0] * experts for _ in range(experts)]
    for chosen in sets:
        for e, f in itertools.product(chosen, repeat=2):
            pairs[e][f] += 1
    return CoChoices(len(sets), pairs, [tuple(chosen) for chosen in sets], groups)


def pairs_alone(choices: CoChoices) -> CoChoices:
    return CoChoices(choices.tokens, choices.pairs_EE, (), choices.groups)


def targets_met(sets: Sequence[Sequence[int]], order: Sequence[int], targets: int) -> float:
    """Mean targets of a token, by hand."""
    each, met = len(order) // targets, 0
    for chosen in sets:
        met += len({order.index(e) // each for e in chosen})
    return met / len(sets)


def cuts(experts: Sequence[int], targets: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each target as many experts, as orders."""
    if targets == 1:
        yield tuple(experts)
        return
    first, *rest = experts
    for others in itertools.combinations(rest, len(experts) // targets - 1):
        for tail in cuts([e for e in rest if e not in others], targets - 1):
            yield (first, *others, *tail)


def loads_of(choices: CoChoices, order: Sequence[int], targets: int) -> list[int]:
    each = len(order) // targets
    return [sum(choices.loads[e] for e in order[i:i + each]) for i in range(0, len(order), each)]


def even(choices: CoChoices, order: Sequence[int], targets: int, slack: float) -> bool:
    now = max(loads_of(choices, range(choices.experts), targets))
    return max(loads_of(choices, order, targets)) <= now * (1 + slack) + 1e-9


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("experts,targets", [(8, 2), (8, 4), (9, 3)])
@pytest.mark.parametrize("slack", [0.0, 10.0])
def test_as_good_as_the_best_of_all_orders(seed: int, experts: int, targets: int,
                                           slack: float) -> None:
    rng = random.Random(seed)
    choices = counted([rng.sample(range(experts), rng.choice([2, 3])) for _ in range(40)], experts)
    all_ = [rows_of(choices, order, targets, targets).nodes
            for order in cuts(range(experts), targets) if even(choices, order, targets, slack)]
    order = best_order(choices, targets, targets, slack)
    assert sorted(order) == list(range(experts)) and even(choices, order, targets, slack)
    assert rows_of(choices, order, targets, targets).nodes == pytest.approx(min(all_))


@pytest.mark.parametrize("seed", range(3))
def test_nodes_first_then_the_ranks_of_each(seed: int) -> None:
    rng = random.Random(seed)
    choices = counted([rng.sample(range(8), 3) for _ in range(60)], 8)
    order = best_order(choices, 2, 4, 10.0)
    found = rows_of(choices, order, 2, 4)
    assert found.nodes == pytest.approx(min(
        rows_of(choices, order, 2, 4).nodes for order in cuts(range(8), 2)))
    within = [(*left, *right) for left in cuts(sorted(order[:4]), 2)
              for right in cuts(sorted(order[4:]), 2)]
    assert found.ranks == pytest.approx(min(rows_of(choices, o, 2, 4).ranks for o in within))
    assert found.pairs == 3


def test_rows_are_counted_token_by_token() -> None:
    rng = random.Random(1)
    sets = [rng.sample(range(12), rng.choice([1, 2, 5])) for _ in range(50)]
    choices, order = counted(sets, 12), rng.sample(range(12), 12)
    found = rows_of(choices, order, 2, 6)
    assert found.nodes == pytest.approx(targets_met(sets, order, 2))
    assert found.ranks == pytest.approx(targets_met(sets, order, 6))
    # half as many experts as ranks: each is on two of them
    assert rows_of(choices, order, 2, 24).ranks == pytest.approx(2 * targets_met(sets, order, 12))
    bound = rows_of(pairs_alone(choices), order, 2, 6)
    assert bound.nodes <= found.nodes and bound.ranks <= found.ranks


def planted(groups: int, size: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Hidden groups of experts, and tokens that choose three of one; every expert as often."""
    names = list(range(groups * size))
    random.Random(seed).shuffle(names)
    hidden = [names[i:i + size] for i in range(0, len(names), size)]
    sets = [[group[(at + j) % size] for j in range(3)] for _ in range(6) for at in range(size)
            for group in hidden]
    random.Random(seed).shuffle(sets)
    return hidden, sets


@pytest.mark.parametrize("alone", [False, True])
def test_planted_groups_are_found(alone: bool) -> None:
    hidden, sets = planted(8, 8, 3)
    choices = counted(sets, 64)
    placed = place(pairs_alone(choices) if alone else choices, 8, 8)
    found = {frozenset(placed.order[i:i + 8]) for i in range(0, 64, 8)}
    assert found == set(map(frozenset, hidden))
    assert targets_met(sets, placed.order, 8) == 1.0 < 2 < targets_met(sets, range(64), 8)
    assert placed.busiest == (1.0, 1.0) and placed.moves > 32
    assert placed.saved("nodes") == pytest.approx(1 - placed.after.nodes / placed.before.nodes)
    if not alone:
        assert placed.after.nodes == 1.0 and placed.saved("nodes") > 0.5


def test_groups_of_a_router_stay_together() -> None:
    """Whole groups move where a node has some, else experts inside of a group."""
    hidden, sets = planted(2, 8, 0)
    pairs_of_groups = [[4 * g + e for g in pair for e in range(2)]
                       for pair in ((0, 2), (1, 3)) for _ in range(20)]
    placed = place(counted(pairs_of_groups, 16, groups=4), 2, 4, 10.0)
    assert placed.after.nodes == 1.0 < placed.before.nodes
    assert all(len({e // 4 for e in placed.order[i:i + 4]}) == 1 for i in range(0, 16, 4))
    mixed = counted(sets, 16, groups=2)
    order = best_order(mixed, 4, 4, 10.0)
    assert all(e // 8 == i // 8 for i, e in enumerate(order))
    assert rows_of(mixed, order, 4, 4).nodes < rows_of(mixed, range(16), 4, 4).nodes
    with pytest.raises(ValueError, match="3 groups of experts do not fit 2 nodes"):
        place(counted(sets, 18, groups=3), 2, 6)


def test_no_rank_gets_busier_than_slack_allows() -> None:
    """Two hot experts that are chosen together stay apart, unless a busier rank is allowed."""
    choices = counted([(0, 2)] * 30 + [(1, 3)] * 2, 4)
    kept, moved = place(choices, 1, 2), place(choices, 1, 2, slack=1.0)
    assert kept.order == (0, 1, 2, 3) and kept.saved("ranks") == 0
    assert moved.after.ranks == 1.0 and moved.busiest[1] == pytest.approx(2 * 30 / 32)


def test_one_choice_too_many_is_too_many_and_the_next_best_order_is_found() -> None:
    """Experts 0 and 2 go together most, but with one choice of millions more than is allowed."""
    sets = [(0, 2), (1, 3)] * 40 + [(0, 3), (1, 2)] * 20 + [(0, 1), (2, 3)]
    few, load = counted(sets, 4), (10**8 + 1, 10**8, 10**8 + 1, 10**8)
    pairs = [[load[e] if e == f else n for f, n in enumerate(row)]
             for e, row in enumerate(few.pairs_EE)]
    choices = CoChoices(10**8, pairs, few.sets)
    assert {frozenset(best_order(choices, 1, 2)[:2])} < {frozenset({0, 3}), frozenset({1, 2})}
    assert set(best_order(choices, 1, 2, slack=0.01)[:2]) in ({0, 2}, {1, 3})


def test_what_saves_nothing_changes_nothing() -> None:
    every = counted(list(itertools.combinations(range(6), 2)) * 4, 6)
    assert place(every, 3, 3).order == tuple(range(6)) and place(every, 3, 3).moves == 0
    one_each = place(counted([(0, 1), (2, 3)], 4), 1, 4)
    assert one_each.order == (0, 1, 2, 3) and one_each.after.ranks == 2


@pytest.mark.parametrize("change,words", [
    ({"tokens": 0}, "counts of 0 tokens"), ({"groups": 3}, "in 3 groups"),
    ({"sets": [(0, 4)]}, r"not in 0..3"), ({"pairs_EE": [[1, 0]]}, "must be a row")])
def test_counts_that_do_not_fit(change: dict, words: str) -> None:
    good = counted([(0, 1), (2, 3)], 4)
    with pytest.raises(ValueError, match=words):
        CoChoices(**{"tokens": good.tokens, "pairs_EE": good.pairs_EE, "sets": good.sets, **change})


def test_ranks_that_do_not_fit() -> None:
    choices = counted([(0, 1), (2, 3)], 4)
    for nodes, ranks, slack in ((2, 3, 0.0), (1, 3, 0.0), (4, 6, 0.0), (1, 2, -1.0)):
        with pytest.raises(ValueError, match="do not fit|slack"):
            place(choices, nodes, ranks, slack)


def test_files(tmp_path: Path) -> None:
    choices = counted([(0, 1), (2, 3), (1,)], 4, groups=2)
    dump_choices(tmp_path / "choices.json", {"a": choices})
    assert load_choices(tmp_path / "choices.json") == {"a": choices}
    dump_orders(tmp_path / "order.json", {"a": (1, 0, 2)})
    assert load_orders(tmp_path / "order.json") == {"a": (1, 0, 2)}
    with pytest.raises(ValueError, match=r"no orders of experts.*--choices"):
        load_orders(tmp_path / "choices.json")
    text = json.loads((tmp_path / "order.json").read_text())
    for bad in ([0, 0], [0, 2], [True, 1], 3, [0.0]):
        (tmp_path / "bad.json").write_text(json.dumps({**text, "layers": {"a": bad}}))
        with pytest.raises(ValueError, match="is damaged|each of 0"):
            load_orders(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        load_choices(tmp_path / "bad.json")


def test_layers_by_name_or_in_their_order() -> None:
    prefixes = ["decoder.layers.1.moe.", "decoder.layers.10.moe.", "decoder.layers.2.moe."]
    names = {"decoder.layers.1": 0, "decoder.layers.2": 0}
    assert match_layers(names, prefixes, "it") == {
        "decoder.layers.1.moe.": "decoder.layers.1", "decoder.layers.2.moe.": "decoder.layers.2"}
    by_number = match_layers({"layer10": 0, "layer2": 0, "layer3": 0}, prefixes, "it")
    assert by_number == {prefixes[0]: "layer2", prefixes[2]: "layer3", prefixes[1]: "layer10"}
    assert match_layers({"": 0}, [""], "it") == {"": ""}
    with pytest.raises(ValueError, match="same names or be as many"):
        match_layers({"layer1": 0}, prefixes, "it")
