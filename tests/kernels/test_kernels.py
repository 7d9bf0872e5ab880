"""Row operations against one-hot einsums in float64, and load by expert against counting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.kernels import combine_rows, gather_rows, kernels, permute_rows
from moe_plugin.kernels.choices import expert_load
from moe_plugin.kernels.cpu import products
from moe_plugin.kernels.cpu.native.functions import why_not_sums
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.kernels.rows import bags, dot_rows, sum_bags, sum_rows

pytestmark = pytest.mark.fast


# Row operations against one-hot einsums in float64: forward and all gradients.


PROBLEM = st.tuples(st.integers(0, 12), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6),
                    st.integers(0, 10**6))


def problem(tokens: int, k: int, experts: int, slots: int,
            seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A random partial placement of choices in experts*slots rows, and the one-hot [T, K, R] that
    says the same.
    """
    g = torch.Generator().manual_seed(seed)
    rows = experts * slots
    free = torch.randperm(rows, generator=g).tolist()
    position_TK = torch.full((tokens, k), -1)
    for t in range(tokens):
        for j in range(k):
            if free and torch.rand((), generator=g) < 0.7:
                position_TK[t, j] = free.pop()
    source_R = torch.full((rows,), -1)
    one_hot_TKR = torch.zeros(tokens, k, rows, dtype=torch.float64)
    for t in range(tokens):
        for j in range(k):
            if position_TK[t, j] >= 0:
                source_R[position_TK[t, j]] = t * k + j
                one_hot_TKR[t, j, position_TK[t, j]] = 1
    return position_TK, source_R, one_hot_TKR


@given(PROBLEM)
@settings(max_examples=50, deadline=None)
def test_gather_is_the_einsum(p) -> None:
    position_TK, source_R, one_hot_TKR = problem(*p)
    x = torch.randn(p[0], 4, dtype=torch.float64, requires_grad=True)
    got, want = gather_rows(x, source_R, position_TK), torch.einsum("td,tkr->rd", x, one_hot_TKR)
    torch.testing.assert_close(got, want)
    direction = torch.randn_like(want)
    grads = [torch.autograd.grad((y * direction).sum(), x)[0] for y in (got, want)]
    torch.testing.assert_close(*grads)


@given(PROBLEM)
@settings(max_examples=50, deadline=None)
def test_combine_is_the_einsum(p) -> None:
    position_TK, source_R, one_hot_TKR = problem(*p)
    rows = torch.randn(source_R.numel(), 4, dtype=torch.float64, requires_grad=True)
    w = torch.rand(p[0], p[1], dtype=torch.float64, requires_grad=True)
    got = combine_rows(rows, w, source_R, position_TK)
    want = torch.einsum("tk,rd,tkr->td", w, rows, one_hot_TKR)
    torch.testing.assert_close(got, want)
    direction = torch.randn_like(want)
    for mine, theirs in zip(
            *[torch.autograd.grad((y * direction).sum(), (rows, w)) for y in (got, want)],
            strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradcheck() -> None:
    position_TK, source_R, _ = problem(5, 2, 3, 3, 1)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    w = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(9)
    assert torch.autograd.gradcheck(lambda a: gather_rows(a, source_R, position_TK), x)
    assert torch.autograd.gradcheck(lambda a, b: combine_rows(a, b, source_R, position_TK),
                                    (rows, w))
    assert torch.autograd.gradcheck(lambda a: permute_rows(a, order, order.argsort()), rows)


def test_every_kernel_says_what_it_picks() -> None:
    for entry in kernels:
        assert entry.value.names()[0] == "torch" and entry.summary
        with pytest.raises(ValueError, match="has no implementation 'cobol'"):
            entry.value.implementation("cobol")


def assert_rounded_once(got: torch.Tensor, terms: torch.Tensor) -> None:
    """got [N, D] is the sum over axis 1 of terms [N, K, D], which are exact; no term was rounded to
    got's dtype.
    """
    want, rounding = terms.sum(1), torch.finfo(got.dtype).eps / 2
    slack = terms.abs().sum(1) * 2**-16 + torch.finfo(got.dtype).smallest_normal
    assert bool(((got - want).abs() <= want.abs() * rounding + slack).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 33, 256])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_16_bits_are_summed_in_float32(dtype: torch.dtype, width: int,
                                               weighted: bool) -> None:
    """And rounded once: eight rows of a token, of which the first is large."""
    g = torch.Generator().manual_seed(0)
    rows_RD = torch.randn(40, width, generator=g)
    rows_RD[::8] *= 300
    rows_RD = rows_RD.to(dtype)
    position_TK = torch.arange(40).view(5, 8)
    weights_TK = torch.rand(5, 8, generator=g) if weighted else None
    got = sum_rows(rows_RD, position_TK, weights_TK, True)
    scale_TK = torch.ones(5, 8) if weights_TK is None else weights_TK
    assert got.dtype == dtype
    assert_rounded_once(got, rows_RD.double()[position_TK] * scale_TK.double()[..., None])


