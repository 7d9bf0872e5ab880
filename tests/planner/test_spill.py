"""Plans of overloaded experts: against brute force, their bounds, and what they cost."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.config.parallel import ParallelConfig
from moe_plugin.planner.choice import LayoutChoice, combinations
from moe_plugin.planner.cluster import Cluster, Device, Link
from moe_plugin.planner.layer_cost import LayerShape, layer_cost, rank_choices, spill_costs
from moe_plugin.planner.spill import LEAST_GAIN, SpillCosts, SpillPlan, plan_spill

pytestmark = pytest.mark.fast

Counts = list[list[int]]
COMPUTE = SpillCosts(row_s=1.0)  # nothing but the rows of the busiest rank


@st.composite
def loads(draw: st.DrawFn, most_ranks: int = 4, most_local: int = 2) -> Counts:
    """Rows by source rank and expert, some of them hot."""
    ranks, local = draw(st.integers(2, most_ranks)), draw(st.integers(1, most_local))
    dice = random.Random(draw(st.integers(0, 10**6)))
    weights = [dice.paretovariate(0.6) for _ in range(ranks * local)]
    rows = draw(st.integers(0, 300))
    return [[round(rows * w / sum(weights) * dice.uniform(0.2, 1.8)) for w in weights]
            for _ in range(ranks)]


def plain_rows(counts: Counts) -> int:
    """Rows of the busiest rank without a plan."""
    local = len(counts[0]) // len(counts)
    totals = [sum(column) for column in zip(*counts, strict=True)]
    return max(sum(totals[i:i + local]) for i in range(0, len(totals), local))


def rows_of(counts: Counts, plan: SpillPlan | None) -> int:
    return plain_rows(counts) if plan is None else plan.spread().rows


def fewest_rows(counts: Counts, guests: int) -> int:
    """Rows of the busiest rank in the best of all plans: every set of loans that no rank has more
    than `guests` of. Of a set it is the largest, over sets of experts, of their rows over the ranks
    that can compute any of them (max-flow, min-cut).
    """
    ranks, totals = len(counts), [sum(column) for column in zip(*counts, strict=True)]
    local = len(totals) // ranks
    borrowed = [[s for n in range(guests + 1) for s in itertools.combinations(
        [e for e in range(len(totals)) if e // local != w], n)] for w in range(ranks)]

    def least(sets: tuple[tuple[int, ...], ...]) -> int:
        who = [{e // local, *(w for w in range(ranks) if e in sets[w])}
               for e in range(len(totals))]
        return max(-(-sum(totals[e] for e in some) // len(set().union(*(who[e] for e in some))))
                   for n in range(1, len(totals) + 1)
                   for some in itertools.combinations(range(len(totals)), n))

    return min(map(least, itertools.product(*borrowed)))


@settings(max_examples=40, deadline=None)
@given(st.one_of(loads(3, 1), loads(2, 2)), st.integers(1, 2))
def test_least_loaded_is_within_four_thirds_of_the_best_plan(counts: Counts, guests: int) -> None:
    found = rows_of(counts, plan_spill(counts, COMPUTE, "least_loaded", guests))
    assert found <= max(4 / 3 * fewest_rows(counts, guests), fewest_rows(counts, guests) + 1)


@settings(max_examples=150, deadline=None)
@given(loads(6, 4), st.sampled_from(["least_loaded", "everywhere"]), st.integers(1, 3),
       st.floats(0, 2), st.floats(0, 200))
def test_what_every_plan_keeps(counts: Counts, policy: str, guests: int, travel: float,
                               lend: float) -> None:
    """Every row is computed once, no rank borrows too much, and the busiest rank has no more rows
    than without a plan; what the plan says of the busiest rank is so.
    """
    costs = SpillCosts(row_s=1.0, travel_s=travel, lend_s=lend)
    plan = plan_spill(counts, costs, policy, guests)
    if plan is None:
        return
    ranks, local = plan.ranks, plan.local
    assert plan.loans and plan.most_guests <= guests
    came, left, rows = [0] * ranks, [0] * ranks, [0] * ranks
    lent = {loan.expert for loan in plan.loans}
    for expert in range(ranks * local):
        owner = [[row[expert] if w == expert // local else 0 for w in range(ranks)]
                 for row in counts]
        flow = plan.flows(expert) if expert in lent else owner
        for source, by_target in enumerate(flow):
            assert sum(by_target) == counts[source][expert] and min(by_target) >= 0
            for target, n in enumerate(by_target):
                rows[target] += n
                came[target] += n * (source != target)
                left[source] += n * (source != target)
                assert not n or target == expert // local or expert in plan.guests(target)
    spread = plan.spread()
    assert (spread.rows, spread.travel) == (max(rows), max(*came, *left))
    assert spread.rows <= plain_rows(counts)
    by_hand = max(sum(loan.owner == w for loan in plan.loans) for w in range(ranks))
    assert spread.lending >= by_hand and spread.lending <= by_hand + plan.most_guests * 2


@settings(max_examples=60, deadline=None)
@given(loads(6, 4))
def test_without_limits_no_rank_has_more_than_its_share(counts: Counts) -> None:
    plan = plan_spill(counts, COMPUTE, "least_loaded", 10**6)
    mean = sum(map(sum, counts)) / len(counts)
    assert rows_of(counts, plan) <= max(-(-sum(map(sum, counts)) // len(counts)),
                                        (1 + LEAST_GAIN) * mean)


def test_half_of_the_rows_by_hand() -> None:
    """One of eight experts has half of the rows of four ranks: every rank computes its share, and
    of this expert mostly rows that it has itself.
    """
    counts = [[700, *[100] * 7]] * 4
    plan = plan_spill(counts, SpillCosts(row_s=1.0, travel_s=1.0, lend_s=100.0), "least_loaded", 1)
    assert plan is not None
    assert [(loan.expert, loan.helpers) for loan in plan.loans] == [(0, (1, 2, 3))]
    assert plan.amounts[0] == [1000, 600, 600, 600]
    assert plan.flows(0) == [[700, 0, 0, 0], [100, 600, 0, 0], [100, 0, 600, 0], [100, 0, 0, 600]]
    spread = plan.spread()
    # into the owner: 300 rows of expert 0 and 300 of its other one; out of a borrower: 100 of 0,
    # 500 of others
    assert (spread.rows, spread.travel) == (1400, 600)
    # once from the owner, then two thirds from one borrower to the others
    assert spread.lending == pytest.approx(1 + 2 / 3)


def test_an_even_load_and_dear_weights_spill_nothing() -> None:
    hot, even = [[900, 100], [900, 100]], [[500, 500], [500, 500]]
    for policy in ("least_loaded", "everywhere"):
        assert plan_spill(even, COMPUTE, policy, 2) is None
        assert plan_spill(hot, dataclasses.replace(COMPUTE, lend_s=1e6), policy, 2) is None
        assert plan_spill(hot, dataclasses.replace(COMPUTE, fixed_s=1e6), policy, 2) is None
        assert plan_spill(hot, COMPUTE, policy, 2) is not None
        assert plan_spill([[5, 0]], COMPUTE, policy, 2) is None
        assert plan_spill([[0, 0], [0, 0]], COMPUTE, policy, 2) is None
    assert plan_spill(hot, COMPUTE, "never", 2) is None


def everywhere(counts: Counts, experts: tuple[int, ...]) -> SpillPlan:
    """A plan in which every rank computes its own rows of some experts."""
    return SpillPlan(counts, {e: [row[e] for row in counts] for e in experts})


def test_everywhere_is_close_to_the_best_of_all_sets() -> None:
    """FasterMoE's order, by decreasing load, against all 2^E sets of shadows."""
    used = 0
    for seed in range(60):
        dice = random.Random(seed)
        ranks, experts = dice.choice([(2, 4), (4, 8), (8, 8), (2, 8)])
        weights = [dice.paretovariate(0.7) for _ in range(experts)]
        counts = [[round(500 * w / sum(weights) * dice.uniform(0.5, 1.5)) for w in weights]
                  for _ in range(ranks)]
        costs = SpillCosts(row_s=1.0, travel_s=dice.choice([0.2, 1, 5]),
                           lend_s=dice.choice([20, 100, 500]))
        sets = [everywhere(counts, s).spread() for n in range(experts + 1)
                for s in itertools.combinations(range(experts), n)]
        best = min(costs.seconds(s) for s in sets if s.rows <= plain_rows(counts))
        plan = plan_spill(counts, costs, "everywhere", experts)
        found = sets[0] if plan is None else plan.spread()
        assert costs.seconds(found) <= 1.25 * best
        used += plan is not None
    assert used > 20


