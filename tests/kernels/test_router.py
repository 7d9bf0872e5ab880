"""The router's one pass: gradients in float64, ties, and the same answers as scores taken one by
one.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.kernels import route, score_functions, slot_index, top_k_stable
from moe_plugin.kernels.choices import running_count
from moe_plugin.kernels.cpu import products
from moe_plugin.kernels.cpu.native.functions import EXPERTS, scores_of, why_not
from moe_plugin.kernels.router import Rule
from moe_plugin.kernels.scores import SOFTMAX, linear_scores
from tests import oracle
from tests.kernels.compiled_or_not import compiled

pytestmark = pytest.mark.fast
# score functions with a slope
ONE_PASS = [name for name in score_functions.names()
            if "torch" in score_functions.get(name).kernels]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", ONE_PASS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("tokens,experts,k", [(5, 4, 2), (3, 1, 1), (4, 3, 3), (1, 7, 5)])
def test_gradcheck(tokens: int, experts: int, k: int, normalize: bool, score: str,
                   masked: bool) -> None:
    logits = torch.randn(tokens, experts, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(tokens) < 0.7 if masked else None
    rule = Rule(k, normalize, score_functions.get(score)())

    def outputs(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routed = route(logits, mask, rule)
        return routed.weights_TK, routed.importance_E, routed.z

    assert torch.autograd.gradcheck(outputs, logits)


@given(st.sampled_from(ONE_PASS), st.floats(-60, 20), st.floats(0, 30),
       st.sampled_from([(1e-20, 0.0), (0.0, 0.0), (0.0, 1e-12), (1e-6, 0.0), (1e-20, 2.0**-23)]),
       st.integers(1, 5), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_weights_of_small_scores(score: str, level: float, spread: float,
                                 numbers: tuple[float, float], k: int, seed: int) -> None:
    """Score over max(sum + add, least), with its gradient, by hand in float64."""
    g = torch.Generator().manual_seed(seed)
    add, least = numbers
    logits_TE = level + spread * torch.randn(7, 5, generator=g)
    bias_E, pull_TK = 10 * torch.randn(5, generator=g), torch.randn(7, k, generator=g)
    rule = Rule(k, True, score_functions.get(score)(), add=add, least=least)
    found = []
    for dtype in (torch.float32, torch.float64):
        x_TE = logits_TE.to(dtype).requires_grad_()
        routed = route(x_TE, None, rule, bias_E=bias_E)
        found.append((routed.weights_TK, torch.autograd.grad(
            (routed.weights_TK * pull_TK).sum(), x_TE)[0], routed.ids_TK))
    x_TE = logits_TE.double().requires_grad_()
    s_TE = oracle.scores_of(score, x_TE)
    for (got, grad, ids_TK), tolerance in zip(found, (2e-5, 1e-9), strict=True):
        s_TK = s_TE.gather(1, ids_TK)
        total_T1 = s_TK.sum(1, keepdim=True) + add
        want = s_TK / torch.where(total_T1 < least, least, total_T1)
        right = torch.autograd.grad((want * pull_TK).sum(), x_TE, retain_graph=True)[0]
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grad.double(), right, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("experts", [2, 8, 15, 16, 40])
def test_scores_of_few_experts_and_many_tokens(experts: int) -> None:
    g = torch.Generator().manual_seed(experts)
    logits_TE = 30 * torch.randn(600, experts, generator=g, dtype=torch.float64)
    logits_TE[0] = 1e4 * torch.arange(experts)  # exp of it is infinite
    rule, results = Rule(2, True, SOFTMAX), []
    for way in ("route", "softmax"):
        x_TE = logits_TE.clone().requires_grad_()
        if way == "route":
            routed = route(x_TE, None, rule)
            ids_TK, weights_TK, importance_E = routed.ids_TK, routed.weights_TK, routed.importance_E
        else:
            s_TE = torch.softmax(x_TE, 1)
            best_TK, ids_TK = torch.topk(s_TE, 2, dim=1)
            weights_TK, importance_E = best_TK / best_TK.sum(1, keepdim=True), s_TE.sum(0)
        loss = weights_TK.square().sum() + importance_E.square().sum()
        results.append([weights_TK, importance_E, torch.autograd.grad(loss, x_TE)[0]])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 20), st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_best_scores_and_ties(tokens: int, experts: int, k: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (tokens, experts), generator=g).float()
    k = min(k, experts)
    chosen = top_k_stable(scores, k)
    for row, ids in zip(scores.tolist(), chosen.tolist(), strict=True):
        assert ids == sorted(range(experts), key=lambda e: (-row[e], e))[:k]
    assert torch.equal(route(scores.log1p(), None, Rule(k, True, SOFTMAX)).ids_TK, chosen)


@given(st.lists(st.integers(-1, 5), max_size=60))
@settings(max_examples=60, deadline=None)
def test_running_count(ids: list[int]) -> None:
    ranks, counts = running_count(torch.tensor(ids, dtype=torch.int64), 6)
    assert ranks.tolist() == [-1 if e < 0 else ids[:n].count(e) for n, e in enumerate(ids)]
    assert counts.tolist() == [ids.count(e) for e in range(6)]


def test_first_choices_come_before_second_choices() -> None:
    ids = torch.tensor([[0, 1], [1, 0], [0, -1]])
    assert slot_index(ids, 2).tolist() == [[0, 1], [0, 2], [1, -1]]


def test_scores_in_float32_keep_no_float32_copy_of_the_tokens() -> None:
    x_TD = torch.randn(12, 16).bfloat16().requires_grad_()
    weight_ED = torch.randn(4, 16).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        scores_TE = linear_scores(x_TD, weight_ED)
    assert scores_TE.dtype == torch.float32
    assert kept and all(t.dtype == torch.bfloat16 for t in kept if t.shape[-1] == 16)
    wanted = [x_TD.detach().float().requires_grad_(), weight_ED.detach().float().requires_grad_()]
    want_TE = torch.nn.functional.linear(*wanted)
    torch.testing.assert_close(scores_TE, want_TE)
    grad_TE = torch.randn(12, 4)
    got = torch.autograd.grad(scores_TE, [x_TD, weight_ED], grad_TE)
    for mine, theirs in zip(got, torch.autograd.grad(want_TE, wanted, grad_TE), strict=True):
        torch.testing.assert_close(mine, theirs.bfloat16())


# one, five, eight and all tokens a piece
@pytest.mark.parametrize("piece_bytes", [1, 800, 1280, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_scores_are_rounded_once(dtype: torch.dtype, piece_bytes: int,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tokens and weights in 16 bits, from scores' in float32 that have more."""
    monkeypatch.setattr(products, "PIECE_BYTES", piece_bytes)
    with compiled(False):
        rounded_once(dtype, 33, 12, 40)


