"""Costs of one layer: events, collectives, layouts, and the comparison over scale."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.choice import LayoutChoice, legal_choices, legal_r
from moe_plugin.planner.cluster import Device, load_device
from moe_plugin.planner.events import Task, simulate
from moe_plugin.planner.layer_cost import PHASES, LayerShape, layer_cost, rank_choices
from moe_plugin.planner.model_search import scale_table, scale_text
from moe_plugin.planner.once import (
    GroupShape,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
)
from moe_plugin.planner.units import record
from tests.planner.problems import A100, BLOG_DEVICE, cluster

pytestmark = pytest.mark.fast

SHAPE = LayerShape(tokens=4096, model_dim=2048, hidden_dim=8192, experts=4, top_k=2)


def test_a_timeline_by_hand() -> None:
    """Two pieces: out 0-2, 2-4; experts 2-5, 5-8; back 5-6, 8-9."""
    tasks = [
        Task("out0", "net", 2),
        Task("out1", "net", 2),
        Task("e0", "cpu", 3, ("out0",)),
        Task("e1", "cpu", 3, ("out1",)),
        Task("back0", "net", 1, ("e0",)),
        Task("back1", "net", 1, ("e1",))
    ]
    found = simulate(tasks)
    assert [(s.start, s.end) for s in found.spans] == [(0, 2), (2, 4), (2, 5), (5, 8), (5, 6),
                                                       (8, 9)]
    assert found.seconds == 9 and found.hidden == 12 - 9 and found.busy("net") == 6


@pytest.mark.parametrize(
    "tasks",
    [[Task("a", "x", 1,
           ("b",)), Task("b", "x", 1)], [Task("a", "x", 1), Task("a", "x", 1)]])
def test_what_could_not_run_is_refused(tasks: list[Task]) -> None:
    with pytest.raises(ValueError, match="task 'a'"):
        simulate(tasks)


@given(st.integers(1, 8), st.floats(0.1, 10), st.floats(0.1, 10))
@settings(max_examples=60, deadline=None)
def test_overlap_lies_between_its_bounds(d: int, out: float, compute: float) -> None:
    """max(total communication, total computation) <= makespan <= sum; the pipeline's closed form
    where one side dominates.
    """
    tasks = [Task(f"o{i}", "n", out / d)
             for i in range(d)] + [Task(f"e{i}", "c", compute / d, (f"o{i}",)) for i in range(d)]
    tasks += [Task(f"b{i}", "n", out / d, (f"e{i}",)) for i in range(d)]
    seconds = simulate(tasks).seconds
    assert max(2 * out, compute) - 1e-9 <= seconds <= 2 * out + compute + 1e-9
    if compute >= 2 * out:
        assert seconds == pytest.approx(compute + 2 * out / d)


def test_rows_that_stay_hide_the_first_and_the_last_exchange() -> None:
    """On two ranks half of the rows stay: where matmuls take longest they fill the time in which
    the first piece arrives and the last one returns.
    """
    here, slow = cluster(2, 1), dataclasses.replace(A100, flops=1e11, half_rows=0.0, launch_s=0.0)
    rows, peers = (layer_cost(SHAPE, here, slow, LayoutChoice(r=1, d=2, piece_axis=cut)).forward
                   for cut in ("rows", "peers"))
    exchange, products = rows.phases()["a2a_out"], rows.phases()["experts"]
    assert products > 2 * exchange
    assert rows.seconds - peers.seconds == pytest.approx(exchange, rel=1e-3)
    assert peers.phases()["experts"] == pytest.approx(products)


def test_collectives_follow_their_formulas() -> None:
    here = cluster(1, 8)
    piece, alpha, beta = 1e6, 3e-6, 1 / 250e9
    assert all_gather_s(here, GroupShape(8), piece) == pytest.approx(7 * (alpha + piece * beta))
    assert all_reduce_s(here, GroupShape(8), 8e6) == pytest.approx(14 * (alpha + piece * beta))
    assert all_to_all_s(here, GroupShape(8), "linear",
                        8e6) == pytest.approx(7 * alpha + 7 * piece * beta)
    assert all_to_all_s(here, GroupShape(8), "somebody's own",
                        8e6) == all_to_all_s(here, GroupShape(8), "linear", 8e6)
    for f in (all_gather_s, all_reduce_s):
        assert f(here, GroupShape(1), 1e6) == 0
        assert f(cluster(4, 8), GroupShape(32), 1e8) > f(cluster(1, 8), GroupShape(8), 1e8)


def test_over_nodes_a_gather_takes_two_steps_where_these_are_faster() -> None:
    """2 nodes of 4 ranks with one card: 4 pieces cross it, a ring's way 7."""
    here = dataclasses.replace(cluster(2, 4), nics=1)
    piece, inside, between = 1e6, here.intra, here.inter
    two = (between.alpha_s + 4 * piece * between.beta_s
           + 3 * (inside.alpha_s + 2 * piece * inside.beta_s))
    assert all_gather_s(here, GroupShape(8), piece) == pytest.approx(two)
    assert all_reduce_s(here, GroupShape(8), 8 * piece) > 2 * two  # torch's own is a ring
    # one rank on each node: nothing is left to do inside
    alone = dataclasses.replace(cluster(8, 1), nics=1)
    assert all_gather_s(alone, GroupShape(8), piece) == pytest.approx(
        7 * (between.alpha_s + piece * max(between.beta_s, inside.beta_s)))