A_CLUSTER = Cluster(nodes=4, ranks_per_node=1, inter=Link(alpha_s=2e-4, beta_s=1 / 25e6))
A_CORE = Device(flops=5e10, half_rows=16, memory_bytes_s=8e9, launch_s=3e-5, memory_bytes=8e9)
A_LAYER = LayerShape(tokens=4096, model_dim=256, hidden_dim=256, experts=8, top_k=1,
                     element_bytes=4)


def test_predicted_times_of_a_layer_follow_the_load() -> None:
    """Where one expert has half of the rows, spilling is predicted faster and to need less memory;
    under an even load it is the same layout. Weights that are large for their rows stay at home.
    """
    hot, plain = dataclasses.replace(A_LAYER, skew=16 / 7), LayoutChoice(r=1)
    spilling = [LayoutChoice(r=1, spill=name) for name in ("least_loaded", "everywhere")]

    def cost(shape: LayerShape, choice: LayoutChoice) -> tuple[float, float]:
        found = layer_cost(shape, A_CLUSTER, A_CORE, choice)
        return found.seconds, found.memory_bytes

    for choice in spilling:
        assert cost(A_LAYER, choice) == cost(A_LAYER, plain)
        assert cost(hot, choice)[0] < cost(hot, plain)[0] / 1.5
        assert cost(hot, choice)[1] < cost(hot, plain)[1]
        few = dataclasses.replace(hot, tokens=64, hidden_dim=4096)
        assert cost(few, choice) == cost(few, plain)
    phases = layer_cost(hot, A_CLUSTER, A_CORE, spilling[0]).phases()
    assert phases["parameters"] > 0 and phases["gradients"] > 0
    ranked = rank_choices(hot, A_CLUSTER, A_CORE, [plain, *spilling])
    assert ranked[0].choice.spill == "least_loaded" and ranked[-1].choice == plain
    assert spill_costs(hot, A_CLUSTER, A_CORE).lend_s == pytest.approx(
        2 * 2 * 256 * 256 * 4 / 25e6)


