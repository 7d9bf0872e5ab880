"""Derivatives of a layer beyond one backward pass: of second order, and through recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.comm import run_simulated
from moe_plugin.routing.replay import checkpoint
from tests.test_layer import config

pytestmark = pytest.mark.fast


def test_second_derivatives_of_the_loop() -> None:
    layer = MoELayer(
        config(experts={"hidden_dim": 6, "compute": "loop", "activation": "silu"},
               dispatch={"capacity_factor": 0.5}), dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v, *_: layer(v).output, (x, *layer.parameters()),
                                        atol=1e-4, fast_mode=True)


def test_second_derivatives_over_ranks() -> None:
    """The gradient's norm, differentiated, is the same with one rank and with two."""
    x = torch.randn(2, 6, 8, dtype=torch.float64)

    def rank(comm) -> torch.Tensor:
        layer = MoELayer(config(experts={"hidden_dim": 6, "compute": "loop", "activation": "silu"}),
                         comm, dtype=torch.float64)
        for index, parameter in enumerate(layer.parameters()):
            nn.init.constant_(parameter, 0.1 * (index + 1))
        with torch.no_grad():
            layer.router.weight_ED.copy_(torch.linspace(-1, 1, 32).view(4, 8))
        mine = (x.flatten(0, 1) if comm.size == 1 else x[comm.rank]).clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(mine).output.square().sum(), mine, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), mine)[0]

    torch.testing.assert_close(torch.cat(run_simulated(2, rank)), run_simulated(1, rank)[0])


@pytest.mark.parametrize("changes",
                         [{"experts": {"hidden_dim": 16, "compute": "fused"}},
                          {"experts": {"hidden_dim": 16, "compute": "kernels"}},
                          {"experts": {"hidden_dim": 16, "compute": "loop"}, "parallel": {"d": 2}}])
def test_second_derivatives_elsewhere_are_an_error(changes: dict) -> None:
    def rank(comm) -> None:
        x = torch.randn(4, 8, requires_grad=True)
        torch.autograd.grad(
            MoELayer(config(**changes), comm)(x).output.square().sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="second derivatives .* experts.compute='loop'"):
        run_simulated(1 if "parallel" not in changes else 2, rank)


def _grads(layer: MoELayer, x: torch.Tensor, how) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    layer.zero_grad()
    y = how(lambda v: layer(v).output, x)
    y.square().sum().backward()
    return tuple(p.grad.clone() for p in layer.parameters())


def test_recomputation_repeats_the_routing() -> None:
    layer = MoELayer(config(router={"noise": 4.0}))
    x = torch.randn(40, 8, requires_grad=True)
    plain = _grads(layer, x, lambda fn, v: fn(v))
    again = _grads(layer, x, lambda fn, v: checkpoint(fn, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    # other noise in the second pass: choices must still be the recorded ones, or shapes and
    # gradients break
    calls = []
    select = layer.router.select
    layer.router.select = lambda call: calls.append(call) or select(call)
    checkpoint(lambda v: layer(v).output, x, preserve_rng_state=False).square().sum().backward()
    assert len(calls) == 1


def test_a_graph_that_is_kept_recomputes_in_every_backward_pass() -> None:
    layer, x = MoELayer(config(router={"noise": 4.0})), torch.randn(9, 8, requires_grad=True)
    y = checkpoint(lambda v: layer(v).output, x).square().sum()
    grads = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(3)]
    assert all(torch.equal(grads[0], grad) for grad in grads) and grads[0].any()


def test_reentrant_recomputation_replays_in_any_order() -> None:
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    layer = MoELayer(config(router={"noise": 4.0}))
    chosen, select = [], layer.router.select
    layer.router.select = lambda call: chosen.append(call) or select(call)
    xs = [torch.randn(n, 8, requires_grad=True) for n in (6, 9)]
    outs = [torch_checkpoint(lambda v: layer(v).output, x, use_reentrant=True) for x in xs]
    for out in outs[::-1]:
        out.sum().backward()
    assert len(chosen) == 2