def test_groups_on_nodes() -> None:
    here = cluster(4, 8)
    assert GroupShape(8).shape(here).nodes == 1 and GroupShape(16).shape(here).nodes == 2
    # the same place on each node: eight such groups share a node's cards
    strided = GroupShape(4, 8).shape(here)
    assert (strided.nodes, strided.ranks_per_node, strided.nics) == (4, 1, 1)
    assert (GroupShape(8, 4).shape(here).nodes, GroupShape(8, 4).per_node(here)) == (4, 2)


def test_legal_r() -> None:
    assert legal_r(2, 16) == [0, 1, 2, 4, 8] and legal_r(16, 4) == [0, 1] and legal_r(4, 1) == [1]
    with pytest.raises(ValueError, match="num_experts=6"):
        legal_r(6, 4)


@pytest.mark.parametrize("experts", [2, 4, 16, 32])
def test_best_equals_trying_everything(experts: int) -> None:
    shape, here = dataclasses.replace(SHAPE, experts=experts), cluster()
    ranked = rank_choices(shape, here, A100)
    choices = list(
        legal_choices(experts, 16, degrees=(1, 2, 4, 8), algorithms=("linear", "2dh", "leader")))
    assert len(ranked) == len(choices)
    assert ranked[0].seconds == min(layer_cost(shape, here, A100, c).seconds for c in choices)
    assert [c.seconds for c in ranked] == sorted(c.seconds for c in ranked)


def test_communication_follows_tutels_two_families() -> None:
    """r = 0 pays for parameters alone; r >= 1 for rows, growing with r, and parameters, falling
    with r.
    """
    costs = {
        r: layer_cost(SHAPE, cluster(), A100, LayoutChoice(r=r)).phases() for r in (0, 1, 2, 4)
    }
    assert costs[0]["a2a_out"] == 0 and costs[0]["parameters"] > costs[1]["parameters"] > costs[2][
        "parameters"] > costs[4]["parameters"] == 0
    assert 0 < costs[1]["a2a_out"] < costs[2]["a2a_out"] < costs[4]["a2a_out"]
    assert set(costs[0]) == set(PHASES)


def test_few_tokens_keep_parameters_many_tokens_keep_rows() -> None:
    few = rank_choices(dataclasses.replace(SHAPE, tokens=64), cluster(), A100)[0].choice
    many = rank_choices(dataclasses.replace(SHAPE, tokens=65536, hidden_dim=512), cluster(),
                        A100)[0].choice
    assert few.r == 4 and many.r == 0