def test_spilling_is_combined_with_what_it_fits() -> None:
    values = {"r": [0, 1, 2], "algorithm": ["linear"], "kernel": ["auto"], "d": [1, 2],
              "d_backward": [0], "gather_tokens": [False, True], "spill": ["never", "everywhere"]}
    found = [c for c in combinations(values, 4) if c.spill != "never"]
    assert {(c.r, c.d, c.gather_tokens) for c in found} == {(2, 1, False), (2, 2, False)}
    assert found[0].label.endswith("spill=everywhere")
    with pytest.raises(ValueError, match="spill='some' is unknown. Choose from never"):
        LayoutChoice(r=1, spill="some")


@settings(max_examples=60, deadline=None)
@given(loads(5, 4), st.data())
def test_slower_ranks_get_fewer_rows(counts: Counts, data: st.DataObject) -> None:
    """Every row is computed, and no rank has more than its share by speed, or 5 % above it."""
    speeds = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=len(counts),
                                max_size=len(counts)))
    local, total = len(counts[0]) // len(counts), sum(map(sum, counts))
    rows = [sum(sum(row[w * local:(w + 1) * local]) for row in counts) for w in range(len(counts))]
    plan = plan_spill(counts, COMPUTE, "least_loaded", 10**6, speeds)
    if plan is not None:
        for loan in plan.loans:
            for rank, more in enumerate(plan.amounts[loan.expert]):
                rows[rank] += more
            rows[loan.owner] -= sum(row[loan.expert] for row in counts)
    assert sum(rows) == total
    assert all(n <= max(total * speed / sum(speeds) + 1,
                        (1 + LEAST_GAIN) * total * speed / sum(speeds) + 1 / min(speeds))
               for n, speed in zip(rows, speeds, strict=True))


@settings(max_examples=60, deadline=None)
@given(loads(5, 4), st.integers(1, 3))
def test_equal_speeds_balance_as_none(counts: Counts, guests: int) -> None:
    """But for the row of a share that is not whole."""
    by_speed = plan_spill(counts, COMPUTE, "least_loaded", guests, [1.0] * len(counts))
    plan = plan_spill(counts, COMPUTE, "least_loaded", guests)
    assert abs(rows_of(counts, by_speed) - rows_of(counts, plan)) <= 1


def test_speeds_of_a_layer() -> None:
    parallel = ParallelConfig(speeds="1,0.5")
    assert parallel.rank_speeds(2) == (1.0, 0.5) and ParallelConfig().rank_speeds(2) is None
    with pytest.raises(ValueError, match="expert-parallel ranks, 3"):
        parallel.rank_speeds(3)
    for bad in ("1,x", "1,0", "", "1,nan", "1,-1"):
        with pytest.raises(ValueError, match="parallel.speeds"):
            ParallelConfig(speeds=bad)
