"""Router, losses and capacity against written formulas, known constants and properties."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin import MoELayer
from moe_plugin.comm import LocalComm
from moe_plugin.config import DispatchConfig, from_dict
from moe_plugin.kernels import slot_index
from moe_plugin.kernels.scores import SOFTMAX
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing import TopKRouter, losses, routers
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.capacity import capacity, drop, fixed_slots, slots

pytestmark = pytest.mark.fast


def make_router(experts: int = 4, dim: int = 8, losses_: dict | None = None,
                **router) -> TopKRouter:
    return TopKRouter(
        from_dict(
            {"model_dim": dim, "num_experts": experts, "router": router, "losses": losses_ or {}}))


def uniform_inputs(tokens: int, experts: int, k: int) -> RoutingCall:
    """Equal scores, choices assigned round robin."""
    ids_TK = (torch.arange(tokens)[:, None] + torch.arange(k)) % experts
    everything = torch.bincount(ids_TK.flatten(), minlength=experts)
    zeros_TE = torch.zeros(tokens, experts)
    return RoutingCall(
        zeros_TE, ids_TK, torch.ones(tokens, dtype=torch.bool), k, noise=1.0, score=SOFTMAX,
        info=TokenInfo(sequence_T=torch.arange(tokens) // experts, sequences=tokens // experts),
        outside_TE=torch.arange(experts).expand(tokens, -1) > 0, clean_TE=zeros_TE,
        deviation_TE=torch.ones(tokens, experts), penalty_E=torch.ones(experts),
        step_load_E=torch.cat([everything, torch.tensor([tokens])]))


@pytest.mark.parametrize("experts,k", [(2, 1), (4, 2), (8, 4)])
def test_known_constants_of_a_uniform_router(experts: int, k: int) -> None:
    x = uniform_inputs(8 * experts, experts, k)
    want = {
        "gshard": 1.0, "switch": 1.0, "sequence": 1.0, "global_batch": 1.0, "ta_moe": 1.0,
        "sam_alignment": 0.0, "importance": 0.0, "noisy_load": 0.0, "load_importance": 0.0,
        "tutel_load_importance": 0.0, "z": math.log(experts)**2
    }
    assert set(want) == set(losses.names()), "a new loss needs its constant here"
    for name, value in want.items():
        assert losses.get(name)(x).item() == pytest.approx(value, abs=1e-6), name


def noisy_call(noise: float = 0.7, tokens: int = 40, experts: int = 4) -> RoutingCall:
    """Two choices by logits with noise; the last seven tokens are padding."""
    torch.manual_seed(1)
    clean = torch.randn(tokens, experts, dtype=torch.float64)
    noisy = clean + noise * torch.randn_like(clean)
    return RoutingCall(noisy, noisy.topk(2).indices, torch.arange(tokens) < tokens - 7, 2,
                       noise=noise, score=SOFTMAX, clean_TE=clean)


def test_load_importance_formula() -> None:
    call = noisy_call()
    p, q, ids = call.logits_TE.softmax(1), call.clean_TE.softmax(1), call.ids_TK
    phi = torch.distributions.Normal(0.0, 1.0).cdf
    load = sum(phi((q[t] - p[t, ids[t, -1]]) / call.noise) for t in range(33))
    importance = sum(p[t] for t in range(33))
    want = sum(v.var() / v.mean() ** 2 for v in (load, importance)) / 2
    torch.testing.assert_close(losses.get("load_importance")(call), want)


def test_tutel_load_importance_formula() -> None:
    """Its formula by hand: scores without noise against the noisy logit of the k-th choice; both
    differ from `load_importance`.
    """
    call = noisy_call()
    q, experts = call.clean_TE.softmax(1), call.clean_TE.shape[1]
    load, importance = [0.0] * experts, [0.0] * experts
    for t in range(33):
        kth = sorted(call.logits_TE[t].tolist())[-2]
        for e in range(experts):
            load[e] += (1 + math.erf((float(q[t, e]) - kth) / call.noise / math.sqrt(2))) / 2
            importance[e] += float(q[t, e])
    want = sum(statistics.variance(v) / statistics.mean(v)**2 for v in (load, importance)) / 2
    got = losses.get("tutel_load_importance")(call)
    assert got.item() == pytest.approx(want, rel=1e-9)
    assert abs(losses.get("load_importance")(call).item() - want) > 0.1 * want


def test_tutel_load_importance_of_a_router() -> None:
    """In training alone; the noise is drawn once."""
    router = make_router(losses_={"tutel_load_importance": 1.0}, noise=1.0)
    x = torch.randn(64, 8)
    torch.manual_seed(3)
    got = router.train()(x)
    torch.manual_seed(3)
    logits = x @ router.weight_ED.t()
    noisy = logits + torch.randn_like(logits) / 4
    kth_T1 = noisy.topk(2).values[:, -1:]
    load_E = torch.special.ndtr((logits.softmax(1) - kth_T1) * 4).sum(0)
    importance_E = logits.softmax(1).sum(0)
    want = sum(v.var() / v.mean()**2 for v in (load_E, importance_E)) / 2
    torch.testing.assert_close(got.losses["tutel_load_importance"], want)
    assert not router.eval()(x).losses


@pytest.mark.parametrize("filling", [1.0, float("nan"), float("inf")])
def test_losses_ignore_padding_whatever_it_holds(filling: float) -> None:
    router = make_router(losses_={"gshard": 1.0, "switch": 1.0, "z": 1.0})
    x, mask_T = torch.randn(12, 8), torch.arange(12) < 7
    x[7:] *= filling
    padded, alone = router(x, mask_T), router(x[:7])
    for name in alone.losses:
        torch.testing.assert_close(padded.losses[name], alone.losses[name])
    torch.testing.assert_close(padded.entropy, alone.entropy)
    assert padded.tokens == 7 and (padded.ids_TK[7:] == -1).all()
    assert (padded.weights_TK[7:] == 0).all()
    sum(padded.losses.values()).backward()
    assert router.weight_ED.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64],
                         ids=str)
def test_routing_is_float32_or_better_also_under_autocast(dtype: torch.dtype) -> None:
    router = make_router().to(dtype)
    x = torch.randn(64, 8).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        inside = router(x)
    outside = router(x)
    assert inside.weights_TK.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(inside.ids_TK, outside.ids_TK) and torch.equal(inside.weights_TK,
                                                                      outside.weights_TK)


def test_ties_go_to_the_lower_expert() -> None:
    router = make_router(experts=8, top_k=3)
    torch.nn.init.zeros_(router.weight_ED)
    assert (router(torch.randn(20, 8)).ids_TK == torch.arange(3)).all()


@pytest.mark.parametrize("k", [0, 5])
def test_top_k_of_a_call_is_checked(k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k={k} .*between 1 and num_experts=4"):
        make_router()(torch.randn(3, 8), top_k=k)


def test_noise_and_jitter_only_in_training() -> None:
    router = make_router(noise=4.0, input_jitter=0.3)
    x = torch.randn(50, 8)
    assert not torch.equal(router(x).weights_TK, router(x).weights_TK)
    router.eval()
    assert torch.equal(router(x).weights_TK, router(x).weights_TK)


def test_noise_has_the_written_scale() -> None:
    router = make_router(experts=4, noise=2.0, losses_={"z": 1.0})
    torch.nn.init.zeros_(router.weight_ED)
    logits = router.scores(torch.randn(20000, 8), RoutingCall(noise=router.noise))
    assert logits.var().item() == pytest.approx((2.0 / 4) ** 2, rel=0.03)


def test_random_second_expert_keeps_with_probability_2g() -> None:
    router = make_router(experts=2, dim=2, second_expert_policy="random")
    with torch.no_grad():
        router.weight_ED.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x = torch.tensor([[math.log(4.0), 0.0]]).repeat(20000, 1)  # scores 0.8, 0.2
    kept = (router(x).ids_TK[:, 1] >= 0).float().mean().item()
    assert kept == pytest.approx(0.4, abs=0.02)
    router.eval()
    assert (router(x).ids_TK[:, 1] >= 0).all()


@pytest.mark.parametrize("normalize,chance", [("before_drop", 0.8), ("after_drop", 0.4),
                                              ("none", 0.4)])
def test_random_second_expert_follows_the_weight_before_dropping(normalize: str,
                                                                 chance: float) -> None:
    # scores 0.3, 0.2 and many small ones: the share of the second is 0.4, its score 0.2
    router = make_router(experts=12, dim=12, second_expert_policy="random", normalize=normalize)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(12))
    x = torch.tensor([[0.3, 0.2, *[0.05] * 10]]).log().repeat(20000, 1)
    assert (router(x).ids_TK[:, 1] >= 0).float().mean().item() == pytest.approx(chance, abs=0.02)


@pytest.mark.parametrize("policy", ["random", "sampling"])
@pytest.mark.parametrize("k", [1, 3])
def test_second_expert_policies_take_no_other_number_in_training(policy: str, k: int) -> None:
    router = make_router(second_expert_policy=policy)
    with pytest.raises(
            ValueError,
            match=f"top_k={k} cannot .*second_expert_policy='{policy}', which requires top_k=2"
    ):
        router(torch.randn(5, 8), None, k)
    assert router.eval()(torch.randn(5, 8), None, k).ids_TK.shape == (5, k)


def test_sampled_second_expert_follows_the_softmax_of_the_rest() -> None:
    router = make_router(experts=3, dim=3, second_expert_policy="sampling")
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(3))
    x = torch.tensor([[3.0, 1.0, 0.0]]).repeat(20000, 1)
    ids_TK = router(x).ids_TK
    share = (ids_TK[:, 1] == 1).float().mean().item()
    assert (ids_TK[:, 0] == 0).all() and share == pytest.approx(math.e / (math.e + 1), abs=0.02)


def routing_of(ids_TK: torch.Tensor, priority_T: torch.Tensor | None = None) -> Routing:
    t, k = ids_TK.shape
    priority_T = torch.zeros(t) if priority_T is None else priority_T
    real = (ids_TK >= 0).any(1).sum()
    return Routing(ids_TK, torch.rand(t, k) * (ids_TK >= 0), priority_T, {}, torch.zeros(()), real)


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_slot_index_is_the_running_count(tokens: int, k: int, experts: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(-1, experts, (tokens, k), generator=g)
    used = [0] * experts
    want_TK = torch.full((tokens, k), -1)
    for j in range(k):
        for t in range(tokens):
            if ids_TK[t, j] >= 0:
                want_TK[t, j] = used[ids_TK[t, j]]
                used[ids_TK[t, j]] += 1
    assert torch.equal(slot_index(ids_TK, experts), want_TK)


def test_capacity_worked_example() -> None:
    assert fixed_slots(10, 4, 2, 1.0) == 6 and fixed_slots(10, 4, 2, 1.25) == 6 and fixed_slots(
        10, 4, 2, 1.4) == 8


@pytest.mark.parametrize("factor,want", [(None, None), (1.0, 6), (1.25, 6), (2.0, 12), (0.3, 1),
                                         (0.0, 6), (-1.0, 6), (-0.7, 4)])
def test_capacity_table(factor: float | None, want: int | None) -> None:
    # 10 tokens, 4 experts, 2 choices: s = 3; expert 2 gets 6
    first = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 3])
    second = torch.tensor([1, 1, 2, 2, 3, 2, 2, 3, 3, 1])
    routing = routing_of(torch.stack([first, second], 1))
    assert capacity(DispatchConfig(capacity_factor=factor), routing, 4, LocalComm(), True) == want


def test_a_lone_rank_whose_host_must_not_wait_has_as_many_slots_as_tokens() -> None:
    """No expert gets more: a token chooses an expert once."""
    ids_TK = torch.empty(10, 2, dtype=torch.int64, device="meta")
    routing = Routing(ids_TK, torch.empty(10, 2, device="meta"), None, {}, torch.zeros(()),
                      torch.zeros((), dtype=torch.int64))
    assert capacity(DispatchConfig(capacity_factor=0.0), routing, 4, LocalComm(), True) == 10


def test_eval_capacity() -> None:
    routing = routing_of(torch.zeros(10, 1, dtype=torch.int64))
    config = DispatchConfig(capacity_factor=1.0, eval_capacity_factor=2.0)
    assert capacity(config, routing, 4, LocalComm(), True) == 3 and capacity(
        config, routing, 4, LocalComm(), False) == 6
    config = DispatchConfig(capacity_factor=1.0, eval_token_fraction=0.25)
    assert capacity(config, routing, 4, LocalComm(), True) == 3 and capacity(
        config, routing, 4, LocalComm(), False) == 3
    assert capacity(DispatchConfig(eval_token_fraction=0.5), routing, 4, LocalComm(), False) == 5


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 8), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_batch_priority_keeps_the_most_confident(tokens: int, experts: int, limit: int,
                                                 seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    ids_T1 = torch.randint(0, experts, (tokens, 1), generator=g)
    priority_T = torch.rand(tokens, generator=g)
    routing = routing_of(ids_T1, priority_T)
    kept = drop(routing, slots(routing, experts, True), limit, False).ids_TK[:, 0] >= 0
    for e in range(experts):
        mine = (ids_T1[:, 0] == e).nonzero().flatten().tolist()
        best = sorted(mine, key=lambda t: -priority_T[t].item())[:limit]
        assert {t for t in mine if kept[t]} == set(best)


def test_unknown_router_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown router 'best'; known: .*topk"):
        routers.get("best")


def test_a_users_own_router_and_loss(own_entries: None) -> None:
    @losses.register("test_own_loss")
    def own(x: RoutingCall) -> torch.Tensor:
        """Twice the mean score of expert 0."""
        return 2 * x.importance_E()[0] / x.count

    out = make_router(losses_={"test_own_loss": 1.0})(torch.randn(5, 8))
    assert 0 < out.losses["test_own_loss"] < 2
    with pytest.raises(ValueError, match="already registered"):
        losses.register("test_own_loss")(own)
    losses.forget("test_own_loss")
    with pytest.raises(ValueError, match="unknown loss"):
        make_router(losses_={"test_own_loss": 1.0})


FAMILY = {
    "topk": {}, "topk, sigmoid": {"score": "sigmoid"}, "topk, one choice": {"top_k": 1},
    "topk, after": {"normalize": "after_drop"}, "topk, noise": {"noise": 2.0},
    "topk, random": {"second_expert_policy": "random"},
    "topk, sampling": {"second_expert_policy": "sampling"}, "switch": {}, "gshard": {},
    "cosine": {}, "group_limited": {"groups": 3, "group_top_k": 2}, "sam": {"groups": 3},
    "sigmoid_bias": {}, "sigmoid_bias, groups": {"groups": 3, "group_top_k": 2}, "ta_moe": {},
    "quantile": {}, "topology_quota": {}, "topology_quota, sigmoid": {"score": "sigmoid"},
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", FAMILY)
def test_one_pass_gives_what_single_steps_give(case: str, masked: bool) -> None:
    """Choices, weights, losses, entropy and gradients of every top-k router in one pass, and with
    scores of all tokens.
    """
    names = {"gshard": 1.0, "switch": 1.0, "z": 1.0, "importance": 1.0}
    mask_T = torch.arange(40) % 5 > 0 if masked else None
    found = []
    for one_pass in (True, False):
        torch.manual_seed(3)
        router = routers.get(case.split(",")[0])(from_dict({
            "model_dim": 8, "num_experts": 6, "losses": names, "experts": {"hidden_dim": 8},
            "router": {"name": case.split(",")[0], "top_k": 1 if case == "switch" else 2,
                       **FAMILY[case]}
        })).double()
        assert router.one_pass()
        if not one_pass:
            router.one_pass = lambda: False
        if case.startswith("sigmoid_bias"):
            router.bias_E = torch.linspace(-0.3, 0.3, 6)
        x_TD = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(4)
        routing = router(x_TD, mask_T)
        total = routing.weights_TK.square().sum() + sum(routing.losses.values())
        gradients = torch.autograd.grad(total, [x_TD, *router.parameters()])
        found.append([routing.ids_TK, routing.weights_TK, routing.entropy, routing.tokens,
                      *(routing.losses[name] for name in sorted(names)), *gradients,
                      *([router.load_E] if case.startswith("sigmoid_bias") else [])])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("level", [-18.0, -30.0, -46.0])
@pytest.mark.parametrize("normalize,k", [("before_drop", 2), ("after_drop", 2), ("always", 1)])
def test_small_scores_are_divided_by_their_sum(normalize: str, k: int, level: float) -> None:
    """A layer's weights and balance loss, by hand in float64: sums of 1e-20 are divided, too."""
    config = from_dict({"model_dim": 8, "num_experts": 4, "losses": {"switch": 1.0}, "experts": {
        "hidden_dim": 8}, "router": {"score": "sigmoid", "normalize": normalize, "top_k": k}})
    layer = MoELayer(config)
    with torch.no_grad():
        layer.router.weight_ED.normal_(0, 0.1)[:, 0] = level
    x_TD = torch.cat([torch.ones(6, 1), torch.randn(6, 7)], 1)
    routing = layer.route(layer.token_entry.enter(x_TD, None, None, torch.float32), None)
    kept = routing if layer.capacity.never else layer.capacity(routing, True).routing
    s_TE = (x_TD.double() @ layer.router.weight_ED.double().t()).sigmoid()
    s_TK = s_TE.gather(1, kept.ids_TK)
    want = s_TK / (s_TK.sum(1, keepdim=True) + 1e-20)
    torch.testing.assert_close(kept.weights_TK.double(), want, rtol=1e-4, atol=1e-6)
    share_E = (s_TE / (s_TE.sum(1, keepdim=True) + 1e-20)).mean(0)
    loss = (kept.ids_TK.flatten().bincount(minlength=4) / (6 * k) * share_E).sum() * 4
    torch.testing.assert_close(routing.losses["switch"].double(), loss, rtol=1e-4, atol=1e-6)
    grad, right = (torch.autograd.grad(y[:, 0].sum(), layer.router.weight_ED, retain_graph=True)[0]
                   for y in (kept.weights_TK, want))
    torch.testing.assert_close(grad, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_that_vanish_are_divided_by_epsilon_after_a_drop(dtype: torch.dtype) -> None:
    """A router sure of one expert gives the others next to nothing; without a slot there, such a
    token is lost, as with fairseq's branch: its other weights are not blown up to a sum of 1.
    """
    epsilon = torch.finfo(dtype).eps
    weights_TK = torch.tensor([[1.0, 1e-30], [1.0, 1e-30], [0.5, 0.25]], dtype=dtype)
    ids_TK = torch.tensor([[0, 1]] * 3)
    routing = Routing(ids_TK, weights_TK, weights_TK[:, 0], {}, torch.zeros(()), torch.tensor(3))
    kept = drop(routing, slots(routing, 2, False), 1, normalize_after=True)
    torch.testing.assert_close(kept.weights_TK[0], weights_TK[0])
    assert kept.weights_TK[1].tolist() == [0, 0]
    routing = dataclasses.replace(routing, ids_TK=torch.tensor([[0, 1], [0, 2], [0, 3]]))
    kept = drop(routing, slots(routing, 4, False), 1, normalize_after=True)
    torch.testing.assert_close(kept.weights_TK[1:, 1],
                               torch.tensor([1e-30 / epsilon, 1.0], dtype=dtype))
