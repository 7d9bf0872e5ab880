"""Experts in pairs and blocks: every row has a place, what fills the others reaches nothing, and
numbers do not depend on company.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.dispatch.rows import exact_rows
from moe_plugin.experts import strategies
from moe_plugin.kernels.cpu import expert_ffn as fused
from moe_plugin.kernels.cpu.blocks import WASTE, Group, blocks_of, in_order, in_pairs, moved
from moe_plugin.records import RowCounts, RowPlan
from tests.kernels.test_strategies import parameters

MANY = 1 << 30
LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@given(
    LOADS,
    st.sampled_from(
        [in_order, lambda counts: in_pairs(counts, MANY), lambda counts: in_pairs(counts, 20)]))
@settings(max_examples=60, deadline=None)
def test_every_expert_with_rows_has_its_places_once(counts: list[int], arrange) -> None:
    groups = arrange(counts)
    assert sorted(e for g in groups
                  for e in g.experts) == [e for e, count in enumerate(counts) if count]
    assert all(g.counts == tuple(counts[e] for e in g.experts) for g in groups)
    places = [p for g in groups for p in range(g.places.start, g.places.stop)]
    assert places == list(range(len(places))), "one after the other, none twice"
    assert len(places) - sum(counts) <= sum(counts) / WASTE


@given(
    LOADS, st.integers(0, 60),
    st.sampled_from(
        [in_order, lambda counts: in_pairs(counts, MANY), lambda counts: in_pairs(counts, 20)]))
@settings(max_examples=60, deadline=None)
def test_blocks_hold_all_groups_and_no_more_than_allowed(counts: list[int], most: int,
                                                         arrange) -> None:
    groups = arrange(counts)
    blocks = blocks_of(groups, most)
    again = [Group(g.experts, g.counts, g.start + b.places.start) for b in blocks for g in b.groups]
    assert again == groups
    assert all(b.size <= most or len(b.groups) == 1 for b in blocks)
    rows = {
        e: (b.places.start + r.start, b.places.start + r.stop) for b in blocks
        for e, r in b.experts()
    }
    assert all(stop - start == counts[e] for e, (start, stop) in rows.items())


def test_a_pair_written_out() -> None:
    groups = in_pairs([3, 32, 0, 31, 3], MANY)
    assert groups == [Group((1, 3), (32, 31), 0), Group((0, 4), (3, 3), 64)]
    assert in_pairs([3, 32, 0, 31, 3], 31)[:2] == [Group((1,), (32,), 0), Group((3,), (31,), 32)]
    assert [list(b.experts()) for b in blocks_of(groups, 64)] == [[(1, slice(0, 32)),
                                                                   (3, slice(32, 63))],
                                                                  [(0, slice(0, 3)),
                                                                   (4, slice(3, 6))]]


@given(st.integers(0, 50), st.integers(1, 3), st.integers(0, 100), st.booleans())
@settings(max_examples=40, deadline=None)
def test_places_hold_the_choices(tokens: int, k: int, seed: int, dropped: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(tokens, 4, generator=g).argsort(1)[:, :k]
    if dropped and tokens:
        ids_TK[::3, 0] = -1
    plan = exact_rows(ids_TK, torch.rand(tokens, k, generator=g), 4)
    groups = in_pairs(plan.counts.host, MANY)
    if not groups:
        return
    source_P, position_TK = moved(groups, plan.counts.host, plan.source_R, plan.position_TK)
    assert torch.equal(position_TK >= 0, ids_TK >= 0)
    choice_TK = torch.arange(tokens * k).view(tokens, k)
    assert torch.equal(source_P[position_TK[ids_TK >= 0]], choice_TK[ids_TK >= 0])
    expert_of = {
        p: e for group in groups for n, e in enumerate(group.experts)
        for p in range(group.start + n * group.height, group.start + n * group.height +
                       group.counts[n])
    }
    assert [expert_of[int(p)] for p in position_TK[ids_TK >= 0]] == ids_TK[ids_TK >= 0].tolist()


@pytest.mark.parametrize("block", [1, 1 << 12, 1 << 30], ids=["an expert a block", "a few", "all"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_company_changes_no_number(monkeypatch: pytest.MonkeyPatch, pairs: bool, bias: bool,
                                   gated: bool, block: int) -> None:
    monkeypatch.setattr(fused, "_pairs_pay", lambda x: pairs)
    monkeypatch.setattr(fused, "BLOCK_BYTES", block)
    g = torch.Generator().manual_seed(3)
    tokens, k, experts, width, inner = 150, 2, 7, 6, 10

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    x, gates = draw(tokens, width), draw(tokens, k)
    # expert 2 gets no rows; the last are choices that go nowhere
    loads = torch.tensor([60, 59, 0, 40, 80, 34, 18, 9])
    ids_N = torch.tensor([*range(experts), -1]).repeat_interleave(loads)
    ids_TK = ids_N[torch.randperm(tokens * k, generator=g)].view(tokens, k)
    plan = exact_rows(ids_TK, gates, experts)
    if pairs:
        assert any(
            len(group.experts) == 2 and len(set(group.counts)) == 2
            for group in in_pairs(plan.counts.host, MANY))
    p = {
        "w_in_LDF": draw(experts, width, inner), "b_in_LF": draw(experts, inner) if bias else None,
        "w_gate_LDF": draw(experts, width, inner) if gated else None,
        "b_gate_LF": draw(experts, inner) if bias and gated else None, "w_out_LFD": draw(
            experts, inner, width), "b_out_LD": draw(experts, width) if bias else None
    }
    wanted = [x, gates, *(t for t in p.values() if t is not None)]
    results = []
    for name in ("fused", "loop"):
        y = strategies.get(name)(x, plan, parameters(p, "gelu"))
        results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10,
                                   atol=1e-10 * float(theirs.detach().abs().max()))


def test_a_token_that_is_not_a_number_stays_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places without a row hold what token 0 has: it must not get into an expert that token 0 did
    not choose.
    """
    monkeypatch.setattr(fused, "_pairs_pay", lambda x: True)
    x = torch.randn(70, 4, dtype=torch.float64)
    x[0] = float("nan")
    ids_T1 = torch.tensor([0] * 2 + [1] * 33 + [2] * 34 + [0])[:, None]
    plan = exact_rows(ids_T1, torch.ones(70, 1, dtype=torch.float64), 3)
    assert in_pairs(plan.counts.host, MANY)[0].counts == (33, 34)
    weights = [
        torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 8, 4, dtype=torch.float64, requires_grad=True)
    ]
    p = dict.fromkeys(("b_in_LF", "w_gate_LDF", "b_gate_LF",
                       "b_out_LD")) | {"w_in_LDF": weights[0], "w_out_LFD": weights[1]}
    y = strategies.get("fused")(x, plan, parameters(p, "gelu"))
    grads = torch.autograd.grad(y.square().sum(), weights)
    assert torch.isfinite(y[ids_T1[:, 0] != 0]).all() and torch.isnan(y[0]).all()
    assert all(torch.isfinite(grad[1:]).all() for grad in grads)


