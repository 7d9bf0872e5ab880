"""Blocks of experts: every row is in one block, and numbers do not depend on the blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.dispatch.rows import exact_rows
from moe_plugin.experts import strategies
from moe_plugin.kernels.cpu import expert_ffn as fused
from moe_plugin.kernels.cpu.blocks import Unit, UnitBlock, blocks_of, clipped, padding_of
from moe_plugin.kernels.cpu.products import BEGIN, FEW, RowRule
from moe_plugin.records import RowCounts, RowPlan
from tests.experts.problems import parameters
from tests.kernels.row_rules import RULES, rows_computed

pytestmark = pytest.mark.fast

LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=9)
WIDE = RowRule()  # products that gain from no other number of rows
# experts join that get at most five rows too many
NARROW = RowRule(narrow=True, work=BEGIN // 5, least=1)


def size(unit: Unit) -> int:
    """Rows in memory."""
    return unit.experts * unit.rows


@given(LOADS, st.integers(0, 60), st.sampled_from([WIDE, NARROW]))
@settings(max_examples=60, deadline=None)
def test_blocks_hold_all_rows_and_no_more_than_allowed(counts: list[int], limit: int,
                                                       rule: RowRule) -> None:
    blocks = blocks_of(counts, limit, rule)
    assert all(b.size <= limit or len(b.units) == 1 for b in blocks)
    assert all(size(u) <= limit or u.experts == 1 for b in blocks for u in b.units)
    rows = {e: u.rows for b in blocks for u in b.units for e in range(u.first, u.first + u.experts)}
    assert [*rows] == [e for e, n in enumerate(counts) if n]  # in order, none twice
    assert all(n <= rows[e] for e, n in enumerate(counts) if n)
    for unit in (u for b in blocks for u in b.units):  # each one that joins adds at most five
        own = sum(counts[unit.first:unit.first + unit.experts])
        assert size(unit) - own <= (0 if rule is WIDE else 5 * (unit.experts - 1))
        assert unit.rows <= FEW or size(unit) <= 2 * own
    assert all(b.size == sum(map(size, b.units)) for b in blocks)
    assert [r for b in blocks for r in range(b.rows.start, b.rows.stop)] == [*range(
        sum(rows.values()))]
    # a block is full: the next unit would exceed the limit
    for block, after in zip(blocks, blocks[1:], strict=False):
        assert block.size + size(after.units[0]) > limit


def test_blocks_written_out() -> None:
    assert blocks_of([3, 32, 0, 31, 3], 64, WIDE) == [
        UnitBlock(slice(0, 35), [Unit(0, 1, 3, 3), Unit(1, 1, 32, 32)]),
        UnitBlock(slice(35, 69), [Unit(3, 1, 31, 31), Unit(4, 1, 3, 3)]),
    ]
    assert blocks_of([0, 0], 64, WIDE) == []
    # 32 would give the first expert 29 rows too many; an expert without rows parts its neighbours
    assert blocks_of([3, 32, 31, 0, 30, 28, 32], 200, NARROW) == [
        UnitBlock(slice(0, 163), [Unit(0, 1, 3, 3), Unit(1, 2, 32, 64), Unit(4, 3, 32, 96)])
    ]
    # three products less are not worth their padding, four are
    rule = replace(NARROW, least=4)
    assert [u.experts for b in blocks_of([30] * 4, 200, rule) for u in b.units] == [1] * 4
    assert [u.experts for b in blocks_of([30] * 5, 200, rule) for u in b.units] == [5]
    # nor do experts get more than twice the rows that they have, 27 for 11, but if they are few
    rule = replace(NARROW, work=1)
    assert [u.experts for b in blocks_of([1, 9, 1, 9], 200, rule) for u in b.units] == [2, 2]
    assert [u.experts for b in blocks_of([1, FEW, 1, FEW], 200, rule) for u in b.units] == [4]


def test_a_few_more_rows_are_computed() -> None:
    rule = RowRule(narrow=True, work=BEGIN, least=1)  # one row too many is not worth a batch
    assert [rule.fast(n) for n in (1, 255, 256, 257, 511, 512, 513, 997)] == [
        1, 255, 256, 260, 512, 516, 516, 1008
    ]
    blocks = blocks_of([257, 3, 997], 1 << 20, rule)
    assert blocks == [UnitBlock(slice(0, 1257), [Unit(0, 1, 257, 260), Unit(1, 1, 3, 3),
                                                 Unit(2, 1, 997, 1008)])]
    assert blocks[0].reach == 260 + 1008 and not blocks[0].exact
    # rows in foreign memory: those that follow, but none after the last
    assert clipped(blocks) == [UnitBlock(slice(0, 1257), [Unit(0, 1, 257, 260), Unit(1, 1, 3, 3),
                                                         Unit(2, 1, 997, 997)])]


@given(LOADS, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_padding_tells_which_rows_are_whose(counts: list[int], most: int) -> None:
    rule = RowRule(narrow=True, work=BEGIN // most if most else 2 * BEGIN, least=1)
    blocks = blocks_of(counts, 1 << 20, rule)
    units = [unit for block in blocks for unit in block.units]
    if all(block.single for block in blocks):
        assert all(unit.experts == 1 for unit in units)
        return
    padding = padding_of(counts, blocks)
    owner = [e for e, n in enumerate(counts) for _ in range(n)]
    padded_owner = [e for u in units for e in range(u.first, u.first + u.experts)
                    for _ in range(u.rows)]
    assert [owner[r] for r in padding.row_P] == padded_owner
    assert padding.row_P[padding.real_P].tolist() == [*range(len(owner))]
    rows = torch.arange(-1, len(owner))
    where = padding.positions(rows)
    assert where[0] == -1 and padding.real_P[where[1:]].all()
    assert torch.equal(padding.row_P[where[1:]], rows[1:])


def draws(seed: int) -> Callable[..., torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()


def weights(draw: Callable[..., torch.Tensor], experts: int, width: int, inner: int, bias: bool,
            gated: bool) -> dict[str, torch.Tensor | None]:
    return {
        "w_in_LDF": draw(experts, width, inner),
        "bias_in_LF": draw(experts, inner) if bias else None,
        "w_gate_LDF": draw(experts, width, inner) if gated else None,
        "bias_gate_LF": draw(experts, inner) if bias and gated else None,
        "w_out_LFD": draw(experts, inner, width),
        "bias_out_LD": draw(experts, width) if bias else None
    }


def assert_close(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10,
                                   atol=1e-10 * float(other.detach().abs().max()))


@pytest.mark.parametrize("block", [1, 1 << 12, 1 << 30], ids=["one expert", "a few", "all"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", RULES)
def test_blocks_change_no_number(monkeypatch: pytest.MonkeyPatch, how: str, bias: bool, gated: bool,
                                 block: int) -> None:
    monkeypatch.setattr(fused, "BLOCK_BYTES", block)
    draw = draws(3)
    tokens, k, experts, width, inner = 150, 2, 7, 6, 10
    x, gates = draw(tokens, width), draw(tokens, k)
    # expert 2 gets no rows; the last are choices that go nowhere
    loads = torch.tensor([60, 59, 0, 40, 80, 34, 18, 9])
    ids_N = torch.tensor([*range(experts), -1]).repeat_interleave(loads)
    ids_TK = ids_N[torch.randperm(tokens * k, generator=torch.Generator().manual_seed(4))]
    plan = exact_rows(ids_TK.view(tokens, k), gates, experts)
    p = weights(draw, experts, width, inner, bias, gated)
    wanted = [x, gates, *(t for t in p.values() if t is not None)]
    results = []
    for name in ("fused", "loop"):
        with rows_computed(how):
            y = strategies.get(name)(x, plan, parameters(p, "gelu"))
            results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    assert_close(*results)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("given", ["rows", "tokens without gates"])
@pytest.mark.parametrize("how", RULES)
def test_rows_and_tokens_without_gates(how: str, given: str, gated: bool) -> None:
    draw, counts = draws(5), [7, 3, 0, 9, 8, 8]
    p = weights(draw, len(counts), 6, 10, True, gated)
    x, rows = draw(sum(counts), 6), RowCounts(counts)
    if given != "rows":
        ids_T1 = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[:, None]
        rows = replace(exact_rows(ids_T1.flip(0), torch.ones(ids_T1.shape), len(counts)),
                       weights_TK=None)
    wanted, results = [x, *(t for t in p.values() if t is not None)], []
    for name in ("fused", "loop"):
        with rows_computed(how):
            y = strategies.get(name)(x, rows, parameters(p, "relu"))
            results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    assert_close(*results)


@pytest.mark.parametrize("where", ["token", "gradient"])
@pytest.mark.parametrize("how", RULES)
def test_nan_stays_with_its_token_and_expert(how: str, where: str) -> None:
    draw, experts = draws(6), 4
    x, gates, p = draw(12, 6), draw(12, 1), weights(draws(7), experts, 6, 10, True, False)
    # expert 1 has few rows, of which the last, which padding repeats, is not a number
    ids_T1 = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3])[:, None]
    bad = torch.zeros(12, 6, dtype=torch.float64)
    bad[5, 2] = torch.nan
    plan = exact_rows(ids_T1, gates, experts)
    with rows_computed(how):
        y = strategies.get("fused")(x + bad if where == "token" else x, plan, parameters(p, "gelu"))
        given = torch.ones_like(y) + (bad if where == "gradient" else 0)
        grads = torch.autograd.grad(y, [x, *(p[name] for name in ("w_in_LDF", "w_out_LFD"))], given)
    others = torch.arange(12) != 5
    assert torch.isfinite(y[others]).all() and torch.isfinite(grads[0][others]).all()
    for grad in grads[1:]:
        assert torch.isfinite(grad[[0, 2, 3]]).all() and not torch.isfinite(grad[1]).all()


@pytest.mark.parametrize("counts", [[257, 3, 997], [9, 12, 0, *range(8, 16)], [300, *[20] * 9]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_processors_own_rule(dtype: torch.dtype, counts: list[int]) -> None:
    draw = draws(8)
    p = weights(draw, len(counts), 32, 48, True, True)
    ids_R1 = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[:, None]
    x, gates = draw(sum(counts), 32), draw(sum(counts), 1)
    results = []
    # under a default device, as code that builds models sets it
    for to, name, device in ((dtype, "fused", "meta"), (torch.float64, "loop", "cpu")):
        leaves = {n: None if t is None else (t.detach() / 6).to(dtype).to(to).requires_grad_()
                  for n, t in (p | {"x": x}).items()}
        x_TD, own = leaves.pop("x"), gates.detach().float().to(gates.dtype).requires_grad_()
        plan = exact_rows(ids_R1, own.float() if to == dtype else own, len(counts))
        with torch.device(device):
            y = strategies.get(name)(x_TD, plan, parameters(leaves, "gelu"))
            grads = torch.autograd.grad(y.float().square().sum() / 2, [
                x_TD, own, *(t for t in leaves.values() if t is not None)])
        results.append([y, *grads])
    for mine, theirs in zip(*results, strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < 8 * torch.finfo(dtype).eps, error


def test_no_rows_at_all() -> None:
    plan = exact_rows(torch.full((3, 2), -1), torch.ones(3, 2, dtype=torch.float64), 4)
    assert isinstance(plan, RowPlan)
    w_in, w_out = torch.randn(4, 4, 6, dtype=torch.float64, requires_grad=True), torch.randn(
        4, 6, 4, dtype=torch.float64, requires_grad=True)
    p = dict.fromkeys(("bias_in_LF", "w_gate_LDF", "bias_gate_LF",
                       "bias_out_LD")) | {"w_in_LDF": w_in, "w_out_LFD": w_out}
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = strategies.get("fused")(x, plan, parameters(p, "relu"))
    assert not y.any() and all(not g.any() for g in torch.autograd.grad(y.sum(), [x, w_in, w_out]))
