"""Blocks of experts: every row is in one block, and numbers do not depend on the blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.dispatch.rows import exact_rows
from moe_plugin.experts import strategies
from moe_plugin.kernels.cpu import expert_ffn as fused
from moe_plugin.kernels.cpu.blocks import Block, blocks_of
from moe_plugin.records import RowPlan
from tests.experts.problems import parameters

LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@given(LOADS, st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_blocks_hold_all_rows_and_no_more_than_allowed(counts: list[int], limit: int) -> None:
    blocks = blocks_of(counts, limit)
    assert all(b.size <= limit or len(b.experts) == 1 for b in blocks)
    lengths = {e: n for b in blocks for e, n in zip(b.experts, b.lengths, strict=True)}
    assert lengths == {e: n for e, n in enumerate(counts) if n} and sorted(lengths) == [*lengths]
    assert all(b.size == sum(b.lengths) for b in blocks)
    assert [r for b in blocks for r in range(b.rows.start, b.rows.stop)] == list(range(sum(counts)))
    # a block is full: the next expert would exceed the limit
    for block, after in zip(blocks, blocks[1:], strict=False):
        assert block.size + counts[after.experts[0]] > limit


def test_blocks_written_out() -> None:
    assert blocks_of([3, 32, 0, 31, 3], 64) == [
        Block(slice(0, 35), [0, 1], [3, 32]),
        Block(slice(35, 69), [3, 4], [31, 3]),
    ]
    assert blocks_of([0, 0], 64) == []


@pytest.mark.parametrize("block", [1, 1 << 12, 1 << 30], ids=["one expert", "a few", "all"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_change_no_number(monkeypatch: pytest.MonkeyPatch, bias: bool, gated: bool,
                                 block: int) -> None:
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


def test_no_rows_at_all() -> None:
    plan = exact_rows(torch.full((3, 2), -1), torch.ones(3, 2, dtype=torch.float64), 4)
    assert isinstance(plan, RowPlan)
    w_in, w_out = torch.randn(4, 4, 6, dtype=torch.float64, requires_grad=True), torch.randn(
        4, 6, 4, dtype=torch.float64, requires_grad=True)
    p = dict.fromkeys(("b_in_LF", "w_gate_LDF", "b_gate_LF",
                       "b_out_LD")) | {"w_in_LDF": w_in, "w_out_LFD": w_out}
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = strategies.get("fused")(x, plan, parameters(p, "relu"))
    assert not y.any() and all(not g.any() for g in torch.autograd.grad(y.sum(), [x, w_in, w_out]))
