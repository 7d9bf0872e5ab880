"""Every registered router against its reference: choice, weights, gradients; masks, no tokens,
dtypes, recomputation.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_plugin.config import from_dict
from moe_plugin.config.declared import reads_of
from moe_plugin.records import TokenInfo
from moe_plugin.routing import build_router, routers
from moe_plugin.routing.replay import checkpoint
from tests.routing.references import Call, gradient_of, namespace, reference_of, tensors_of

pytestmark = pytest.mark.fast

WIDTH = 6
NAMES = routers.names()


def make(name: str, experts: int = 4, k: int = 2, **settings):
    config = from_dict({
        "model_dim": WIDTH, "num_experts": experts, "losses": {},
        "router": {"name": name, "top_k": k, **reference_of(name).settings, **settings}
    })
    router = build_router(config, dtype=torch.float64)
    if hasattr(router, "bias_E"):
        router.bias_E += 0.2 * torch.randn(experts)
    return router


def call_of(router, x, mask, training: bool) -> Call:
    tree = dataclasses.asdict(router.config) | {"experts": router.num_experts, "training": training}
    leaf = x.detach().clone().requires_grad_()
    return Call(leaf, mask, tensors_of(router), namespace(tree),
                token_ids=torch.arange(len(x)) * 7 % 11, near=[True] * router.num_experts,
                shares=[1 / router.num_experts] * router.num_experts)


def route(router, x, mask):
    return router(x, mask, None, TokenInfo(token_ids_T=torch.arange(len(x)) * 7 % 11))


@pytest.mark.parametrize("experts,k,name", [
    (experts, k, name) for experts, k in [(4, 2), (8, 2), (4, 1)] for name in NAMES
    if k > 1 or name not in ("dense_to_sparse", "gshard", "noisy_topk")])  # they refuse it
def test_choice_weights_and_gradients(name: str, experts: int, k: int) -> None:
    reference = reference_of(name)
    for tokens, masked, training in [(13, 0, reference.modes[0]), (13, 4, reference.modes[-1]),
                                     (5, 5, reference.modes[0]), (0, 0, reference.modes[0])]:
        router = make(name, experts, k).train(training)
        x = torch.randn(tokens, WIDTH, dtype=torch.float64, requires_grad=True)
        mask = torch.arange(tokens) < tokens - masked
        call = call_of(router, x, mask, training)
        got = route(router, x, mask)
        want_ids = torch.tensor(reference.choose(call), dtype=torch.int64).view(
            tokens, got.ids_TK.shape[1]).masked_fill(~mask[:, None], -1)
        assert torch.equal(got.ids_TK, want_ids)
        weights, passthrough = reference.weigh(call, want_ids)
        weights = weights * (want_ids >= 0)
        torch.testing.assert_close(got.weights_TK, weights)
        direction = torch.randn(weights.shape, dtype=torch.float64)
        got_sum, want_sum = (got.weights_TK * direction).sum(), (weights * direction).sum()
        assert (got.passthrough_T is None) == (passthrough is None)
        if passthrough is not None:
            torch.testing.assert_close(got.passthrough_T, passthrough * mask)
            got_sum, want_sum = got_sum + 2 * got.passthrough_T.sum(), want_sum + 2 * (passthrough *
                                                                                       mask).sum()
        for total in (got_sum, want_sum):
            if total.requires_grad:
                total.backward()
        torch.testing.assert_close(gradient_of(x), gradient_of(call.x))
        for key, parameter in router.named_parameters():
            torch.testing.assert_close(gradient_of(parameter), gradient_of(call.p[key]),
                                       msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_training_weights_follow_the_choice_that_chance_made(name: str) -> None:
    reference = reference_of(name)
    if not reference.training:
        return  # weights depend on the noise itself: see the router's own tests
    router = make(name, 8, 2).train()
    x, mask = torch.randn(24, WIDTH, dtype=torch.float64), torch.arange(24) < 20
    got = route(router, x, mask)
    weights, _ = reference.weigh(call_of(router, x, mask, True), got.ids_TK)
    torch.testing.assert_close(got.weights_TK, weights * (got.ids_TK >= 0))
    assert (got.ids_TK[20:] == -1).all() and got.tokens == 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float32_under_autocast_and_finite_losses(name: str, dtype: torch.dtype) -> None:
    every = {
        "gshard": 1.0, "switch": 1.0, "z": 1.0, "sequence": 1.0, "global_batch": 1.0, "ta_moe": 1.0,
        "sam_alignment": 1.0, "importance": 1.0
    }
    config = from_dict({
        "model_dim": WIDTH, "num_experts": 4, "losses": every,
        "router": {"name": name, **reference_of(name).settings}
    })
    router = build_router(config).to(dtype)
    info = TokenInfo(torch.arange(12) % 11, torch.arange(12) // 4, 3)
    for x in (torch.randn(12, WIDTH), torch.zeros(12, WIDTH), torch.full((12, WIDTH), 100.0)):
        with torch.autocast("cpu", torch.bfloat16):
            out = router(x.to(dtype), None, None, info)
        assert out.weights_TK.dtype == torch.float32 and set(out.losses) == set(every)
        assert all(v.isfinite() and v.dim() == 0 for v in out.losses.values()
                   ) and out.weights_TK.isfinite().all() and out.entropy.isfinite()
    empty = router(
        torch.zeros(0, WIDTH, dtype=dtype), None, None,
        TokenInfo(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 0))
    assert all(v.isfinite() for v in empty.losses.values()) and empty.ids_TK.shape[0] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("same_noise", [True, False])
def test_a_recomputation_repeats_choice_noise_and_losses_and_counts_once(
        name: str, same_noise: bool) -> None:
    config = from_dict({
        "model_dim": WIDTH, "num_experts": 4, "losses": {"global_batch": 1.0, "switch": 1.0},
        "router": {"name": name, **({"noise": 3.0} if "noise" in reads_of(name) else {}),
                   **reference_of(name).settings}
    })
    router = build_router(config, dtype=torch.float64)
    x = torch.randn(20, WIDTH, dtype=torch.float64, requires_grad=True)
    info = TokenInfo(torch.arange(20) % 11)
    direction, first, second = torch.randn(20, 4, dtype=torch.float64), [], []

    def run(v: torch.Tensor) -> torch.Tensor:
        out = router(v, None, None, info)
        (second if first else first).append((out.ids_TK, out.losses["global_batch"].detach()))
        return (out.weights_TK * direction[:, :out.weights_TK.shape[1]]).sum() + sum(
            out.losses.values()) + v.square().sum()

    checkpoint(run, x, preserve_rng_state=same_noise).backward()
    assert torch.equal(first[0][0], second[0][0])
    assert not same_noise or torch.equal(first[0][1], second[0][1])
    assert router.step_load_E[-1] == 20
    if hasattr(router, "load_E"):
        assert router.load_E.sum() == 40


@pytest.mark.parametrize("name", NAMES)
def test_equal_scores_are_decided_alike_every_time(name: str) -> None:
    router = make(name, 8, 2).train(reference_of(name).modes[0])
    for parameter in router.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.randn(30, WIDTH, dtype=torch.float64)
    assert torch.equal(route(router, x, None).ids_TK, route(router, x, None).ids_TK)


@pytest.mark.parametrize("name", NAMES)
def test_state_comes_back(name: str) -> None:
    router, other = make(name), make(name)
    other.load_state_dict(router.state_dict())
    x = torch.randn(9, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(
        route(router.eval(), x, None).weights_TK,
        route(other.eval(), x, None).weights_TK)
