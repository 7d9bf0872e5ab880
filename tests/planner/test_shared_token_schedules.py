"""Parm's choice over the published sweep, PPMoE's gain, and what an uneven load costs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster, Link
from moe_plugin.planner.events import ParmShape, Task, simulate
from moe_plugin.planner.layer_cost import LayerShape, layer_cost
from moe_plugin.planner.once import GroupShape, all_gather_s, all_reduce_s, all_to_all_s
from scripts.bench.headline_models import schedule_s
from tests.planner.problems import A100, cluster

pytestmark = pytest.mark.fast

PARM = Cluster(nodes=4, ranks_per_node=8, nics=8, intra=Link(alpha_s=1e-5, beta_s=1 / 12e9),
               inter=Link(alpha_s=2e-5, beta_s=1 / 6e9))


def sweep() -> list[ParmShape]:
    """1,296 layers: batch, length, widths, k, f, N_MP, N_ESP."""
    return [
        ParmShape(tokens=b * length, model_dim=m, rows_factor=k * f, replicas=mp, shards=esp)
        for b, length, m, k, f, mp, esp in itertools.product((2, 4, 8), (512, 1024, 2048), (
            1024, 2048, 4096, 8192), (1, 2), (1.2, 2.4), (1, 2, 4), (1, 2, 4))
    ]


def schedule_tasks(shape: ParmShape, schedule: str, overlap: bool, pieces: int) -> list[Task]:
    """The exchanges of one forward pass of S1 or S2, one after another. With overlap, S2 gathers a
    piece inside a node while the all-to-all sends the next one.
    """
    volume = shape.bytes_rows * shape.shards / shape.replicas
    out_s = all_to_all_s(PARM, GroupShape(PARM.ranks), "linear", volume)
    gathered = shape.bytes_in if schedule == "s1" else shape.bytes_rows
    pieces = pieces if schedule == "s2" and overlap else 1
    gather_s = all_gather_s(PARM, GroupShape(shape.replicas), gathered / shape.replicas) \
        if shape.replicas > 1 else 0.0
    tasks = [Task("out", "network", out_s)]
    for i in range(pieces):
        tasks += [Task(f"back{i}", "network", out_s / pieces, ("out",)),
                  Task(f"gather{i}", "inside" if pieces > 1 else "network", gather_s / pieces,
                       (f"back{i}",))]
    return tasks


def choose_schedule(shape: ParmShape, cluster: Cluster, overlap: bool) -> str:
    """The faster one by the published closed form; if equal s1."""
    return min(("s1", "s2"), key=lambda name: schedule_s(shape, cluster, name, overlap))


def simulated_s(shape: ParmShape, schedule: str, overlap: bool) -> float:
    """Seconds of the event timeline, with S2's gather in 16 steps behind the all-to-all."""
    return simulate(schedule_tasks(shape, schedule, overlap, 16)).seconds


@pytest.mark.parametrize("overlap", [False, True])
def test_the_choice_is_the_simulated_best(overlap: bool) -> None:
    shapes = sweep()
    assert len(shapes) == 1296
    times = [{s: simulated_s(shape, s, overlap) for s in ("s1", "s2")} for shape in shapes]
    right = sum(
        times[i][choose_schedule(shape, PARM, overlap)] <= min(times[i].values()) * (1 + 1e-9)
        for i, shape in enumerate(shapes))
    assert right >= 0.95 * len(shapes)
    chosen = {choose_schedule(shape, PARM, overlap) for shape in shapes}
    # k f > 1 everywhere: without overlap S2 gathers more
    assert chosen == ({"s1", "s2"} if overlap else {"s1"})


def by_hand(shape: ParmShape, whole: bool = False) -> tuple[float, float, float]:
    """Seconds of baseline, S1 and overlapped S2 on four nodes without latency.

    Gathers run inside a node at 12 GB/s: of a buffer over n ranks, (n - 1)/n arrive; a reduction
    moves twice that. In an all-to-all 3/4 of each buffer leave the node at 6 GB/s. whole: count
    whole buffers, with the part that a rank keeps.
    """
    def gather(size: float, ranks: int) -> float:
        return size * (1 if whole and ranks > 1 else (ranks - 1) / ranks) / 12e9

    def exchange(size: float) -> float:
        return size * (1 if whole else 3 / 4) / 6e9

    tokens = shape.tokens * shape.model_dim * 4
    rows, esp, mp = shape.rows_factor * tokens, shape.shards, shape.replicas
    baseline = gather(esp * tokens, esp) + 2 * gather(esp * rows, esp) + 2 * exchange(esp * rows)
    split = exchange(esp * rows / mp)
    return (baseline, 2 * split + gather(tokens, mp), split + max(split, gather(rows, mp)))


