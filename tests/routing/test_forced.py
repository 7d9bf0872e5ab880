"""`router.force: balance`: even loads for benchmarks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.config.router import readers_of
from moe_plugin.routing import build_router
from moe_plugin.routing.replay import checkpoint
from moe_plugin.utils.messages import warn_once

pytestmark = pytest.mark.fast
ROUTERS = readers_of("force", "balance")


def config(name: str = "topk", experts: int = 8, k: int = 2, **more: Any) -> Any:
    groups = {"groups": 2} if name == "group_limited" else {}
    return from_dict({"model_dim": 8, "num_experts": experts, "losses": more.pop("losses", {}),
                      "router": {"name": name, "top_k": k, "force": "balance", **groups, **more}})


@pytest.mark.parametrize(("experts", "k", "tokens"), [
    (8, 2, 32), (8, 2, 5), (8, 3, 13), (6, 4, 7), (5, 5, 3), (7, 1, 20), (64, 8, 100), (3, 2, 0)])
def test_every_expert_gets_as_many_as_any_other_or_one_more(experts: int, k: int,
                                                            tokens: int) -> None:
    ids_TK = build_router(config(experts=experts, k=k))(torch.randn(tokens, 8)).ids_TK
    assert ids_TK.tolist() == [[(n + j * experts // k) % experts for j in range(k)]
                               for n in range(tokens)]
    assert all(len(set(row)) == k for row in ids_TK.tolist())
    load_E = torch.bincount(ids_TK.flatten(), minlength=experts)
    assert {int(load_E.min()), int(load_E.max())} <= {tokens * k // experts,
                                                      -(-tokens * k // experts)}


def test_padding_takes_part_in_nothing() -> None:
    mask_T = torch.rand(40) < 0.6
    router = build_router(config())
    x_TD = torch.randn(40, 8)
    routing = router(x_TD, mask_T)
    assert (routing.ids_TK[~mask_T] == -1).all()
    assert torch.equal(routing.ids_TK[mask_T], router(x_TD[mask_T]).ids_TK)


def dense(router: Any, x_TD: Tensor, k: int) -> Tensor:
    """Weights of the even choice by one softmax."""
    scores_TE = torch.softmax(x_TD @ router.weight_ED.T, 1)
    ids_TK = torch.tensor([[(n + j * 8 // k) % 8 for j in range(k)] for n in range(len(x_TD))])
    chosen_TK = scores_TE.gather(1, ids_TK)
    return chosen_TK / chosen_TK.sum(1, keepdim=True) if k > 1 else chosen_TK


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("training", [True, False])
def test_weights_and_gradients_are_those_of_the_routers_scores(k: int, training: bool) -> None:
    router = build_router(config(k=k), dtype=torch.float64).train(training)
    x_TD = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    coefficients_TK = torch.randn(16, k, dtype=torch.float64)
    found = []
    for weights_TK in (router(x_TD).weights_TK, dense(router, x_TD, k)):
        grads = torch.autograd.grad((weights_TK * coefficients_TK).sum(), [x_TD, router.weight_ED])
        found.append((weights_TK, *grads))
    torch.testing.assert_close(*found)


def test_losses_of_an_even_load_are_constants() -> None:
    router = build_router(config(losses={"switch": 0.1, "gshard": 0.1, "z": 0.1}),
                          dtype=torch.float64)
    x_TD = torch.randn(16, 8, dtype=torch.float64)
    losses = router(x_TD).losses
    for name in ("switch", "gshard"):
        torch.testing.assert_close(losses[name].item(), 1.0)
        [grad] = torch.autograd.grad(losses[name], [router.weight_ED], retain_graph=True)
        assert grad.abs().max() < 1e-12
    z = torch.logsumexp(x_TD @ router.weight_ED.T, 1).square().mean()
    torch.testing.assert_close(losses["z"], z)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_that_has_it_is_even_in_a_layer(name: str) -> None:
    torch.manual_seed(0)
    k = 1 if name == "switch" else 2
    layer = MoELayer(config(name))
    x_TD = torch.randn(32, 8)
    out = layer(x_TD)
    assert out.stats.load_KE.sum(0).tolist() == [32 * k // 8] * 8
    again = checkpoint(lambda x: layer(x).output, x_TD.requires_grad_())
    torch.testing.assert_close(again, out.output)
    again.sum().backward()
    assert x_TD.grad.isfinite().all()


def test_biases_stay_where_the_load_is_even() -> None:
    router = build_router(config("sigmoid_bias"))
    router(torch.randn(32, 8))
    router.finish_step()
    assert router.bias_E.abs().max() == 0


@pytest.mark.parametrize(("router", "error"), [
    ({"name": "gshard"}, "router.force='balance' .* must be none where router.name='gshard'"),
    ({"name": "topk,hash", "hash": {"vocabulary": 4}}, "must be none with router hash, which does "
     "not read it; leave it out, or use router.name=topk alone"),
    ({"second_expert_policy": "random"}, "none unless router.second_expert_policy=all"),
    ({"force": "even"}, "force='even' .*none, balance")])
def test_what_cannot_be_forced_is_refused(router: dict, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        from_dict({"router": {"force": "balance", **router}})


def test_it_is_said_that_it_is_for_benchmarks(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        MoELayer(config())
    [record] = [r for r in caplog.records if "router.force=balance" in r.getMessage()]
    assert "for benchmarks" in record.getMessage()
