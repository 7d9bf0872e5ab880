"""Dropout inside experts: which values it takes, scale, evaluation, recomputation, by strategy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_plugin.kernels.expert_ffn import strategies
from moe_plugin.layer import MoELayer

pytestmark = pytest.mark.fast

P, WIDTH = 0.25, 64


def layer(compute: str = "auto", dropout: float = P, **experts: object) -> MoELayer:
    torch.manual_seed(1)
    return MoELayer(WIDTH, num_experts=4, router={"top_k": 1, "normalize": "none"},
                    experts={"hidden_dim": WIDTH, "compute": compute, "activation": "relu",
                             "dropout": dropout, **experts})


def shows_its_mask(made: MoELayer) -> MoELayer:
    """Inner values are 1 for every token, and the output is the inner values times the weight."""
    experts = made.experts
    with torch.no_grad():
        experts.w_in_LDF.zero_(), experts.bias_in_LF.fill_(1.0), experts.bias_out_LD.zero_()
        experts.w_out_LFD.copy_(torch.eye(WIDTH).expand_as(experts.w_out_LFD))
        made.router.weight_ED.zero_()  # every weight is 1/4
    return made


@pytest.mark.parametrize("compute", [entry.name for entry in strategies if not entry.why_not()])
def test_values_are_dropped_by_chance_and_the_rest_is_scaled(compute: str) -> None:
    made = shows_its_mask(layer(compute))
    inner_TF = 4 * made(torch.randn(400, WIDTH)).output.detach()
    dropped_TF = inner_TF == 0
    torch.testing.assert_close(inner_TF[~dropped_TF],
                               torch.full_like(inner_TF[~dropped_TF], 1 / (1 - P)))
    assert float(dropped_TF.float().mean()) == pytest.approx(P, abs=0.015)  # 5 deviations
    assert 0.1 < float(dropped_TF.float().mean(0).min())  # every column, not whole rows or columns
    torch.testing.assert_close(4 * made.eval()(torch.randn(9, WIDTH)).output,
                               torch.ones(9, WIDTH))


def gradients(made: MoELayer, x_TD: Tensor, recompute: bool) -> list[Tensor]:
    torch.manual_seed(3)
    if recompute:
        y_TD = checkpoint(lambda x: made(x).output, x_TD, use_reentrant=False)
    else:
        y_TD = made(x_TD).output
    found = torch.autograd.grad(y_TD.square().sum(), [x_TD, *made.experts.parameters()])
    return [y_TD.detach(), *found]


@pytest.mark.parametrize("shared", [0, 32])
def test_a_recomputation_drops_the_same_values(shared: int) -> None:
    made, x_TD = layer(shared_hidden_dim=shared), torch.randn(50, WIDTH, requires_grad=True)
    for once, again in zip(gradients(made, x_TD, False), gradients(made, x_TD, True), strict=True):
        torch.testing.assert_close(again, once)


def test_without_probability_or_outside_training_nothing_changes() -> None:
    with_dropout, without = layer(shared_hidden_dim=32), layer(dropout=0.0, shared_hidden_dim=32)
    x_TD = torch.randn(50, WIDTH)
    assert torch.equal(with_dropout.eval()(x_TD).output, without.eval()(x_TD).output)
    assert not torch.allclose(with_dropout.train()(x_TD).output, without.train()(x_TD).output)


def test_a_probability_out_of_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"experts.dropout=1.0.*\[0, 1\)"):
        layer(dropout=1.0)