def test_pieces_hide_and_stop_paying() -> None:
    seconds = {
        d: layer_cost(SHAPE, cluster(), A100, LayoutChoice(r=1, d=d)).seconds for d in (1, 2, 4, 64)
    }
    assert seconds[2] < seconds[1] and seconds[64] > min(seconds.values())
    uneven = layer_cost(SHAPE, cluster(), A100, LayoutChoice(r=1, d=1, d_backward=4))
    plain = layer_cost(SHAPE, cluster(), A100, LayoutChoice(r=1))
    # the experts compute in four pieces in forward too
    assert uneven.forward.seconds > plain.forward.seconds
    assert uneven.backward.hidden > plain.backward.hidden


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="r=3 is not possible with 4 experts on 16 ranks"):
        layer_cost(SHAPE, cluster(), A100, LayoutChoice(r=3))


def test_speed_up_over_the_static_layer_falls_with_scale() -> None:
    """Published: 8.49x at 8 ranks, 2.75x at 512. The model: 12.6x and 2.5x; it falls while the
    all-to-all takes over, then stays.
    """
    shape = LayerShape(tokens=32 * 1024, model_dim=2048, hidden_dim=2048, experts=8, top_k=2,
                       capacity_factor=1.0)
    rows = scale_table(shape, cluster(1, 8, inter=8e9), BLOG_DEVICE,
                       [1, 2, 4, 8, 16, 32, 64, 128, 256])
    gains = {row.ranks: row.speedup for row in rows}
    assert list(gains) == [8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert all(gains[a] > gains[2 * a] for a in (8, 16, 32, 64, 128, 256))
    assert 8 < gains[8] < 14 and 2 < gains[512] < 3.5 and abs(gains[2048] / gains[512] - 1) < 0.05
    for row in rows:  # each adaptation alone, and both together
        assert row.all_s <= min(row.r_alone_s, row.d_alone_s) <= max(
            row.r_alone_s, row.d_alone_s) <= row.plain_s <= row.static_s
    assert max(row.plain_s / row.r_alone_s for row in rows) > 3 and max(row.plain_s / row.d_alone_s
                                                                        for row in rows) > 1.15
    assert "2048" in scale_text(rows)


def test_adaptive_r_with_fewer_experts_than_ranks() -> None:
    shape = LayerShape(tokens=2048, model_dim=2048, hidden_dim=8192, experts=8, top_k=1)
    rows = scale_table(shape, cluster(1, 8, inter=8e9), BLOG_DEVICE, [1, 4, 16, 64, 256],
                       experts_per_rank=0.25)
    assert len({row.choice.r for row in rows}) > 1 and all(row.plain_s / row.r_alone_s > 1
                                                           for row in rows)


@pytest.mark.parametrize("values,words", [
    ({"speed": 1}, "unknown key 'speed'"),
    ({"flops": 0}, "flops=0.0"),
    ({"flops": "fast"}, "flops Value 'fast' .* converted to Float"),
])
def test_wrong_device_files(values: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        record(Device, values, "device")


def test_device_files(tmp_path) -> None:
    from pathlib import Path

    for path in sorted(Path("configs/devices").glob("*.yaml")):
        assert load_device(path).name == path.stem
    (tmp_path / "d.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="not a mapping"):
        load_device(tmp_path / "d.yaml")
    with pytest.raises(ValueError, match="cannot be read"):
        load_device(tmp_path / "none.yaml")
    assert Device().matmul_s(1, 0) == 0


def test_a_label_says_the_whole_choice() -> None:
    choices = [*legal_choices(8, 4, backward_degrees=(0, 2), sends=("rows", "nodes")),
               LayoutChoice(r=2, gather_tokens=True),
               LayoutChoice(r=1, d=2, piece_axis="peers", kernel="loop", spill="everywhere")]
    assert len({choice.label for choice in choices}) == len(set(choices)) > 10
    assert all(LayoutChoice.from_label(choice.label) == choice for choice in choices)
    for text in ("", "r=1", "r=1 d=2 linear auto other=1", "r=-1 d=1 linear auto", "a b c d"):
        with pytest.raises(ValueError, match="is not a layout label"):
            LayoutChoice.from_label(text)