@pytest.mark.skipif(why_not_sums() is not None, reason=f"by torch: {why_not_sums()}")
@pytest.mark.parametrize(("choices", "width"), [(2, 1), (2, 300), (3, 64), (8, 129)])
def test_sums_of_rows_are_not_too_large_on_average(choices: int, width: int) -> None:
    """Ties are rounded to even: rounded away from zero, they make two rows' sum 0.08 % too large.

    Values are multiples of 1/4, so that float32 sums are exact. Some choices have no row.
    """
    g = torch.Generator().manual_seed(0)
    rows_RD = (torch.randint(-512, 513, (500 * choices, width), generator=g) / 4).bfloat16()
    position_TK = torch.randperm(500 * choices, generator=g).view(500, choices)
    position_TK[::7, 1:] = -1
    position_TK[5] = -1
    has_row_TK1 = (position_TK >= 0)[..., None]
    exact_TD = (rows_RD.float()[position_TK.clamp(min=0)] * has_row_TK1).sum(1)
    got = sum_rows(rows_RD, position_TK, None)
    assert torch.equal(got, exact_TD.bfloat16()) and not bool(got[5].any())
    ties_TD = exact_TD.view(torch.int32).bitwise_and(0xffff) == 0x8000
    assert bool(ties_TD.any()), "no sum is between two bfloat16 values"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weighed_rows_are_rounded_once(dtype: torch.dtype) -> None:
    """As the backward pass of a CPU's experts makes them: each row one token's."""
    g = torch.Generator().manual_seed(0)
    x_TD, index_R1 = torch.randn(9, 65, generator=g).to(dtype), torch.arange(40)[:, None] % 9
    scale_R1 = torch.rand(40, 1, generator=g, dtype=accumulate_dtype(dtype))
    got = sum_bags(x_TD, *bags(index_R1, scale_R1, dtype))
    assert got.dtype == dtype
    assert_rounded_once(got, x_TD.double()[index_R1] * scale_R1.double()[..., None])


@pytest.mark.parametrize("piece_bytes", [1, 2000, 1 << 20])  # one, three and all tokens a piece
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dots_of_16_bits_are_not_rounded_to_them(dtype: torch.dtype, piece_bytes: int,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PIECE_BYTES", piece_bytes)
    g = torch.Generator().manual_seed(0)
    position_TK, source_R, _ = problem(9, 2, 5, 3, 0)
    grad_TD = torch.randn(9, 65, generator=g).to(dtype)
    rows_RD = torch.randn(source_R.numel(), 65, generator=g).to(dtype)
    rows_TKD = rows_RD.double()[position_TK.clamp(min=0)]
    want = ((rows_TKD * grad_TD.double()[:, None]).sum(2)).masked_fill(position_TK < 0, 0)
    got = dot_rows(grad_TD, rows_RD, position_TK)
    assert got.dtype == torch.float32 and bool((position_TK < 0).any())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


# Load by expert against counting by hand.


IDS_TK = torch.tensor([[0, 2], [2, -1], [2, 0], [-1, -1]])


def test_load_counts_choices_and_skips_minus_one() -> None:
    assert expert_load(IDS_TK, 4).tolist() == [2, 0, 3, 0]
    assert expert_load(IDS_TK, 4).dtype == torch.int64
    assert expert_load(IDS_TK[:0], 4).tolist() == [0, 0, 0, 0]


def test_load_by_choice() -> None:
    assert expert_load(IDS_TK, 3, per_choice=True).tolist() == [[1, 0, 2], [1, 0, 1]]


def test_masked_tokens_are_not_counted() -> None:
    mask_T = torch.tensor([False, True, True, True])
    assert expert_load(IDS_TK, 3, mask_T).tolist() == [1, 0, 2]
    assert expert_load(IDS_TK, 3, mask_T, per_choice=True).tolist() == [[0, 0, 2], [1, 0, 0]]
