"""BASE: the assignment against the Hungarian method, balance over ranks, the two exchanges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from moe_plugin.comm import run_simulated
from moe_plugin.config import from_dict
from moe_plugin.routing import build_router
from moe_plugin.routing.routers.balanced import EPSILON, balanced_assignment, spread_and_assign

pytestmark = pytest.mark.fast


def best_total(scores_TE: torch.Tensor) -> float:
    """The largest total score with at most ceil(T / E) tokens an expert, by the Hungarian method.
    """
    tokens, experts = scores_TE.shape
    each = -(-tokens // experts)
    slots = scores_TE.repeat_interleave(each, dim=1).numpy()
    rows, columns = linear_sum_assignment(slots, maximize=True)
    assert len(rows) == tokens
    return float(slots[rows, columns].sum())


def lost(scores_TE: torch.Tensor, chosen_T: torch.Tensor) -> float:
    """What an assignment is below the best one, for each slot, relative to the scores' spread."""
    (tokens, experts), total = scores_TE.shape, float(scores_TE.gather(1, chosen_T[:, None]).sum())
    slots = -(-tokens // experts) * experts
    ends = [float(scores_TE.max()), float(scores_TE.min()), *[0.0] * (slots > tokens)]
    spread = max(max(ends) - min(ends), 1e-9)
    return (best_total(scores_TE) - total) / spread / slots - 1e-6


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 5),
       st.sampled_from(["normal", "equal", "integers", "skewed"]), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_balance_is_exact_and_the_total_within_epsilon_a_token(experts: int, each: int, more: int,
                                                             kind: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    tokens = experts * each + more % experts
    scores = torch.randn(tokens, experts, generator=g, dtype=torch.float64)
    if kind == "equal":
        scores = torch.full_like(scores, 3.0)
    elif kind == "integers":
        scores = (scores * 2).round()
    elif kind == "skewed":
        scores = scores * 0.01 + torch.arange(experts)
    chosen = balanced_assignment(scores)
    load = torch.bincount(chosen, minlength=experts)
    assert load.max() <= -(-tokens // experts)
    assert tokens % experts or (load == tokens // experts).all()
    assert lost(scores, chosen) <= EPSILON


def test_many_tokens_and_experts() -> None:
    scores = torch.randn(768, 32, dtype=torch.float64) + torch.randn(32, dtype=torch.float64)
    chosen = balanced_assignment(scores)
    assert (torch.bincount(chosen, minlength=32) == 24).all()
    assert lost(scores, chosen) <= EPSILON


def test_nan_scores_end() -> None:
    assert torch.bincount(balanced_assignment(torch.full((12, 3),
                                                         float("nan")))).tolist() == [4, 4, 4]


@given(st.integers(2, 5), st.integers(1, 6), st.integers(0, 10**6),
       st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_scores_that_are_not_finite_or_huge_are_balanced(experts: int, each: int, seed: int,
                                                         dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    largest = torch.finfo(dtype).max
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), largest, -largest, 1e-30, 0.0])
    scores = torch.randn(experts * each, experts, generator=g, dtype=dtype)
    where = torch.rand(scores.shape, generator=g) < 0.5
    picked = odd.to(dtype)[torch.randint(len(odd), scores.shape, generator=g)]
    chosen = balanced_assignment(torch.where(where, picked, scores))
    assert torch.bincount(chosen, minlength=experts).tolist() == [each] * experts


def test_infinite_scores_count_as_extremes() -> None:
    inf = float("inf")
    ends = balanced_assignment(torch.tensor([[inf, -inf], [0.5, 0.0]]))
    assert ends.tolist() == [0, 1]
    # a wish without bound outweighs any finite one, and is not granted above the finite balance
    wishes = torch.tensor([[1.0, 0.0], [inf, 0.0], [5.0, 0.0], [inf, 2.0]])
    assert balanced_assignment(wishes).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("counts", [[8, 8, 8, 8], [5, 0, 11, 2], [0, 0, 0, 0]])
def test_every_expert_gets_the_same_number_from_each_problem(world: int, counts: list[int]) -> None:
    torch.manual_seed(4)
    scores = [torch.randn(n, 4) for n in counts[:world]]
    chosen = run_simulated(world, lambda comm: spread_and_assign(scores[comm.rank], comm))
    assert [len(c) for c in chosen] == counts[:world]
    load, total = torch.bincount(torch.cat(chosen), minlength=4), sum(counts[:world])
    assert load.sum() == total and load.max() <= total / 4 + world
    if counts[0] == 8:
        assert (load == total // 4).all()


def test_tokens_that_lie_together_are_spread_over_problems() -> None:
    # rank 0 holds tokens for expert 0 alone, rank 1 for expert 1: assigned at home, half of them
    # would go astray
    scores = [torch.tensor([[9.0, 0.0]]).repeat(64, 1), torch.tensor([[0.0, 9.0]]).repeat(64, 1)]
    chosen = run_simulated(2, lambda comm: spread_and_assign(scores[comm.rank], comm))
    assert (chosen[0] == 0).float().mean() > 0.7 and (chosen[1] == 1).float().mean() > 0.7


def test_what_travels_is_scores_and_one_number_a_token() -> None:
    def rank(comm) -> int:
        before = comm.bytes_sent
        spread_and_assign(torch.randn(16, 4), comm)
        return comm.bytes_sent - before

    # half of 16 tokens go to the other rank and come back: 4 float32 out, one int64 back; and one
    # count
    assert run_simulated(2, rank) == [8 * 4 * 4 + 8 * 8 + 8] * 2


def test_padding_is_not_assigned_and_evaluation_is_greedy() -> None:
    router = build_router(
        from_dict({"model_dim": 4, "num_experts": 4, "losses": {}, "router": {"name": "base"}}))
    x, mask = torch.randn(30, 4), torch.arange(30) < 20
    ids = router(x, mask).ids_TK[:, 0]
    assert (ids[20:] == -1).all() and torch.bincount(ids[:20], minlength=4).tolist() == [5] * 4
    greedy = router.eval()(x, mask).ids_TK[:20, 0]
    assert torch.equal(greedy, (x[:20] @ router.weight_ED.T).argmax(1))
    torch.testing.assert_close(router.weight_ED @ router.weight_ED.T, torch.eye(4) * 0.01)