def test_rows_that_came_from_elsewhere_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_pairs_pay", lambda x: True)
    rows, counts = torch.randn(9, 4, dtype=torch.float64), RowCounts([4, 0, 5])
    p = dict.fromkeys(("b_in_LF", "w_gate_LDF", "b_gate_LF", "b_out_LD")) | {
        "w_in_LDF": torch.randn(3, 4, 6, dtype=torch.float64), "w_out_LFD": torch.randn(
            3, 6, 4, dtype=torch.float64)
    }
    torch.testing.assert_close(
        strategies.get("fused")(rows, counts, parameters(p, "relu")),
        strategies.get("loop")(rows, counts, parameters(p, "relu")))


def test_no_rows_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_pairs_pay", lambda x: True)
    plan = exact_rows(torch.full((3, 2), -1), torch.ones(3, 2, dtype=torch.float64), 4)
    assert isinstance(plan, RowPlan)
    w_in, w_out = torch.randn(4, 4, 6, dtype=torch.float64, requires_grad=True), torch.randn(
        4, 6, 4, dtype=torch.float64, requires_grad=True)
    p = dict.fromkeys(("b_in_LF", "w_gate_LDF", "b_gate_LF",
                       "b_out_LD")) | {"w_in_LDF": w_in, "w_out_LFD": w_out}
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = strategies.get("fused")(x, plan, parameters(p, "relu"))
    assert not y.any() and all(not g.any() for g in torch.autograd.grad(y.sum(), [x, w_in, w_out]))
