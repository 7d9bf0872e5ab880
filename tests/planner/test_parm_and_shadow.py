"""Parm's choice against its event timeline over the published sweep, FasterMoE's policy against all
subsets, PPMoE against all-to-all.
"""

from __future__ import annotations

import itertools
import random

import pytest

from moe_plugin.planner.cluster import Cluster, Link
from moe_plugin.planner.collectives import Group, all_reduce_s, all_to_all_s
from moe_plugin.planner.parm import ParmShape, choose_schedule, schedule_s, simulated_s
from moe_plugin.planner.shadow import ShadowModel, choose_shadows
from tests.planner.problems import cluster

PARM = Cluster(nodes=4, ranks_per_node=8, nics=8, intra=Link(alpha_s=1e-5, beta_s=1 / 12e9),
               inter=Link(alpha_s=2e-5, beta_s=1 / 6e9))


def sweep() -> list[ParmShape]:
    """1,296 layers: batch, length, widths, k, f, N_MP, N_ESP."""
    return [
        ParmShape(tokens=b * length, model_dim=m, rows_factor=k * f, replicas=mp, shards=esp)
        for b, length, m, k, f, mp, esp in itertools.product((2, 4, 8), (512, 1024, 2048), (
            1024, 2048, 4096, 8192), (1, 2), (1.2, 2.4), (1, 2, 4), (1, 2, 4))
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_choice_is_the_simulated_best(overlap: bool) -> None:
    shapes = sweep()
    assert len(shapes) == 1296
    times = [{s: simulated_s(shape, PARM, s, overlap) for s in ("s1", "s2")} for shape in shapes]
    right = sum(
        times[i][choose_schedule(shape, PARM, overlap)] <= min(times[i].values()) * (1 + 1e-9)
        for i, shape in enumerate(shapes))
    assert right >= 0.95 * len(shapes)
    chosen = {choose_schedule(shape, PARM, overlap) for shape in shapes}
    # k f > 1 everywhere: without overlap S2 gathers more
    assert chosen == ({"s1", "s2"} if overlap else {"s1"})


def test_gain_over_the_baseline_is_of_the_published_size() -> None:
    """Published 1.13 to 5.77 over 1,296 layers."""
    gains = [
        schedule_s(s, PARM, "baseline") / min(schedule_s(s, PARM, x, True) for x in ("s1", "s2"))
        for s in sweep() if s.replicas > 1 and s.shards > 1
    ]
    assert min(gains) > 1 and 4 < max(gains) < 20


def test_gain_grows_with_replicas() -> None:
    at = [
        schedule_s(ParmShape(tokens=4096, model_dim=1024, rows_factor=2.4, replicas=n, shards=4),
                   PARM, "s1") for n in (1, 2, 4)
    ]
    assert at[0] > at[1] > at[2]
    with pytest.raises(ValueError, match="unknown schedule 's3'"):
        schedule_s(sweep()[0], PARM, "s3")


def test_worked_example() -> None:
    """N_MP = N_ESP = 4, BL = 4096, M = 1024, fp32, 6 GB/s between nodes, 12 inside: baseline 39.8
    ms, S1 7.5, S2 6.2; k f = 2.4: 86.7, 15.3, 14.3.
    """
    here = Cluster(nodes=4, ranks_per_node=4, nics=4, intra=Link(alpha_s=1e-5, beta_s=1 / 12e9),
                   inter=Link(alpha_s=1e-5, beta_s=1 / 6e9))
    for factor, want in ((1.0, (39.8, 7.5, 6.2)), (2.4, (86.7, 15.3, 14.3))):
        shape = ParmShape(tokens=4096, model_dim=1024, rows_factor=factor, replicas=4, shards=4)
        found = [1e3 * schedule_s(shape, here, s, True) for s in ("baseline", "s1", "s2")]
        assert found == pytest.approx(want, rel=0.3)


def _counts(seed: int, ranks: int, experts: int) -> list[list[int]]:
    dice = random.Random(seed)
    weights = [dice.paretovariate(0.7) for _ in range(experts)]
    return [[round(500 * w / sum(weights) * dice.uniform(0.5, 1.5)) for w in weights]
            for _ in range(ranks)]


def test_shadow_policy_against_every_subset() -> None:
    """The greedy prefix is never worse than nothing and close to the best of all 2^E sets; the
    largest gap is known.
    """
    gaps, used = [], 0
    for seed in range(60):
        ranks, experts = random.Random(seed).choice([(2, 4), (4, 8), (8, 8), (2, 8)])
        counts = _counts(seed, ranks, experts)
        model = ShadowModel(model_dim=512, hidden_dim=1024, flops=1e13,
                            bytes_s=random.Random(seed).choice([1e9, 6e9, 5e10]))
        every = {
            frozenset(s): model.layer_s(counts, frozenset(s)) for n in range(experts + 1)
            for s in itertools.combinations(range(experts), n)
        }
        chosen = choose_shadows(counts, model, experts)
        assert every[chosen] <= every[frozenset()]
        gaps.append(every[chosen] / min(every.values()) - 1)
        used += bool(chosen)
    assert used > 10 and sum(gap < 1e-9 for gap in gaps) >= 30
    assert max(gaps) < 1.0 and sorted(gaps)[len(gaps) // 2] < 0.05


def test_shadows_by_hand() -> None:
    """One expert has everything: shadowing it spreads the rows and stops their travel; even load:
    nothing to gain.
    """
    model = ShadowModel(model_dim=64, hidden_dim=64, flops=1e10, bytes_s=1e9)
    hot, even = [[1000, 0], [1000, 0]], [[500, 500], [500, 500]]
    assert choose_shadows(hot, model, 2) == {0} and choose_shadows(even, model, 2) == frozenset()
    assert choose_shadows(hot, model, 0) == frozenset()
    assert model.layer_s(
        hot, frozenset()) == pytest.approx(3 * 4 * 64 * 64 / 1e10 * 2000 + 4 * 64 * 4 / 1e9 * 2000)
    assert model.layer_s(hot, frozenset(
        {0})) == pytest.approx(3 * 4 * 64 * 64 / 1e10 * 1000 + model.shadow_s())


def test_index_slice_gains_with_the_gap_between_links() -> None:
    """PPMoE against two all-to-alls a direction between nodes: the gain grows with the bandwidth
    gap, and passes 1.75 at V100 NVLink / IB.
    """
    size, gains = 8 * 2048 * 4096 * 2.0, []
    for inter in (150e9, 50e9, 12.5e9, 5e9):
        here = cluster(8, 8, inter)
        compute = 0.02
        moved = 2 * all_to_all_s(here, Group(8, 8), "linear", 2 * size) + all_reduce_s(
            here, Group(8), size)
        gains.append((compute + moved) / (compute + all_reduce_s(here, Group(8), size)))
    assert gains == sorted(gains) and gains[2] > 1.75


def test_more_experts_a_rank_even_out_the_load() -> None:
    """Largest rank's rows over the mean, random routing: falls towards 1 as E / T_p grows."""
    dice, means = random.Random(0), []
    for local in (1, 4, 16, 64):
        worst = []
        for _ in range(20):
            weights = [dice.expovariate(1) for _ in range(4 * local)]
            loads = [sum(weights[r * local : (r + 1) * local]) for r in range(4)]
            worst.append(max(loads) / (sum(loads) / 4))
        means.append(sum(worst) / len(worst))
    assert means == sorted(means, reverse=True) and means[-1] < 1.25
