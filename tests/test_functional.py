"""`torch.func` around a layer of one rank: the derivatives that torch.autograd gives of our
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from moe_plugin import MoEBlock, MoELayer
from moe_plugin.comm import LocalComm
from moe_plugin.dispatch import dispatchers
from moe_plugin.kernels.expert_ffn import strategies
from moe_plugin.records import TokenInfo
from moe_plugin.routing import routers
from moe_plugin.routing.pregate import link
from tests.distributed import run_gloo
from tests.routing.test_meta import MORE

WIDTH = 8
Parameters = dict[str, Tensor]


def problem(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[
        MoELayer, Callable[[Parameters, Tensor], Tensor], Parameters, Tensor]:
    """(layer, loss of parameters and tokens, the parameters, tokens); two tokens are padding."""
    torch.manual_seed(0)
    settings = {"num_experts": 4, "dtype": dtype, **settings}
    layer = MoELayer(WIDTH, settings.pop("comm", LocalComm()), **settings).eval()
    number_T = torch.arange(7)

    def loss(parameters: Parameters, x_TD: Tensor) -> Tensor:
        out = functional_call(layer, parameters, (x_TD, number_T < 5), {
            "info": TokenInfo(number_T % 9, number_T * 0, 1)})
        return out.output.square().sum() + sum(out.losses.values())

    return layer, loss, {k: p.detach() for k, p in layer.named_parameters()}, torch.randn(
        7, WIDTH, dtype=dtype)


def check(tolerance: float = 1e-9, **settings: Any) -> None:
    layer, loss, parameters, x_TD = problem(**settings)
    leaf_TD = x_TD.clone().requires_grad_()
    wanted = torch.autograd.grad(loss(dict(layer.named_parameters()), leaf_TD),
                                 [*layer.parameters(), leaf_TD], allow_unused=True)
    wanted = [torch.zeros_like(p) if g is None else g
              for g, p in zip(wanted, [*layer.parameters(), leaf_TD], strict=True)]
    near = {"rtol": tolerance, "atol": tolerance}
    by_name, by_token = grad(loss, argnums=(0, 1))(parameters, x_TD)
    torch.testing.assert_close([*by_name.values(), by_token], wanted, **near)
    value, pull = vjp(loss, parameters, x_TD)
    by_name, by_token = pull(torch.ones_like(value))
    torch.testing.assert_close([*by_name.values(), by_token], wanted, **near)
    g = torch.Generator().manual_seed(1)
    along = [torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype) for p in wanted]
    _, forward = jvp(loss, (parameters, x_TD),
                     (dict(zip(parameters, along, strict=False)), along[-1]))
    slope = sum((a.double() * w.double()).sum() for a, w in zip(along, wanted, strict=True))
    torch.testing.assert_close(forward.double(), slope, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("name", routers.names())
def test_routers(name: str) -> None:
    check(router={"name": name, **MORE.get(name, {})})


@pytest.mark.parametrize("name", dispatchers.names())
def test_dispatchers(name: str) -> None:
    check(dispatch={"name": name, "capacity_factor": 1.0})


@pytest.mark.parametrize("name", strategies.names())
def test_strategies(name: str) -> None:
    try:
        strategies.get(name)
    except (RuntimeError, ValueError) as error:
        pytest.skip(str(error))
    check(experts={"compute": name})


@pytest.mark.parametrize("settings", [
    {"experts": {"kind": "gated_ffn", "shared_hidden_dim": 12, "recompute_activation": True}},
    {"experts": {"weights_first": True}}, {"router": {"name": "topk,cosine"}},
    {"experts": lambda index: nn.Linear(WIDTH, WIDTH, dtype=torch.float64)},
    {"dtype": torch.float32, "tolerance": 1e-4}, {"dtype": torch.bfloat16, "tolerance": 0.1}])
def test_settings(settings: dict[str, Any]) -> None:
    check(**settings)


def test_second_derivatives() -> None:
    layer, loss, parameters, x_TD = problem(experts={"compute": "loop"})
    leaf_TD = x_TD.clone().requires_grad_()
    [first] = torch.autograd.grad(loss(parameters, leaf_TD), leaf_TD, create_graph=True)
    [wanted] = torch.autograd.grad(first.square().sum(), leaf_TD)
    got = grad(lambda x_TD: grad(loss, 1)(parameters, x_TD).square().sum())(x_TD)
    torch.testing.assert_close(got, wanted)
    second = jacrev(grad(loss, 1), 1)(parameters, x_TD)
    torch.testing.assert_close((second * first.detach()).sum((2, 3)) * 2, wanted)


def test_what_cannot_be_is_refused() -> None:
    _, loss, parameters, x_TD = problem()
    for call in (lambda: vmap(loss, (None, 0))(parameters, torch.stack([x_TD, x_TD])),
                 lambda: hessian(loss, 1)(parameters, x_TD)):
        with pytest.raises(ValueError, match="vmap .* Use grad, vjp, jvp or"):
            call()
    _, loss, parameters, x_TD = problem(experts_on="host", dtype=torch.float32)
    with pytest.raises(ValueError, match="torch.func cannot transform StoredExperts"):
        grad(loss)(parameters, x_TD)


def test_linked_blocks_are_refused() -> None:
    model = nn.Sequential(*(MoEBlock(WIDTH, LocalComm(), num_experts=4, router={"pre_gate": 1})
                            for _ in range(2)))
    link(model)
    with pytest.raises(ValueError, match="torch.func cannot transform linked blocks"):
        grad(lambda x_TD: model(x_TD).sum())(torch.randn(5, WIDTH))


def run_two_ranks() -> str:
    _, loss, parameters, x_TD = problem(comm=None)
    with pytest.raises(ValueError, match="torch.func cannot transform FFNExperts") as error:
        grad(loss)(parameters, x_TD)
    return str(error.value)


@pytest.mark.distributed
def test_several_ranks_are_refused() -> None:
    assert all("Use torch.autograd" in said for said in run_gloo(2, run_two_ranks))
