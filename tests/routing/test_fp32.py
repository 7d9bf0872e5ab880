"""`router.fp32`: parameters that stay in float32 in a model of lower precision."""

from __future__ import annotations

import copy

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.records import TokenInfo
from moe_plugin.routing import build_router, routers
from tests.kernels.compiled_or_not import compiled
from tests.routing.references import NEEDED

pytestmark = pytest.mark.fast

LOWER = {
    "half": lambda module: module.half(), "bfloat16": lambda module: module.bfloat16(),
    "to": lambda module: module.to(torch.bfloat16),
    "to like": lambda module: module.to(torch.zeros(1, dtype=torch.half)),
    "type": lambda module: module.type(torch.bfloat16),
}


def settings(name: str = "topk", fp32: bool = True) -> dict:
    more = NEEDED.get(name.split(",")[0], {})
    return {"model_dim": 16, "num_experts": 4, "router": {"name": name, "fp32": fp32, **more},
            "experts": {"hidden_dim": 8}}


@pytest.mark.parametrize("how", LOWER)
def test_whatever_lowers_the_model_leaves_the_router(how: str) -> None:
    layer = MoELayer(from_dict(settings()))
    before = layer.router.weight_ED.detach().clone()
    lowered = LOWER[how](layer).experts.w_in_LDF.dtype
    assert lowered in (torch.half, torch.bfloat16)
    assert layer.router.weight_ED.dtype == torch.float32
    assert torch.equal(layer.router.weight_ED, before)
    other = LOWER[how](MoELayer(from_dict(settings(fp32=False))))
    assert other.router.weight_ED.dtype == lowered
    assert LOWER[how](layer).double().router.weight_ED.dtype == torch.float64
    assert layer.float().router.weight_ED.dtype == torch.float32


@pytest.mark.parametrize("name", routers.names())
def test_every_router_keeps_its_parameters(name: str) -> None:
    made = build_router(from_dict(settings(name)), dtype=torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in made.parameters())
    assert all(p.dtype == torch.float32 for p in copy.deepcopy(made).half().parameters())
    several = build_router(from_dict(settings(f"{name},switch")), dtype=torch.bfloat16).bfloat16()
    assert all(p.dtype == torch.float32 for p in several.parameters())


@pytest.mark.parametrize("in_c", [False, True])
def test_scores_are_those_of_the_unrounded_weights(in_c: bool) -> None:
    torch.manual_seed(0)
    config = from_dict(settings())
    whole = build_router(config)
    x_TD = torch.randn(50, 16).bfloat16()
    wanted = whole(x_TD.float(), None, None, TokenInfo())
    lowered = copy.deepcopy(whole).bfloat16()
    with compiled(in_c):
        routing = lowered(x_TD, None, None, TokenInfo())
    assert torch.equal(routing.ids_TK, wanted.ids_TK)
    # compiled functions sum in another order; rounded weights would be off a thousand times as much
    off = 3e-6 if in_c else 0.0
    torch.testing.assert_close(routing.weights_TK, wanted.weights_TK, rtol=off, atol=0)
    routing.weights_TK[:, 0].sum().backward()
    wanted.weights_TK[:, 0].sum().backward()
    assert lowered.weight_ED.grad.dtype == torch.float32
    torch.testing.assert_close(lowered.weight_ED.grad, whole.weight_ED.grad)


def test_steps_too_small_for_bf16_add_up_and_survive_a_checkpoint() -> None:
    layer = MoELayer(from_dict(settings()), dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    with torch.no_grad():
        layer.router.weight_ED.fill_(1.0)
    for _ in range(10):
        layer.router.weight_ED.grad = torch.ones_like(layer.router.weight_ED)
        optimizer.step()
    torch.testing.assert_close(layer.router.weight_ED,
                               torch.full_like(layer.router.weight_ED, 0.999))
    other = MoELayer(from_dict(settings())).bfloat16()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.router.weight_ED, layer.router.weight_ED)
    assert other.router.weight_ED.dtype == torch.float32