def schedules(shape: ParmShape, cluster: Cluster) -> list[float]:
    """Seconds of baseline, S1 and overlapped S2."""
    return [schedule_s(shape, cluster, name, True) for name in ("baseline", "s1", "s2")]


def test_gain_over_the_baseline_follows_the_formulas() -> None:
    """Without latency the largest gain is (0.25 + 0.6 + 1.2) / 0.3 = 41/6, at k f = 1.2 and four
    replicas and shards; published 1.13 to 5.77.
    """
    here = dataclasses.replace(PARM, intra=Link(beta_s=1 / 12e9), inter=Link(beta_s=1 / 6e9))
    gains = []
    for shape in sweep():
        if shape.replicas > 1 and shape.shards > 1:
            found = schedules(shape, here)
            assert found == pytest.approx(by_hand(shape), rel=1e-9)
            gains.append(found[0] / min(found[1:]))
            with_latency = schedules(shape, PARM)
            assert with_latency[0] > min(with_latency[1:])
    assert len(gains) == 576 and max(gains) == pytest.approx(41 / 6, rel=1e-9)
    assert min(gains) == pytest.approx(197 / 72, rel=1e-9)


def test_gain_grows_with_replicas() -> None:
    at = [
        schedule_s(ParmShape(tokens=4096, model_dim=1024, rows_factor=2.4, replicas=n, shards=4),
                   PARM, "s1") for n in (1, 2, 4)
    ]
    assert at[0] > at[1] > at[2]


@pytest.mark.parametrize("factor, replicas, published", [
    (1.0, 4, (39.8, 7.5, 6.2)), (2.4, 4, (86.7, 15.3, 14.3)), (2.4, 2, (86.7, 28.7, 27.8))])
def test_worked_example(factor: float, replicas: int, published: tuple[float, ...]) -> None:
    """N_ESP = 4, BL = 4096, M = 1024, fp32, 6 GB/s between nodes, 12 inside; published in ms.

    The published numbers count whole buffers and add a latency that is not stated: baseline, k f =
    1: (5.59 + 11.18 + 22.37) ms + 0.65 ms. What remains of each number is 0.4 to 1 ms. Our model
    counts only what leaves a rank or node, and equals the formulas exactly.
    """
    here = Cluster(nodes=4, ranks_per_node=4, nics=4, intra=Link(beta_s=1 / 12e9),
                   inter=Link(beta_s=1 / 6e9))
    shape = ParmShape(tokens=4096, model_dim=1024, rows_factor=factor, replicas=replicas, shards=4)
    assert schedules(shape, here) == pytest.approx(by_hand(shape), rel=1e-9)
    rest = [ms - 1e3 * s for ms, s in zip(published, by_hand(shape, whole=True), strict=True)]
    assert all(0.4 < r < 1.0 for r in rest), rest


def test_index_slice_gains_with_the_gap_between_links() -> None:
    """PPMoE against two all-to-alls per direction: the gain grows with the bandwidth gap.

    It exceeds the published 1.75 with 12.5 GB/s between nodes.
    """
    size, gains = 8 * 2048 * 4096 * 2.0, []
    for inter in (150e9, 50e9, 12.5e9, 5e9):
        here = cluster(8, 8, inter)
        compute = 0.02
        moved = 2 * all_to_all_s(here, GroupShape(8, 8), "linear", 2 * size) + all_reduce_s(
            here, GroupShape(8), size)
        gains.append((compute + moved) / (compute + all_reduce_s(here, GroupShape(8), size)))
    assert gains == sorted(gains) and gains[1] < 1.75 < gains[2]


def test_uneven_load_costs_the_fullest_rank() -> None:
    """Twice the mean rows on one rank: compute and exchanges, not launches, and rows in memory
    double.
    """
    device = dataclasses.replace(A100, launch_s=0.0, half_rows=0.0, memory_bytes_s=1e30)
    even = LayerShape(tokens=4096, model_dim=1024, hidden_dim=4096, experts=16)
    a, b = (layer_cost(dataclasses.replace(even, skew=skew), cluster(), device, LayoutChoice(r=1))
            for skew in (1.0, 2.0))
    assert b.phases()["experts"] == pytest.approx(2 * a.phases()["experts"])
    assert b.phases()["a2a_out"] == pytest.approx(2 * a.phases()["a2a_out"], rel=0.1)
    rows = 4096 * 2 * 2 * (2 * 1024 + 4096)  # T k, bytes of an element, width in, out and inner
    assert b.memory_bytes - a.memory_bytes == pytest.approx(rows)