@pytest.mark.parametrize("tokens,experts,width", [(33, 12, 40), (1, 1, 1), (0, 4, 8), (3, 16, 1030),
                                                  (70, 5, 2049), (515, 7, 64), (40, 17, 24)])
def test_gradients_of_scores_by_compiled_products(tokens: int, experts: int, width: int) -> None:
    if (why := why_not(None)) is not None:
        pytest.skip(f"by torch: {why}")
    made = scores_of(torch.empty(2, width).bfloat16(), torch.empty(experts, width))
    assert (made is None) == (experts > EXPERTS)
    rounded_once(torch.bfloat16, tokens, experts, width)


def rounded_once(dtype: torch.dtype, tokens: int, experts: int, width: int) -> None:
    g = torch.Generator().manual_seed(0)
    x_TD = torch.randn(tokens, width, generator=g).to(dtype).requires_grad_()
    weight_ED = torch.randn(experts, width, generator=g).to(dtype).requires_grad_()
    grad_TE = torch.randn(tokens, experts, generator=g)
    scores_TE = linear_scores(x_TD, weight_ED)
    want_TE = x_TD.double() @ weight_ED.double().t()
    torch.testing.assert_close(scores_TE.double(), want_TE, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(scores_TE, (x_TD, weight_ED), grad_TE)
    grad_TE, x_TD, weight_ED = (t.detach().double() for t in (grad_TE, x_TD, weight_ED))
    for mine, a, b in zip(got, (grad_TE, grad_TE.t()), (weight_ED, x_TD), strict=True):
        slack = a.abs() @ b.abs() * 2**-16 + torch.finfo(dtype).smallest_normal
        want = a @ b
        assert mine.dtype == dtype
        assert bool(((mine - want).abs() <= want.abs() * torch.finfo(dtype).eps / 2 + slack).all())


def test_second_derivatives_of_scores_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PIECE_BYTES", 32)
    g = torch.Generator().manual_seed(0)
    x_TD = torch.randn(9, 4, generator=g).bfloat16().requires_grad_()
    weight_ED = torch.randn(3, 4, generator=g).bfloat16().requires_grad_()
    wide = [x_TD.detach().double().requires_grad_(), weight_ED.detach().double().requires_grad_()]

    def second(scores_TE: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(scores_TE.square().sum(), of, create_graph=True)
        return torch.autograd.grad(sum(grad.double().square().sum() for grad in first), of)

    got = second(linear_scores(x_TD, weight_ED), x_TD, weight_ED)
    for mine, want in zip(got, second(wide[0] @ wide[1].t(), *wide), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=0.05, atol=0.05 * want.abs().max())
