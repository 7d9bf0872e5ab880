"""DiLoCo's outer optimizer alone."""

from __future__ import annotations

import pytest
import torch

from moe_plugin.training.resilience.averaging_peers import OuterNesterov

pytestmark = pytest.mark.fast


def test_it_is_sgd_of_torch_on_the_mean_change() -> None:
    outer = OuterNesterov(lr=0.5, momentum=0.8)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)]
    theirs = [torch.nn.Parameter(x.clone()) for x in weights]
    momenta = [torch.zeros_like(x) for x in weights]
    reference = torch.optim.SGD(theirs, lr=0.5, momentum=0.8, nesterov=True)
    for _ in range(3):
        changes = [torch.randn(x.shape, generator=generator) for x in weights]
        for x, change in zip(theirs, changes, strict=True):
            x.grad = change.clone()
        reference.step()
        outer.step(weights, momenta, changes)
        torch.testing.assert_close(weights, [x.detach() for x in theirs])


def test_refuses_what_diverges() -> None:
    """By value and bound."""
    with pytest.raises(ValueError, match="outer lr=0: must be > 0"):
        OuterNesterov(lr=0)
    with pytest.raises(ValueError, match="outer momentum=1: must be in"):
        OuterNesterov(momentum=1)
