"""Layers that are built without data, on the meta device, and get it later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.routing import finish_step, routers

pytestmark = pytest.mark.fast

MORE: dict[str, dict[str, Any]] = {
    "group_limited": {"groups": 2}, "sam": {"groups": 2, "top_k": 1},
    "hash": {"hash": {"vocabulary": 9}}, "switch": {"top_k": 1}, "base": {"top_k": 1}}


@pytest.mark.parametrize("name", routers.names())
@pytest.mark.parametrize("around", [True, False])
def test_what_a_router_holds_survives(name: str, around: bool) -> None:
    settings = {"router": {"name": name, **MORE.get(name, {})}}
    real = MoELayer(16, num_experts=4, **settings).router
    if around:
        with torch.device("meta"):
            layer = MoELayer(16, num_experts=4, **settings)
    else:
        layer = MoELayer(16, num_experts=4, device="meta", **settings)
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    assert [n for n, _ in layer.router.named_parameters()] == [
        n for n, _ in real.named_parameters()]
    for key, buffer in real.named_buffers():
        torch.testing.assert_close(dict(layer.router.named_buffers())[key], buffer)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert all(parameter.expert for parameter in layer.experts.parameters())


@pytest.mark.parametrize("around", [True, False])
def test_the_step_of_several_routers_survives(around: bool) -> None:
    """It is saved: a run that goes on from there would take other routers."""
    settings = {"num_experts": 4, "router": {"name": "topk,cosine"}}
    if around:
        with torch.device("meta"):
            layer = MoELayer(16, **settings)
    else:
        layer = MoELayer(16, device="meta", **settings)
    finish_step(layer)
    layer.to_empty(device="cpu")
    assert layer.state_dict()["router.step"].tolist() == [1]
